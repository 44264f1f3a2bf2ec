"""The interface between attention variants and engines.

A variant defines its equation, and the same scores in one normal form:

    t_ijr = c query[i] · key[j, r]                     products of R pairs of vectors
    l_ij = log Σ_r exp(c_r t_ijr + a_ir + β_jr)        reduce = soft
           max_r (c_r t_ijr + a_ir + β_jr)             reduce = hard
           Σ_r c_r (t_ijr + s_r ε_ijr)                 reduce = sum, over maps that all heads share
           f(t_ij1 … t_ijR)                            reduce = a function of such maps
    attn_weights[i, j] ∝ exp(l_ij)

Engines do not depend on variants. A variant lists the features it needs, and an engine those it
lacks; from these two tables `backends` derives support and error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.draws import normal_noise, philox_words
from lit_probattn.attention.masks import Block, span
from lit_probattn.attention.numerics import (
    first_maximum,
    grouped_scores,
    log_sum_exp,
    map_heads,
    masked_softmax,
    reference_weights,
    repeat_heads,
    split_precision,
)
from lit_probattn.randomness import STREAM_NOISE, RandomKey

Backend = Literal["auto", "reference", "sdpa", "blockwise", "native", "flex", "triton"]

BACKENDS: tuple[str, ...] = get_args(Backend)
# Backends for CUDA only.
GPU_BACKENDS = ("flex", "triton")

# Widest value head of PyTorch's CUDA kernels: wider values of heads that share a map are split.
WIDEST_VALUE = 256


@dataclass(frozen=True)
class Engine:
    """One implementation of attention for all variants that it supports, with its limits.

    Args:
        compute: returns (B, H, N, E_v) of a call and a variant, in at least the queries' dtype.
        lacks: unsupported features of variants and calls, each with a reason ("cannot …"); `{}` is
            replaced by the option that requires the feature.
        limits: largest sizes, by the names of `Variant.sizes`.
        missing: returns why the engine cannot run here ("cannot …"): device, compiler, self-test.
    """

    compute: Callable[[HeadCall, Any], Tensor]
    lacks: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    missing: Callable[[HeadCall, Any], str | None] = lambda call, variant: None


def first_lack(needs: Mapping[str, str], lacks: Mapping[str, str]) -> str | None:
    """Return the reason for the first feature that is needed and lacking, or None.

    Args:
        needs: features, each with the option that requires it.
        lacks: features, each with a reason; `{}` is replaced by the option.
    """
    found = (reason.format(needs[name]) for name, reason in lacks.items() if name in needs)
    return next(found, None)


class Variant:
    """Base of every variant: an immutable record of tensors and switches, without parameters.

    A variant defines `name`, its equation in `scores`, and its normal form in `lower`; all engines
    that lack none of its `needs` then support it. Without a normal form, only the reference and the
    variant's `own_engines` do.
    """

    name: ClassVar[str]
    # Additional engines, or replacements of common ones; `backends.engines_of` returns all.
    own_engines: ClassVar[Mapping[str, Engine]] = {}
    # Row of `backends.AUTO`.
    kind: str = "mixture"
    # Score tensors per head that the reference stores; used to choose a backend.
    score_maps: int = 1
    # Added to the sum of exponentials of every row, by the reference only.
    row_eps: float = 0.0
    # Families of fused kernels, as folder/family of `kernels/`; the default options' family first.
    kernels: ClassVar[tuple[str, ...]] = ()
    # Whether there are scores before a softmax.
    has_scores: ClassVar[bool] = True
    # Whether the scores support a factor other than 1/√E.
    takes_scale: ClassVar[bool] = True
    # The implementation whose products `cost` counts.
    stated_backend: ClassVar[Backend] = "reference"

    def __init_subclass__(cls) -> None:
        """Drop the parent's normal form and engines in a subclass that redefines the scores."""
        own = vars(cls).keys()
        if own & {"scores", "normalise"} and "lower" not in own:
            cls.lower = Variant.lower  # type: ignore[method-assign]
        if own & {"scores", "normalise", "lower"} and "own_engines" not in own:
            cls.own_engines = {}

    def scores(self, call: HeadCall) -> Tensor:
        """Return the scores before bias, mask and softmax by the equation, (B, H, N, L).

        Query and key have the dtype of scores and sums, at least float32.
        """
        raise NotImplementedError(f"{self.name} has no scores")

    def lower(self, call: HeadCall, *, own_keys: bool = False) -> Scores:
        """Return the scores in normal form, up to constants per row.

        Query and key have the call's dtype; terms are computed from the rounded vectors in at least
        float32. With `own_keys`, every component has a separate key, and there are no coefficients.

        If the call has a part of the keys (`call.first_key`), the term of a key must not depend on
        other keys, and the omitted constant of a row must be the same for all parts, or zero with
        `row_eps`. β of the first `call.num_terms` keys is not read, and may be omitted.
        """
        raise NotImplementedError(f"{self.name} has no normal form")

    def needs(self) -> dict[str, str]:
        """Return the needed features that not all engines have, with the option that requires each.

        Names are keys of `Engine.lacks`: `maximum`; `function` of maps, with `power` for powers and
        `function without layers` for all others but layers; `map noise`, `head noise`, `row_eps`,
        `normaliser`, `own scores`, `own weights`; `positions`, if a key or its terms depend on its
        position, and `absolute positions`, if scores depend on more than the distance of query and
        key; and the keys of `engines.table.LACKS_OF_CROSS_ATTENTION`.
        """
        return {}

    def sizes(self, call: HeadCall) -> dict[str, int]:
        """Return the sizes that engines may limit, by the names of `Engine.limits`."""
        return {}

    def normalise(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """Return weights of scores (B, H, N, L) over allowed pairs; fully masked rows are zero."""
        return masked_softmax(scores, allowed, self.row_eps)

    def check(self, call: HeadCall) -> None:
        """Raise if the variant does not support the call.

        Raises:
            ValueError: the bias, scale or cache is not supported; the message names an alternative.
        """

    def weights(self, call: HeadCall) -> Tensor:
        """Return the attention weights (B, H, N, L) by the equation, without dropout."""
        return reference_weights(self.scores(call.precise()), call.masks, self.normalise)

    @property
    def kernel(self) -> str:
        """The family of `kernels` for these options."""
        return self.kernels[0] if self.kernels else ""


# ---- the normal form -----------------------------------------------------------------------------

NoiseKind = Literal["none", "global", "local", "local_global"]

# The block of a call without noise, which reads no positions.
NO_BLOCK = Block(range(0), range(0))


@dataclass(frozen=True)
class ScoreNoise:
    """One draw of the score noise ε, which every backend can read block by block.

    Args:
        kind: `global` (one map per global head, shared by the local heads), `local` (one per
            local head, or per unit of the first mixing layer) or `local_global`.
        key: identifies the draw.
        num_maps: maps of the local kinds.
        first_row: position of query 0 among all tokens, so that a cached step has the noise of the
            full pass.
    """

    kind: NoiseKind
    key: RandomKey
    num_maps: int
    first_row: int = 0

    def draw(self, like: Tensor, block: Block, num_maps: int) -> Tensor:
        """Return the noise of a block, (B, num_maps, n, l), in the dtype of `like`."""
        rows = span(block.rows.start + self.first_row, block.rows.stop + self.first_row)
        return normal_noise(
            self.key, like.shape[0], num_maps, rows, block.cols, like.device, like.dtype
        )

    def words(self, like: Tensor) -> Tensor:
        """Return the words from which a kernel draws the noise of a batch, (2 + B,) int64."""
        return philox_words(self.key, STREAM_NOISE, like.shape[0], like.device)


@dataclass(frozen=True)
class Noise:
    """s ε on maps (`per_head` False: s (R,)) or on local scores (s (H,), or (1,) for all heads)."""

    scale: Tensor
    draws: ScoreNoise
    num_maps: int
    per_head: bool = False

    def added(self, maps: Tensor, block: Block) -> Tensor:
        """Return maps (B, …, n, l) plus the noise of a block."""
        draw = self.draws.draw(maps, block, self.num_maps)
        return torch.addcmul(maps, self.scale[:, None, None], draw)


@dataclass(frozen=True)
class MapFunction:
    """Local scores as a function of the maps of a block, differentiable and pure.

    Args:
        function: (maps (B, R, n, l), block, *tensors) -> (B, H or 1, n, l).
        tensors: other inputs of the function.
        form: the same function for kernels, as two layers with a ReLU between them or as a power.
            None means that it has another form.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    form: Layers | Power | None = None


class Layers(NamedTuple):
    """W₂ ReLU(W₁ maps + bias): first (U, R), bias (U,) or None, second (H, U) or None.

    Noise is added to the maps, or if it is `per_head` to the units W₁ maps.
    """

    first: Tensor
    bias: Tensor | None
    second: Tensor | None
    noise: Noise | None = None


class Power(NamedTuple):
    """log (map² + 1e-12)^(degree / 2) of the map of a head, for an even degree."""

    degree: int


@dataclass(frozen=True)
class Normaliser:
    """Replaces the softmax; differentiable and pure.

    Args:
        function: (scores (B, H, n, l), allowed or None, *tensors) -> weights, zeros in fully masked
            rows.
        tensors: other inputs of the function.
        score_maps: tensors of a block's size that it keeps.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    score_maps: int = 1


@dataclass(frozen=True)
class Scores:
    """Scores of a call in normal form; constants per row may be omitted.

    Args:
        query: (B, H, N, E); (B, R, N, E) if all heads share the maps.
        key: (B, H_key, R, L, E): one per component, R = K, or one for all, R = 1; (B, R, 1, L, E)
            if all heads share the maps.
        scale: c.
        coef: c_r, (H_key, K), or (H_key, 1) in a `fused` call. None means 1. For `sum`, (H, R), or
            (1, R) if all heads are equal.
        row: a, (B, H, N, K), whose first component is 0 if R = K. None means 0.
        col: β, (B, H_key, K, L). None means 0.
        reduce: how components are reduced to scores.
        noise: noise of a sum.
        normaliser: replaces the softmax.
    """

    query: Tensor
    key: Tensor
    scale: float = 1.0
    coef: Tensor | None = None
    row: Tensor | None = None
    col: Tensor | None = None
    reduce: Literal["soft", "hard", "sum"] | MapFunction = "soft"
    noise: Noise | None = None
    normaliser: Normaliser | None = None

    @property
    def shares_maps(self) -> bool:
        """Whether all heads use the same R maps."""
        if isinstance(self.reduce, MapFunction):
            return not isinstance(self.reduce.form, Power)
        return self.reduce == "sum"

    @property
    def heads_are_alike(self) -> bool:
        """Whether all heads have one map."""
        if self.reduce != "sum" or self.coef is None or len(self.coef) > 1:
            return False
        return self.noise is None or not self.noise.per_head

    @property
    def num_components(self) -> int:
        """K."""
        given = (self.key, 2), (self.coef, 1), (self.row, 3), (self.col, 2)
        return max(x.shape[dim] for x, dim in given if x is not None)

    def reduced(self, block: Block = NO_BLOCK) -> Tensor:
        """Return l of a block for which query, key and terms are sliced; (B, H, n, l).

        (B, 1, n, l) if all heads have one map.
        """
        query = self.query if self.scale == 1.0 else self.query * self.scale
        if isinstance(self.reduce, MapFunction):
            maps = grouped_scores(query, self.key[:, :, 0])
            return self.reduce.function(maps, block, *self.reduce.tensors)
        if self.reduce == "sum":
            assert self.coef is not None
            noise, maps = self.noise, query @ self.key[:, :, 0].mT
            if noise is not None and not noise.per_head:
                maps = noise.added(maps, block)
            local = map_heads(self.coef, maps)
            return noise.added(local, block) if noise is not None and noise.per_head else local
        heads, found = query.shape[1], []
        products = [grouped_scores(query, key) for key in self.key.unbind(2)]
        for r in range(self.num_components):
            t = products[min(r, len(products) - 1)]
            if self.coef is not None:
                t = t * repeat_heads(self.coef[None], heads)[:, :, r, None, None]
            if self.row is not None:
                t = t + self.row[..., r, None]
            if self.col is not None:
                t = t + repeat_heads(self.col[:, :, r, None], heads)
            found.append(t)
        return first_maximum(found) if self.reduce == "hard" else log_sum_exp(found)

    def as_dots(self) -> tuple[Tensor, Tensor]:
        """Return vectors whose plain products are l_ij / c for `sum`, or t_ijr / c for R = K.

        For `sum`, the query becomes [c_1 q_1 | … | c_R q_R] and the key [k_1 | … | k_R], one for
        all heads. Otherwise, without coefficients, [q, 1, a_2 …] and key r [k_r, β_r, one-hot r];
        in low precision each additional coordinate is split into parts.

        Returns:
            query (B, H, N, E') and key (B, H_key, K, L, E').
        """
        if self.reduce == "sum":
            assert self.coef is not None
            assert self.noise is None
            query, key = concatenate_heads(self.query, self.key[:, :, 0], self.coef)
            return query, key[:, :, None]
        assert self.reduce == "soft", "the table of engines keeps other forms away"
        assert self.coef is None
        assert self.row is None or self.scale == 1.0
        if self.col is None and self.row is None:
            return self.query, self.key
        rows, cols = [self.query], [self.key]
        if self.col is not None:
            parts = split_precision(self.col[..., None] / self.scale, self.key.dtype)
            rows += [torch.ones_like(self.query[..., :1])] * len(parts)
            cols += parts
        if self.row is not None:
            parts = split_precision(self.row[..., 1:], self.query.dtype)
            hot = torch.eye(self.key.shape[2], dtype=self.key.dtype, device=self.key.device)
            rows += parts
            cols += [hot[:, None, 1:].expand(*self.key.shape[:-1], -1)] * len(parts)
        return torch.cat(rows, -1), torch.cat(cols, -1)


def concatenate_heads(query: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and one shared key whose products are Σ_k p_kj Q_k · K_k.

    Keys become [K_1 | … | K_G] and queries [p_1j Q_1 | … | p_Gj Q_G].

    Args:
        query: (B, G, N, E).
        key: (B, G, L, E).
        weight: p, (H, G).

    Returns:
        query (B, H, N, G·E) and key (B, 1, L, G·E).
    """
    per_head = query.transpose(1, 2)[:, None] * weight[None, :, None, :, None]
    return per_head.flatten(3).to(query.dtype), key.transpose(1, 2).flatten(2)[:, None]


# ---- heads that share one map share one softmax -------------------------------------------------


def wide_heads(scores: Scores, call: HeadCall, widest: int | None = None) -> int:
    """Return how many heads may share one map and one softmax: 1 unless all have the same map.

    Their concatenated values have at most `widest` dimensions; None means the limit of PyTorch's
    kernels.
    """
    own_maps = not scores.heads_are_alike or call.dropout is not None
    for pairs in (call.masks.bias, call.masks.attn_mask):
        own_maps = own_maps or (pairs is not None and pairs.shape[1] > 1)
    if own_maps:
        return 1
    heads, head_dim = call.value.shape[1], call.value.shape[3]
    if widest is None and call.device == "cpu":
        return heads
    widest = WIDEST_VALUE if widest is None else widest
    fitting = [g for g in range(1, heads + 1) if heads % g == 0 and g * head_dim <= widest]
    return fitting[-1] if fitting else 1


def merge_values(value: Tensor, wide: int) -> Tensor:
    """(B, H, L, E_v) -> (B, H/wide, L, wide·E_v)."""
    if wide == 1:
        return value
    return value.unflatten(1, (-1, wide)).transpose(2, 3).flatten(3)


def split_values(out: Tensor, wide: int) -> Tensor:
    """(B, H/wide, N, wide·E_v) -> (B, H, N, E_v)."""
    if wide == 1:
        return out
    return out.unflatten(-1, (wide, -1)).transpose(2, 3).flatten(1, 2)


def lowered(
    compute: Callable[[HeadCall, Scores], Tensor],
    *,
    precise: bool | Callable[[HeadCall], bool] = False,
    own_keys: bool = False,
    fused: bool = False,
    widest: int | None = None,
) -> Callable[[HeadCall, Any], Tensor]:
    """Return an engine's `compute` from a function of the normal form.

    Args:
        compute: computes attention from scores in normal form.
        precise: whether heads are converted to the dtype of scores and sums, or a function of the
            call that decides it.
        own_keys: every component has a separate key, and there are no coefficients.
        fused: see `HeadCall`.
        widest: see `wide_heads`.
    """

    def engine(call: HeadCall, variant: Any) -> Tensor:
        converts = precise(call) if callable(precise) else precise
        call = call.precise() if converts else call
        call = replace(call, fused=True) if fused else call
        scores = variant.lower(call, own_keys=own_keys)
        wide = wide_heads(scores, call, widest)
        if wide == 1:
            return compute(call, scores)
        out = compute(replace(call, value=merge_values(call.value, wide)), scores)
        return split_values(out, wide)

    return engine
