"""Dropout of activations on a CPU: PyTorch's, one draw after the other, and this package's.

Measured are forward and backward of the dropout alone, and of a block of the ListOps model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import pandas as pd
import torch
from torch import Tensor, nn

from lit_probattn.attention import SoftmaxAttention
from lit_probattn.base.arguments import at_least
from lit_probattn.models.transformer import Block
from lit_probattn.randomness import Dropout
from profiling.study import Report, add_timing, command, measure_sides, shown

WIDTH, HEADS, HEAD, MLP, RATE = 64, 4, 32, 128, 0.1
PYTORCH, OWN = "PyTorch's", "16 bits"


def with_pytorchs(module: nn.Module) -> nn.Module:
    """Replace the dropout of a module by PyTorch's; return the module."""
    for part in module.modules():
        for name, child in part.named_children():
            if isinstance(child, Dropout):
                setattr(part, name, nn.Dropout(child.p))
    return module


def block() -> nn.Module:
    """Return a block of the ListOps model."""
    attention = SoftmaxAttention(WIDTH, HEADS, head_dim=HEAD, dropout=RATE)
    return Block(attention, embed_dim=WIDTH, mlp_dim=MLP, dropout=RATE)


def step(module: nn.Module, x: Tensor) -> None:
    """Run forward and backward."""
    module(x).sum().backward()


def run(options: argparse.Namespace) -> Report:
    """Time both forms of dropout at every length."""
    rows = []
    for length in options.lengths:
        x = torch.randn(options.batch, length, WIDTH, device=options.device, requires_grad=True)
        made: dict[tuple[str, str], nn.Module] = {
            ("dropout", PYTORCH): nn.Dropout(RATE),
            ("dropout", OWN): Dropout(RATE),
            ("block", PYTORCH): with_pytorchs(block()),
            ("block", OWN): block(),
        }
        sides: dict[tuple[str, str], Callable[[], object]] = {}
        for side, module in made.items():
            sides[side] = partial(step, module.to(options.device), x)
        times = measure_sides(sides, options, lambda side: {"pytorchs": (side[0], PYTORCH)})
        for (module, form), found in times.items():
            rows.append({"tokens": length, "module": module, "form": form, **found})
    table = pd.DataFrame(rows)
    return Report(
        "Dropout of activations",
        table,
        {"Forward and backward": shown(table, "tokens", "module", "form")},
        [f"width {WIDTH}, {HEADS} heads of {HEAD}, batch {options.batch}, float32, rate {RATE}"],
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser)
    add = parser.add_argument
    add("--batch", type=at_least(1), default=32, help="sequences")
    add("--lengths", type=at_least(1), nargs="+", default=[256, 1024], help="tokens of a sequence")


main = command(__name__, __doc__, run, _add_options)
