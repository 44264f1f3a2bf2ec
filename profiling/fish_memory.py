"""`python -m profiling.fish_memory`."""

from lit_probattn import forward_command

forward_command(__name__, "profiling.studies.fish_memory")
