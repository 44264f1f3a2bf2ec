"""`torch.compile` for models whose attention draws counter-based random numbers."""

import torch
from torch import nn

from lit_probattn import randomness
from lit_probattn.randomness import AttentionDropout, RandomKey


def compile_model(model: nn.Module) -> None:
    """Compile a model in place; its parameters keep their names.

    The counter-based generator runs outside the compiled graphs. Its keys are 64-bit integers that
    change with every step, and its words wrap modulo 2⁶⁴: the compiler takes neither. So the draws,
    and with them the results, are those of the model that is not compiled.
    """
    _leave_out(RandomKey, "fold")
    _leave_out(RandomKey, "philox_key")
    _leave_out(AttentionDropout, "keep")
    _leave_out(randomness, "philox4x32")
    model.compile()


def _leave_out(owner: object, name: str) -> None:
    """Replace a function by one that breaks the graph; once."""
    function = getattr(owner, name)
    if not hasattr(function, "_torchdynamo_disable"):
        setattr(owner, name, torch.compiler.disable(function))
