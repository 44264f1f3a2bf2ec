"""`python -m profiling.swin_step`."""

from lit_probattn import forward_command

forward_command(__name__, "profiling.studies.swin_step")
