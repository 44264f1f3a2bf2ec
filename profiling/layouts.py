"""`python -m profiling.layouts`."""

from lit_probattn import forward_command

forward_command(__name__, "profiling.studies.layouts")
