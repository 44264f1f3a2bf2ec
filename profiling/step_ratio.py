"""`python -m profiling.step_ratio`."""

from lit_probattn import forward_command

forward_command(__name__, "profiling.studies.step_ratio")
