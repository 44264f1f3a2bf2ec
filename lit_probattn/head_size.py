"""`python -m lit_probattn.head_size`."""

from lit_probattn import forward_command

forward_command(__name__, "lit_probattn.reproduce.head_size.__main__")
