"""`python -m profiling.ddp_overhead`."""

from lit_probattn import forward_command

forward_command(__name__, "profiling.studies.ddp_overhead")
