"""`python -m lit_probattn.export`."""

from lit_probattn import forward_command

forward_command(__name__, "lit_probattn.convert.to_safetensors")
