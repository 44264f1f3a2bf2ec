"""The normaliser weights of linear FiSH: which sum of global key sums divides a local head."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from lit_probattn.attention.fish.mixing import HeadMixing, check_choice

Normalizer = Literal["auto", "tied_abs", "nonneg", "none"]


class StateNormalizer(nn.Module):
    """Weights r_kj ≥ 0 of the normaliser z_loc[j] = Σ_k r_kj z_k.

    Source: ours; with free mixing weights p the mixed normaliser Σ_k p_kj z_k could be negative.

    Args:
        mixing: the mixing of the states.
        kind: `tied_abs`: r = |p|, which is exact for weights on the simplex; `nonneg`: softplus of
            parameters, 1/G at the start; `none`: outputs are not divided; `auto`: `tied_abs` for a
            linear mixing, else `nonneg`.

    Raises:
        ValueError: `tied_abs` without a linear mixing.
    """

    def __init__(self, mixing: HeadMixing, kind: Normalizer) -> None:
        super().__init__()
        check_choice("normalizer", kind, ("auto", "tied_abs", "nonneg", "none"))
        if kind == "auto":
            kind = "tied_abs" if mixing.mixer == "linear" else "nonneg"
        if kind == "tied_abs" and mixing.mixer != "linear":
            raise ValueError(
                f"normalizer=tied_abs takes |p| of a linear mixing, received mixer={mixing.mixer}; "
                "use nonneg"
            )
        self.kind: Normalizer = kind
        self.shape = mixing.num_heads, mixing.num_global_heads
        self.weight: nn.Parameter | None = None
        if kind == "nonneg":
            start = math.log(math.expm1(1.0 / mixing.num_global_heads))
            self.weight = nn.Parameter(torch.full(self.shape, start))

    def forward(self, first_weight: Tensor) -> Tensor:
        """Return r, (H, G), given the first weight of the mixing."""
        if self.weight is not None:
            return nn.functional.softplus(self.weight)
        if self.kind == "tied_abs":
            return first_weight.abs()
        # Divides nothing, but tells rows that see nothing from the others.
        return first_weight.new_full(self.shape, 1.0 / self.shape[1])

    def extra_repr(self) -> str:
        """The kind, for printing."""
        return f"kind={self.kind!r}"
