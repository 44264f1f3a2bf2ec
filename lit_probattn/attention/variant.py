"""What a variant of attention and the engines say to each other.

A variant gives its equation, and the same scores in one normal form:

    t_ijr = c query[i] · key[j, r]                     products of R pairs of vectors
    l_ij = log Σ_r exp(c_r t_ijr + a_ir + β_jr)        reduce = soft
           max_r (c_r t_ijr + a_ir + β_jr)             reduce = hard
           Σ_r c_r (t_ijr + s_r ε_ijr)                 reduce = sum, over maps that all heads share
           f(t_ij1 … t_ijR)                            reduce = a function of such maps
    attn_weights[i, j] ∝ exp(l_ij)

No engine knows a variant. A variant says what it needs, an engine what it lacks: two tables, from
which `backends` computes who serves what, and what a refusal says.
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
# Those that are for CUDA alone.
GPU_BACKENDS = ("flex", "triton")

# Widest value head of PyTorch's kernels on CUDA: values of heads that share a map are split to fit.
WIDEST_VALUE = 256


@dataclass(frozen=True)
class Engine:
    """One implementation of attention, for every variant that has it, and what it cannot do.

    Args:
        compute: returns (B, H, N, E_v) of a call and a variant, in at least the queries' dtype.
        lacks: features of variants and calls that it cannot serve, each with what it cannot do
            ("cannot …"); `{}` stands for the option that asks for the feature.
        limits: largest sizes, by the names of `Variant.sizes`.
        missing: says why it cannot run here ("cannot …"): device, compiler, self-test.
    """

    compute: Callable[[HeadCall, Any], Tensor]
    lacks: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    missing: Callable[[HeadCall, Any], str | None] = lambda call, variant: None


def first_lack(needs: Mapping[str, str], lacks: Mapping[str, str]) -> str | None:
    """Return what is said of the first feature that is needed and lacking, or None.

    Args:
        needs: features, each with the option that asks for it.
        lacks: features, each with what cannot be done without; `{}` stands for the option.
    """
    found = (reason.format(needs[name]) for name, reason in lacks.items() if name in needs)
    return next(found, None)


class Variant:
    """Base of every variant: a frozen value of its tensors and switches; it owns no parameters.

    One gives a `name`, its equation in `scores`, and its normal form in `lower`: then all engines
    serve it that do not lack what it `needs`. Without a normal form the reference serves it, or the
    `own_engines` that it names.
    """

    name: ClassVar[str]
    # Engines of its own, or in the place of the common ones; `backends.engines_of` has all.
    own_engines: ClassVar[Mapping[str, Engine]] = {}
    # Row of `backends.AUTO`.
    kind: str = "mixture"
    # Score tensors per head that the reference stores; for the choice of backend.
    score_maps: int = 1
    # Added to the sum of exponentials of every row, by the reference only.
    row_eps: float = 0.0
    # Families of fused kernels, as folder/family below `kernels/`; the defaults' first.
    kernels: ClassVar[tuple[str, ...]] = ()
    # Whether there are scores before a softmax.
    has_scores: ClassVar[bool] = True
    # Whether a factor other than 1/√E has a place in them.
    takes_scale: ClassVar[bool] = True
    # The implementation whose products `cost` states.
    stated_backend: ClassVar[Backend] = "reference"

    def __init_subclass__(cls) -> None:
        """Keep a subclass with scores of its own from the normal form and engines of its parent."""
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
        """Return the scores in normal form, up to what is constant in a row.

        Query and key have the dtype of the call's, and terms are those of the rounded vectors in at
        least float32. With `own_keys` every component has its key, and there are no coefficients.

        Of a part of the keys (`call.first_key`) no key's term may depend on another key, and what
        is left out of a row is the same for all parts, nothing with `row_eps`. β is not read of the
        first `call.num_terms` keys, and may be that of the others alone.
        """
        raise NotImplementedError(f"{self.name} has no normal form")

    def needs(self) -> dict[str, str]:
        """Return what not every engine or use of attention has, with the option that asks for it.

        Names are those of `Engine.lacks`: `maximum`, `function` and `function without
        layers` of several maps, `map noise`, `head noise`, `row_eps`, `normaliser`, `own scores`,
        `own weights`; `positions`, if keys count by their positions, and those of
        `engines.table.LACKS_OF_CROSS_ATTENTION`.
        """
        return {}

    def sizes(self, call: HeadCall) -> dict[str, int]:
        """Return what an engine may have limits for, by the names of `Engine.limits`."""
        return {}

    def normalise(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """Return weights of scores (B, H, N, L) over what is allowed, zeros in empty rows."""
        return masked_softmax(scores, allowed, self.row_eps)

    def check(self, call: HeadCall) -> None:
        """Refuse what the variant has no place for.

        Raises:
            ValueError: it says what the variant takes instead.
        """

    def weights(self, call: HeadCall) -> Tensor:
        """Return the maps (B, H, N, L) by the equation, without dropout."""
        return reference_weights(self.scores(call.precise()), call.masks, self.normalise)

    @property
    def kernel(self) -> str:
        """The family of `kernels` that serves these numbers."""
        return self.kernels[0] if self.kernels else ""


# ---- the normal form -----------------------------------------------------------------------------

NoiseKind = Literal["none", "global", "local", "local_global"]

# Where nothing is drawn, no block has to be named.
NO_BLOCK = Block(range(0), range(0))


@dataclass(frozen=True)
class ScoreNoise:
    """One draw of the score noise ε, which every backend can read block by block.

    Args:
        kind: `global` (one map per global head, shared by the local heads), `local` (one per
            local head, or per unit of the first mixing layer) or `local_global`.
        key: names the draw.
        num_maps: maps of the local kinds.
        first_row: position of query 0 among all tokens, so that a cached step sees the noise of
            the full pass.
    """

    kind: NoiseKind
    key: RandomKey
    num_maps: int
    first_row: int = 0

    def draw(self, like: Tensor, block: Block, num_maps: int) -> Tensor:
        """Return (B, num_maps, n, l) of a block, in the dtype of `like`."""
        rows = span(block.rows.start + self.first_row, block.rows.stop + self.first_row)
        return normal_noise(
            self.key, like.shape[0], num_maps, rows, block.cols, like.device, like.dtype
        )

    def words(self, like: Tensor) -> Tensor:
        """Return what a kernel draws the noise of a batch from, (2 + B,) int64."""
        return philox_words(self.key, STREAM_NOISE, like.shape[0], like.device)


@dataclass(frozen=True)
class Noise:
    """s ε on maps (`per_head` False: s (R,)) or on local scores (s (H,), or (1,) for all heads)."""

    scale: Tensor
    draws: ScoreNoise
    num_maps: int
    per_head: bool = False

    def added(self, maps: Tensor, block: Block) -> Tensor:
        """Return maps (B, …, n, l) with the noise of a block."""
        draw = self.draws.draw(maps, block, self.num_maps)
        return torch.addcmul(maps, self.scale[:, None, None], draw)


@dataclass(frozen=True)
class MapFunction:
    """Local scores as a function of the maps of a block, differentiable and pure.

    Args:
        function: (maps (B, R, n, l), block, *tensors) -> (B, H or 1, n, l).
        tensors: what it reads beside the maps.
        layers: the same as two layers with a ReLU between them, for kernels. None means it is
            something else.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    layers: Layers | None = None


class Layers(NamedTuple):
    """W₂ ReLU(W₁ maps + noise + bias): first (U, R), bias (U,) or None, second (H, U) or None."""

    first: Tensor
    bias: Tensor | None
    second: Tensor | None
    noise: Noise | None = None


@dataclass(frozen=True)
class Normaliser:
    """What makes weights of scores in the place of the softmax, differentiable and pure.

    Args:
        function: (scores (B, H, n, l), allowed or None, *tensors) -> weights, zeros in rows that
            see nothing.
        tensors: what it reads beside the scores.
        score_maps: tensors of a block's size that it keeps.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    score_maps: int = 1


@dataclass(frozen=True)
class Scores:
    """Scores of a call in normal form; what is constant in a row may be left out.

    Args:
        query: (B, H, N, E); (B, R, N, E) where all heads share the maps.
        key: (B, H_key, R, L, E): one for each component, R = K, or one for all, R = 1;
            (B, R, 1, L, E) where all heads share the maps.
        scale: c.
        coef: c_r, (H_key, K), or of a `fused` call (H_key, 1). None means 1. Of a sum (H, R), or
            (1, R) for all heads alike.
        row: a, (B, H, N, K), its first component 0 if R = K. None means 0.
        col: β, (B, H_key, K, L). None means 0.
        reduce: how components become scores.
        noise: of a sum.
        normaliser: in place of the softmax.
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
        """Whether all heads read the same R maps."""
        return self.reduce not in ("soft", "hard")

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
        """Return l of a block that query, key and terms are cut to; (B, H, n, l).

        (B, 1, n, l) where all heads have one map.
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
        """Return vectors whose plain products are l_ij / c of a sum, or t_ijr / c for R = K.

        Of a sum the query becomes [c_1 q_1 | … | c_R q_R] and the key [k_1 | … | k_R], one for all
        heads. Else, without coefficients, [q, 1, a_2 …] and key r [k_r, β_r, one-hot r]; in low
        precision each further coordinate is split into parts.

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

    With keys [K_1 | … | K_G] and queries [p_1j Q_1 | … | p_Gj Q_G].

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
    """Return how many heads may share one map and one softmax: 1 unless all are alike.

    Their values side by side are at most `widest` wide; None means what PyTorch's kernels take.
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
    """Return an engine's `compute` from a function of what a variant lowers to.

    Args:
        compute: attends by scores in normal form.
        precise: heads come in the dtype of scores and sums; of calls that it says this of.
        own_keys: every component has its key, and there are no coefficients.
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
