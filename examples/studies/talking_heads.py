"""Talking heads before the softmax: FiSH compared with an implementation that stores all maps.

    scores_o = Σ_h p_oh q_h · k_h / √E,    weights_o = softmax(scores_o)

FiSH with as many global heads as heads is equivalent (`FiSHAttention(num_global_heads=num_heads,
mixer="linear", noise="none")`). The implementation with stored maps multiplies all heads, mixes
them by one matrix product, applies the softmax and multiplies by the values, with autograd.
Self-attention of a layer is measured, forward and backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from lit_probattn.attention import Attention, FiSHAttention, SoftmaxAttention
from lit_probattn.attention.layer import LayerOptions
from lit_probattn.attention.numerics import map_heads
from lit_probattn.base.arguments import at_least
from profiling.study import Report, add_timing, backend_of, command, measure_sides, shown

STORED, FUSED, SOFTMAX = "stored maps", "FiSH", "softmax"


class BeforeTheSoftmax(Attention):
    """Talking heads that store all maps."""

    def build(self, options: LayerOptions) -> None:
        """Add the mixing matrix."""
        super().build(options)
        self.before = torch.nn.Parameter(torch.eye(self.num_heads))

    def reference_scores(self, query: Tensor, key: Tensor, *positions: Tensor) -> Tensor:
        """Return mixed dot products."""
        return map_heads(self.before.to(query.dtype), query @ key.mT / query.shape[-1] ** 0.5)


def layers(embed_dim: int, num_heads: int, seed: int = 0) -> dict[str, Attention]:
    """Return softmax attention and two equivalent implementations of talking heads."""
    torch.manual_seed(seed)
    plain = BeforeTheSoftmax(embed_dim, num_heads, backend="reference")
    with torch.no_grad():
        plain.before.add_(0.2 * torch.randn_like(plain.before))
    options: dict[str, Any] = {"num_global_heads": num_heads, "mixer": "linear", "noise": "none"}
    fish = FiSHAttention(embed_dim, num_heads, **options)
    own = plain.state_dict()
    own["core.mixing.weights.0"] = own.pop("before")
    fish.load_state_dict(own)
    return {STORED: plain, FUSED: fish, SOFTMAX: SoftmaxAttention(embed_dim, num_heads)}


def step(layer: Attention, x: Tensor) -> None:
    """Run forward and backward."""
    layer(x).square().mean().backward()
    layer.zero_grad(set_to_none=True)


def run(options: argparse.Namespace) -> Report:
    """Time all implementations at every length."""
    rows, worst = [], 0.0
    for length in options.lengths:
        made = layers(options.embed_dim, options.num_heads, options.seed)
        x = torch.randn(options.batch, length, options.embed_dim, device=options.device)
        sides: dict[str, Callable[[], object]] = {}
        for name, layer in made.items():
            sides[name] = partial(step, layer.to(options.device), x)
        with torch.no_grad():
            error = (made[STORED](x) - made[FUSED](x)).abs().max()
        worst = max(worst, float(error))
        backends = {name: backend_of(side) for name, side in sides.items()}
        times = measure_sides(sides, options, lambda _: {"plain": STORED})
        for name, found in times.items():
            case = {"tokens": length, "form": name, "backend": backends[name]}
            rows.append({**case, **found})
    table = pd.DataFrame(rows)
    fused = table[table["form"] == FUSED]
    low, high = fused["time_over_plain"].min(), fused["time_over_plain"].max()
    return Report(
        "Talking heads before the softmax",
        table,
        {"Forward and backward of a layer": shown(table, "tokens", "form", "backend")},
        [
            f"width {options.embed_dim}, {options.num_heads} heads, batch {options.batch}, "
            f"float32; outputs of both implementations differ by at most {worst:.0e}"
        ],
        finding=f"FiSH's engine takes {low:.2f} to {high:.2f} times as long as stored maps",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser)
    add = parser.add_argument
    add("--embed_dim", type=at_least(1), default=256, help="width")
    add("--num_heads", type=at_least(1), default=4, help="heads")
    add("--batch", type=at_least(1), default=1, help="sequences")
    add("--lengths", type=at_least(1), nargs="+", default=[256, 1024], help="tokens of a sequence")


main = command(__name__, __doc__, run, _add_options)
