"""Head mixing of queries or of keys alone, before their products: what follows is softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from lit_probattn.attention.backends import AutoRule, Backend, BackendFunction
from lit_probattn.attention.blockwise import Block
from lit_probattn.attention.core import Choice, Core, HeadCall, HeadLayout, Learned
from lit_probattn.attention.fish.functions import local_scores
from lit_probattn.attention.fish.mixing import (
    HeadMixing,
    Mixer,
    MixingBias,
    MixingConstraint,
    MixingInit,
    MixingValues,
)
from lit_probattn.attention.functional import Heads, compute_dtype, grouped_scores
from lit_probattn.attention.masks import span
from lit_probattn.attention.softmax import SoftmaxArguments, SoftmaxCore, softmax_scores

MixOn = Literal["scores", "query", "key"]


@dataclass(frozen=True)
class HeadMixingArguments:
    """What it needs besides heads and masks.

    Args:
        mixing: weights, without noise.
        last_bias: of the last layer, (H,), where it is added; a softmax cancels that of keys.
        num_heads: H.
        mix_on: what is mixed.
        scale_ratio: factor on the products, in units of 1/√E.
    """

    mixing: MixingValues
    last_bias: Tensor | None
    num_heads: int
    mix_on: MixOn
    scale_ratio: float = 1.0

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
    """Return local queries or keys from global ones, entry by entry, with the weights of a mixing.

    Source: released code of FiSH, NeurIPS 2022 (translation and images, modes `q` and `k`); x is
    the vector of the G global entries of one position:
        linear     x̃_j = Σ_k p_kj x_k
        mlp        x̃ = W_2 ReLU(W_1 x + b_1) + b_2
    Departs from the source: in translation, decoding step by step multiplies queries by 1/√E before
    the mixing and training after it, which differ where there are biases; here always after.

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


def _after_mixing(attend: BackendFunction) -> BackendFunction:
    """Return an implementation of softmax attention behind the mixing."""

    def run(given: Heads, arguments: HeadMixingArguments) -> Tensor:
        query, key = arguments.local(given.query, given.key)
        softmax = SoftmaxArguments("dot", arguments.scale_ratio)
        return attend(given._replace(query=query, key=key), softmax)

    return run


class HeadMixingCore(Core):
    """Softmax attention whose H local queries, or keys, are mixed from G global ones.

    The layout has G heads of what is mixed and H of everything else; see `FiSHAttention`. Mixing
    takes N·E·G·H products, against N²·G·H where scores are mixed, so that every implementation of
    softmax attention serves.
    """

    variant: ClassVar[str] = "head_mixing"
    row_operators = True
    backends: ClassVar[Mapping[str, BackendFunction]] = {
        name: _after_mixing(attend) for name, attend in SoftmaxCore.backends.items()
    }
    auto_rules: Mapping[str, AutoRule] = SoftmaxCore.auto_rules
    steps_over_cache: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = SoftmaxCore.kernels

    def __init__(
        self,
        layout: HeadLayout,
        backend: Backend = "auto",
        *,
        mix_on: MixOn,
        mixer: Mixer = "linear",
        mixer_ratios: Sequence[float] | None = None,
        mixing: MixingConstraint = "relaxed",
        mixing_init: MixingInit = "torch_linear",
        mixing_bias: MixingBias = "hidden",
    ) -> None:
        super().__init__(layout, backend)
        self.mix_on: MixOn = mix_on
        self.mixing = HeadMixing(
            layout.query if mix_on == "query" else layout.key,
            layout.out,
            mixer=mixer,
            constraint=mixing,
            init=mixing_init,
            bias=mixing_bias,
            last_bias_matters=mix_on == "query",
            ratios=(1.0,) if mixer_ratios is None else tuple(mixer_ratios),
        )

    def arguments(self, call: HeadCall) -> HeadMixingArguments:
        """Return the mixing and the scale of a call."""
        mixing, ratio = self.mixing, call.scale_ratio()
        last = mixing.last_bias if mixing.last_bias_matters else None
        values = mixing.values(None)
        return HeadMixingArguments(values, last, self.layout.out, self.mix_on, ratio)

    def choose(self, call: HeadCall, backend: str) -> Choice:
        """Return the mixing; keys as they are."""
        return Choice(backend, call.key, self.arguments(call))

    def scores(self, call: HeadCall) -> Tensor:
        """Return `softmax_scores` of mixed heads."""
        dtype, arguments = compute_dtype(call.query), self.arguments(call)
        query, key = arguments.local(call.query.to(dtype), call.key.to(dtype))
        return softmax_scores(query, key, SoftmaxArguments("dot", arguments.scale_ratio))

    def cached_scores(
        self, query: Tensor, key: Tensor, offset: Tensor | None, cols: range, call: HeadCall
    ) -> Tensor:
        """Return the scores of a part of the cache, which holds global heads."""
        query, key = self.arguments(call).local(query, key)
        return grouped_scores(query * self.layout.head_dim**-0.5, key)

    def learned(self) -> dict[str, Learned]:
        """Return the mixing weights."""
        return self.mixing.learned(None)

    def extra_repr(self) -> str:
        """What is mixed, for printing."""
        return f"mix_on={self.mix_on!r}"


def check_mix_on(mix_on: MixOn, options: Mapping[str, Any]) -> None:
    """Refuse options of scores where queries or keys are mixed.

    Raises:
        ValueError: there is noise, or a scale before the mixing.
    """
    if mix_on == "scores":
        return
    if options["noise"] != "none":
        raise ValueError(
            f"mix_on={mix_on} has no global scores to add noise to, received "
            f"noise={options['noise']}: set noise=none"
        )
    if options["scale_position"] != "after":
        raise ValueError(
            f"mix_on={mix_on} mixes before the products, so the scale comes after: set "
            f"scale_position=after, received {options['scale_position']}"
        )
