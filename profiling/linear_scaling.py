"""`python -m profiling.linear_scaling`."""

from lit_probattn import forward_command

forward_command(__name__, "profiling.studies.linear_scaling")
