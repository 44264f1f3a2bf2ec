"""`python -m profiling.running_text`."""

from lit_probattn import forward_command

forward_command(__name__, "profiling.studies.running_text")
