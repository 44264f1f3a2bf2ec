"""What a layer saw, and how well it was converted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_probattn.attention import Attention

# Rows of a map that enter distances and normalisers, evenly spread over a sample.
_ROWS = 256


@dataclass(frozen=True)
class LayerInputs:
    """What a layer saw: its inputs, with what was real.

    Args:
        x: (S, N, C).
        key_mask: (S, N) bool. None means all.
        is_causal: whether the layer is used with a causal mask.
    """

    x: Tensor
    key_mask: Tensor | None = None
    is_causal: bool = False

    def part(self, samples: slice) -> LayerInputs:
        """Return some of the samples."""
        mask = None if self.key_mask is None else self.key_mask[samples]
        return LayerInputs(self.x[samples], mask, self.is_causal)

    @property
    def real(self) -> Tensor:
        """Real tokens, (S, N) bool."""
        if self.key_mask is None:
            return torch.ones(self.x.shape[:2], dtype=torch.bool, device=self.x.device)
        return self.key_mask


@dataclass(frozen=True)
class LayerErrors:
    """How well one layer was converted; errors are relative root mean squares.

    Args:
        groups: old heads of every new head.
        logit_error: of the bilinear forms, from the discarded singular values.
        output_error: of the layer's output without its bias, on inputs that were not fitted where
            there were enough. None without inputs.
        held_out: whether `output_error` is on inputs that were not fitted.
    """

    groups: list[list[int]]
    logit_error: float
    output_error: float | None
    held_out: bool

    def line(self) -> str:
        """One line for a person."""
        pairs = " ".join("+".join(map(str, group)) for group in self.groups)
        output = "not measured (no inputs)"
        if self.output_error is not None:
            output = f"{100 * self.output_error:.1f} %"
            output += " on held-out inputs" if self.held_out else " on the fitted inputs"
        return f"heads {pairs}: logit error {100 * self.logit_error:.1f} %, output error {output}"


def sample_maps(layer: Attention, one: LayerInputs) -> Tensor:
    """Return the maps of a single sample, (H, N, N)."""
    return layer.weights(one.x, key_mask=one.key_mask, is_causal=one.is_causal)[0]


def query_rows(one: LayerInputs) -> Tensor:
    """Return up to `_ROWS` real positions of a single sample, evenly spread."""
    places = one.real[0].nonzero()[:, 0]
    if len(places) <= _ROWS:
        return places
    return places[torch.linspace(0, len(places) - 1, _ROWS).long()]
