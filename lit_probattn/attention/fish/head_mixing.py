"""Head mixing of queries or keys, before their products, followed by softmax attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core, ParameterTable
from lit_probattn.attention.fish.functions import local_scores
from lit_probattn.attention.fish.mixing import (
    MixingBias,
    MixingOptions,
    MixingValues,
)
from lit_probattn.attention.masks import Block, span
from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.attention.softmax import Softmax
from lit_probattn.attention.variant import Scores

MixOn = Literal["scores", "query", "key"]


@dataclass(frozen=True)
class MixedHeads(Softmax):
    """Softmax attention whose H local queries, or keys, are mixed from G global ones.

    Mixing needs N·E·G·H products, compared with N²·G·H for mixing of scores, and all backends of
    softmax attention support it.

    Args:
        mixing: weights, without noise.
        last_bias: bias of the last layer, (H,), if it matters; a softmax cancels it for keys.
        num_heads: H.
        mix_on: mixed heads, `query` or `key`.
    """

    name = "head_mixing"

    mixing: MixingValues = field(kw_only=True)
    last_bias: Tensor | None = field(kw_only=True)
    num_heads: int = field(kw_only=True)
    mix_on: MixOn = field(kw_only=True)

    def scores(self, call: HeadCall) -> Tensor:
        """Return the scores of mixed heads."""
        return super().scores(self._after_mixing(call))

    def lower(self, call: HeadCall, *, own_keys: bool = False) -> Scores:
        """Return the normal form of softmax attention with mixed heads."""
        return super().lower(self._after_mixing(call), own_keys=own_keys)

    def _after_mixing(self, call: HeadCall) -> HeadCall:
        query, key = self.local(call.query, call.key)
        return replace(call, query=query, key=key)

    def local(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return query and key of all local heads, in the dtype of `query`."""
        if self.mix_on == "query":
            return self._mixed(query), key
        return query, self._mixed(key)

    def _mixed(self, heads: Tensor) -> Tensor:
        wide, mixing = heads.to(compute_dtype(heads)), self.mixing.to(compute_dtype(heads))
        last = self.last_bias
        local = mix_heads(wide, mixing, None if last is None else last.to(wide.dtype))
        return local.to(heads.dtype).expand(-1, self.num_heads, -1, -1)


def mix_heads(heads: Tensor, mixing: MixingValues, last_bias: Tensor | None = None) -> Tensor:
    """Return local queries or keys from global ones, entry by entry, by the weights of a mixing.

    Source: released code of FiSH, NeurIPS 2022 (translation and images, modes `q` and `k`); x is
    the vector of the G global entries of one position:
        linear     x̃_j = Σ_k p_kj x_k
        mlp        x̃ = W_2 ReLU(W_1 x + b_1) + b_2
    Departs from the source: in translation, step-by-step decoding multiplies queries by 1/√E before
    the mixing, and training after it, which differ with biases; here always after.

    Args:
        heads: (B, G, N, E).
        mixing: weights, without noise.
        last_bias: b_2, (H,).

    Returns:
        (B, H, N, E), or (B, 1, N, E) if the mixing is shared.
    """
    whole = Block(span(0, heads.shape[2]), range(heads.shape[3]))
    local = local_scores(heads, mixing, None, whole)
    return local if last_bias is None else local + last_bias[:, None, None]


@dataclass(frozen=True, kw_only=True)
class HeadMixingOptions(MixingOptions):
    """Options of a mixing of scores, queries or keys.

    Args:
        mixing_bias: `hidden` (before a ReLU), `all` (also in the last layer, which has an effect
            only if queries are mixed) or `none`.
        mix_on: `scores`, or only the `query` or `key` heads, before the products; the other then
            has H heads, and there is no noise.
    """

    mixing_bias: MixingBias = "hidden"
    mix_on: MixOn = "scores"


class HeadMixingCore(Core):
    """Mixing weights. The layout has G heads of the mixed kind and H of all others."""

    makes = MixedHeads

    options_class = HeadMixingOptions

    def make_parameters(self, options: HeadMixingOptions) -> None:
        """Create the mixing weights."""
        if options.mix_on == "scores":
            raise ValueError("HeadMixingCore mixes query or key, received mix_on=scores")
        layout, mix_on = self.layout, options.mix_on
        self.mix_on: MixOn = mix_on
        of_queries = mix_on == "query"
        self.mixing = options.make_mixing(
            layout.query if of_queries else layout.key,
            layout.out,
            options.mixing_bias,
            last_bias_matters=of_queries,
        )

    def variant(self, call: HeadCall) -> MixedHeads:
        """Return the variant with the mixing."""
        mixing = self.mixing
        return MixedHeads(
            mixing=mixing.values(None),
            last_bias=mixing.last_bias if mixing.last_bias_matters else None,
            num_heads=self.layout.out,
            mix_on=self.mix_on,
        )

    def learned(self) -> dict[str, ParameterTable]:
        """Return the mixing weights."""
        return self.mixing.learned(None)

    def extra_repr(self) -> str:
        """Return the mixed heads for `repr`."""
        return f"mix_on={self.mix_on!r}"
