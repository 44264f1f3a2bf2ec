"""Linear attention and MLK as the released codes of MGK compute them.

`configs/attention/as_released/` names these classes; no module imports them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.linear.features import FeatureMap
from lit_probattn.attention.linear.functions import Denominator, LinearForm, Mix, OutputScale
from lit_probattn.attention.linear.layer import LinearAttention
from lit_probattn.attention.linear.mlk import MLKAttention, MLKCore
from lit_probattn.base.arguments import options_by_name


@dataclass(frozen=True, kw_only=True)
class ReleasedSwitches:
    """Fields of `LinearForm` that only the released codes of MGK, ICML 2022, set.

    Args:
        denominator: `sum` over keys, or `sqrt_len` (divide by √N, Long Range Arena).
        eps: added to the sum.
        output_scale: factor on the output, `one` or `inv_sqrt_head_dim` (language model).
        padded_len: the N of `sqrt_len`; None takes it from the call. Needed for decoding, and where
            batches are not all padded to one length.
    """

    denominator: Denominator = "sum"
    eps: float = 0.0
    output_scale: OutputScale = "one"
    padded_len: int | None = None


class ReleasedLinearAttention(LinearAttention):
    """`LinearAttention` with what only the released codes of MGK, ICML 2022, do.

    Source: released code of MGK: Long Range Arena and language model.
    Departs from the source: nothing; `LinearAttention` is what the paper says.

    Args:
        switches: see `ReleasedSwitches`, whose fields are arguments by their names.
        common: the other arguments of `LinearAttention`.

    Raises:
        ValueError: an unknown name, or options that contradict each other; see also
            `LinearAttention`.
    """

    @options_by_name
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        switches: ReleasedSwitches = ReleasedSwitches(),
        **common: Any,
    ) -> None:
        self._switches = switches
        super().__init__(embed_dim, num_heads, **common)

    def make_form(self, features: FeatureMap) -> LinearForm:
        """Return feature map and switches."""
        return replace(super().make_form(features), **asdict(self._switches))


class ReleasedMLKCore(MLKCore):
    """`MLKCore` with a factor on the features of the second component."""

    second_scale: float = 1.0

    def shares(self, call: HeadCall) -> Tensor | None:
        """Return π of the call's keys with that factor, (H_kv, K, 1 or L)."""
        shares = super().shares(call)
        if shares is None or self.second_scale == 1.0:
            return shares
        factor = shares.new_ones(shares.shape[1])
        factor[1] = self.second_scale
        return shares * factor[:, None]


class ReleasedMLKAttention(ReleasedLinearAttention, MLKAttention):
    """`MLKAttention` with what only the released codes of MGK, ICML 2022, do.

    Source: released code of MGK: Long Range Arena and language model.
    Departs from the source: nothing; `MLKAttention` is what the paper says.

    Args:
        mix: `after` the feature map (the paper), or `before` it, φ(Σ_r π_r key[j, r]), which is
            ordinary linear attention with key weights Σ_r π_r W_r (Long Range Arena).
        shift_first_zero: start the first shift at zero.
        second_scale: factor on φ of the second component of two (`scale_w` of the language model's
            layers, where no command line sets it).
        common: the other arguments of `ReleasedLinearAttention` and `MLKAttention`.

    Raises:
        ValueError: an unknown name, or options that contradict each other; see also
            `MLKAttention`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mix: Mix = "after",
        shift_first_zero: bool = False,
        second_scale: float = 1.0,
        **common: Any,
    ) -> None:
        if not 0.0 < second_scale < float("inf"):
            raise ValueError(f"second_scale must be a positive number, received {second_scale}")
        self._mix: Mix = mix
        self._first_zero, self._second_scale = shift_first_zero, second_scale
        super().__init__(embed_dim, num_heads, **common)

    def make_form(self, features: FeatureMap) -> LinearForm:
        """Return feature map and switches, with where components are mixed."""
        return replace(super().make_form(features), mix=self._mix)

    def make_core(self, **linear: Any) -> ReleasedMLKCore:
        """Return the core, its first shift at zero if asked."""
        components = self.num_components
        if self._second_scale != 1.0 and (components != 2 or self._mix != "after"):
            raise ValueError(
                f"second_scale={self._second_scale} needs num_components=2 and mix=after, received "
                f"{components} and {self._mix}"
            )
        core = ReleasedMLKCore(self.layout, self._backend, options=self._mixture, **linear)
        core.second_scale = self._second_scale
        if self._first_zero and core.key_shift is not None:
            with torch.no_grad():
                core.key_shift[:, 0] = 0.0
        return core
