"""`python -m lit_probattn.uea_benchmark`."""

from lit_probattn import forward_command

forward_command(__name__, "lit_probattn.reproduce.uea")
