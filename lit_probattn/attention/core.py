"""Heads in, heads out: what a variant does between its projections, and one call of it.

A core owns only what is the variant's own: priors, variances, shifts, mixing weights, and the
choice of a backend. Projections, rotations and caches are the caller's: `Attention` here, or any
other model. One call is one `HeadCall`; the core answers it with one `Choice`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lit_probattn.attention.backends import (
    AUTO_RULES,
    BACKENDS,
    AutoRule,
    Backend,
    BackendFunction,
    Call,
    choose_backend,
    common_refusal,
)
from lit_probattn.attention.cache import (
    BoundedCache,
    Cache,
    KVCache,
    kept_places,
    merge_partials,
    partial_attention,
)
from lit_probattn.attention.draws import fresh_key
from lit_probattn.attention.functional import (
    Heads,
    autocast_off,
    biased,
    compute_dtype,
    grouped_values,
    masked_softmax,
    reference_weights,
)
from lit_probattn.attention.masks import Masks
from lit_probattn.base.graphs import is_symbol, is_transformed, written
from lit_probattn.base.memory import device_type
from lit_probattn.randomness import AttentionDropout, RandomKey

# With a cache, calls with at most this many new tokens read it part by part.
STEP_QUERIES = 16


@dataclass(frozen=True)
class HeadLayout:
    """How many heads the projections make, and of which size.

    Args:
        query: query heads: H; G in FiSH.
        key: key heads: H_kv; G in FiSH.
        value: value heads: H_kv; H in FiSH, G where its linear form has global values.
        out: heads of masks, bias and output: H.
        head_dim: E, size of a query or key head.
        value_head_dim: E_v, size of a value head.
        keys_per_head: keys of a position in each key head: K in MGK and MLK; 1 with shifted keys.
    """

    query: int
    key: int
    value: int
    out: int
    head_dim: int
    value_head_dim: int
    keys_per_head: int = 1


@dataclass(frozen=True)
class HeadCall:
    """One call of attention, projected and split into heads.

    Args:
        query: (B, H_q, N, E), rotated if positions are.
        key: as it is stored: (B, H_k, L, E), or (B, H_k, K, L, E) with K keys per head. The K keys
            may also come as further heads, (B, H_k·K, L, E), the keys of one head side by side.
        value: (B, H_v, L, E_v).
        masks: what each query may see, over all L keys.
        scale: factor on the products of queries and keys. None means 1/√E.
        dropout: attention dropout of this call.
        rng: names the draw of a variant's noise. None leaves the choice to the variant.
        cache: memory that query, key and value come from, the new tokens included.
        query_mask: real queries, (B, N) bool, for the M-step. None means all.
        first_query: position of the first query, where it does not follow from the cache.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    masks: Masks
    scale: float | None = None
    dropout: AttentionDropout | None = None
    rng: RandomKey | None = None
    cache: Cache | None = None
    query_mask: Tensor | None = None
    first_query: int | None = None

    @property
    def first_row(self) -> int:
        """Position of the first query among all tokens, which noise is keyed by."""
        if self.first_query is not None:
            return self.first_query
        return 0 if self.cache is None else self.masks.num_keys - self.masks.num_queries

    def scale_ratio(self) -> float:
        """Return `scale` in units of 1/√E; 1 where it is not given."""
        return 1.0 if self.scale is None else self.scale * self.query.shape[-1] ** 0.5


@dataclass(frozen=True)
class Learned:
    """Numbers that a core learned beside the projections, as studies show them.

    Args:
        values: (rows, components); a row is a head, or the layer.
        title: what the numbers are.
        component: what a column stands for.
        is_matrix: shown as a matrix, however small.
        is_share: comparable after division by the sum of a row.
        of_layer: the only row belongs to the layer.
    """

    values: Tensor
    title: str
    component: str
    is_matrix: bool = False
    is_share: bool = False
    of_layer: bool = False


class Gaussians(NamedTuple):
    """A mixture of Gaussians per key: keys (B, H_key, K, L, E), log π or None, σ² (H_prior, K)."""

    key: Tensor
    log_prior: Tensor | None
    variance: Tensor


@dataclass(frozen=True)
class Choice:
    """How a core computes one call: the backend, keys as it takes them, the variant's arguments."""

    backend: str
    key: Tensor
    arguments: Any


class Core(nn.Module):
    """A variant of attention from heads to heads; base of every core.

    Args:
        layout: heads and their sizes.
        backend: who computes it; see `lit_probattn.attention.backends`.

    Raises:
        ValueError: `backend` is unknown.
        TypeError: a part of the variant is missing; the message names it.
    """

    variant: ClassVar[str]
    backends: ClassVar[Mapping[str, BackendFunction]]
    # What `auto` chooses on each type of device.
    auto_rules: Mapping[str, AutoRule] = AUTO_RULES
    # Whether graphs of torch.compile hold the passes over rows as operators.
    row_operators: bool = False
    # Whether blocks and passes over rows are loops over positions.
    counts_blocks: ClassVar[bool] = True
    # Score tensors per head that the reference stores; for the choice of backend.
    score_maps: int = 1
    # Whether a bounded cache may give up some of the keys; such a variant has `cached_scores`.
    can_drop_keys: ClassVar[bool] = False
    # Whether `cached_scores` exists: short calls with a cache then read it part by part.
    steps_over_cache: ClassVar[bool] = False
    # The implementation whose products `cost` states.
    stated_backend: ClassVar[Backend] = "reference"
    # Families of fused kernels, as folder/family below `kernels/`; the defaults' first.
    kernels: ClassVar[tuple[str, ...]] = ()
    # Added to the sum of exponentials of every row; presets of released code set it.
    row_eps: float = 0.0
    # Whether training calls go to `observe` first.
    observes: bool = False
    # Whether there are scores before a softmax, and whether `gaussians` and `posterior` exist.
    has_scores: ClassVar[bool] = True
    has_gaussians: ClassVar[bool] = False
    has_components: bool = False
    # Says why a backend cannot serve a call ("cannot …"), or None if it can.
    refusal = common_refusal

    def __init__(self, layout: HeadLayout, backend: Backend = "auto") -> None:
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")
        lacking = [name for name in ("variant", "backends") if not hasattr(type(self), name)]
        lacking += [n for n in ("choose", "scores") if getattr(type(self), n) is getattr(Core, n)]
        if lacking:
            raise TypeError(
                f"{type(self).__name__} lacks {', '.join(lacking)}, which a core gives; a layer "
                f"that defines reference_scores(self, query, key) needs no core"
            )
        self.layout, self.backend = layout, backend
        # Backends that can serve no call, with the reason.
        self.refused: dict[str, str] = {}

    def forward(self, call: HeadCall) -> Tensor:
        """Attend; (B, H, N, E_v) in the dtype of the queries.

        Raises:
            ValueError: the heads are not those of the layout, or the variant has no place for the
                call's bias, scale or cache.
            NotImplementedError: the requested backend cannot serve the call.
        """
        self.admit(call)
        with autocast_off(call.query):
            if self.training and self.observes:
                self.observe(call)
            if self.reads_parts(call):
                out = attend_to_cache(self, call)
            else:
                choice = self.choose(call, self.pick(call))
                given = Heads(call.query, choice.key, call.value, call.masks, call.dropout)
                out = self.backends[choice.backend](given, choice.arguments)
            if isinstance(call.cache, BoundedCache):
                evict(self, call, call.cache)
        return out.to(call.query.dtype)

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's says Any

    # ------------------------------------------------------------------ the variant's part
    @abstractmethod
    def choose(self, call: HeadCall, backend: str) -> Choice:
        """Return what a backend computes a call from: keys, and arguments with draws."""

    @abstractmethod
    def scores(self, call: HeadCall) -> Tensor:
        """Return the call's scores before mask and softmax by the equation, (B, H, N, L)."""

    def components(self, key: Tensor, first_position: int = 0) -> Tensor:
        """Turn stored keys, from `first_position` on, into those that scores see."""
        return key

    def observe(self, call: HeadCall) -> None:
        """See a training call before its output is computed; setting B gathers its sums here."""

    def check(self, bias: Tensor | None, cache: Cache | None, scale: float | None = None) -> None:
        """Refuse what the variant has no place for.

        Raises:
            ValueError: it says what the variant takes instead.
        """

    def admit(self, call: HeadCall) -> None:
        """Refuse a call that is not this core's: heads, their sizes, and what `check` refuses.

        Raises:
            ValueError: it says what is expected instead.
        """
        heads, keys = self.layout, self.layout.keys_per_head
        whole = keys > 1 or self.has_components
        for name, tensor, count, size in (
            ("query", call.query, heads.query, heads.head_dim),
            ("key", call.key, heads.key, heads.head_dim),
            ("value", call.value, heads.value, heads.value_head_dim),
        ):
            found = tuple(tensor.shape[1:-2])
            if name == "key":  # with several keys per head, side by side or in a dimension
                right = found == (count * keys,) or (whole and found == (count, keys))
                wanted = f"{count} x {keys}" if len(found) > 1 else f"{count * keys}"
            else:
                right, wanted = found == (count,), f"{count}"
            if not right:
                given = " x ".join(map(str, found))
                raise ValueError(
                    f"{name} has {given} heads, expected {wanted}: {self.variant} attention here "
                    f"takes {heads.query} query, {heads.key} key with {keys} keys each, "
                    f"{heads.value} value heads"
                )
            if tensor.shape[-1] != size:
                raise ValueError(f"{name} has heads of size {tensor.shape[-1]}, expected {size}")
        self.check(call.masks.bias, call.cache, call.scale)

    def cross_refusal(self) -> str | None:
        """Say why queries of another sequence cannot attend ("cannot …"), or None if they can."""
        return None

    # ------------------------------------------------------------------ choosing
    @property
    def kernel(self) -> str:
        """The family of `kernels` that serves these options."""
        return self.kernels[0]

    def clear_pairs(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the pairs whose gradient no rounding decides, (B, H, N, L); None means all."""
        return None

    def pick(self, call: HeadCall) -> str:
        """Return the name of the implementation that computes a call; see `choose_backend`."""
        return self.pick_for(self.describe(call))

    def pick_for(self, call: Call) -> str:
        """Return the same for a call that is only described."""
        return choose_backend(
            self.variant, self.backend, self.backends, self.refusal, call, self.auto_rules
        )

    def describe(self, call: HeadCall) -> Call:
        """Return what the choice of a backend may depend on."""
        query, bias = call.query, call.masks.bias
        sizes = call.masks.num_queries, call.masks.num_keys
        return Call(
            device=device_type(query.device),
            dtype=query.dtype,
            num_scores=self.num_scores(query.shape[0], query.shape[2], call.value.shape[2]),
            num_keys=call.value.shape[2],
            dropout=call.dropout is not None,
            bias_needs_grad=bias is not None and bias.requires_grad and torch.is_grad_enabled(),
            attn_mask=call.masks.attn_mask is not None,
            recurrent=call.cache is not None and not isinstance(call.cache, KVCache),
            graph=written(),
            dynamic=self.counts_blocks and any(is_symbol(size) for size in sizes),
            row_operators=self.row_operators,
            transformed=is_transformed(),
        )

    @property
    def block_maps(self) -> int:
        """Score maps that a block holds of one sample, for predictions of memory."""
        return self.layout.out

    def num_scores(self, batch_size: int, num_queries: int, num_keys: int) -> int:
        """Return the number of scores that the reference would store."""
        return batch_size * self.layout.out * num_queries * num_keys * self.score_maps

    # ------------------------------------------------------------------ maps, for analysis
    def weights(self, call: HeadCall) -> Tensor:
        """Return the maps (B, H, N, L) of the call by the equation, without dropout.

        Raises:
            ValueError: the heads are not those of the layout, or the variant has no place for the
                call's bias, scale or cache.
            NotImplementedError: the variant has no maps.
        """
        self.admit(call)
        with autocast_off(call.query):
            return reference_weights(self.scores(call), call.masks, self.row_eps)

    def gaussians(self, call: HeadCall) -> Gaussians:
        """Return the Gaussians whose densities the scores are; where `has_gaussians`."""
        raise NotImplementedError(f"{self.variant} is not a mixture of Gaussians")

    def posterior(self, call: HeadCall) -> tuple[Tensor, Tensor]:
        """Return weights P_ij (B, H, N, L) and responsibilities γ_ijr of a key's components.

        γ is (B, H, K, N, L); P_ij γ_ijr is the joint posterior of key and component. Where
        `has_components`.
        """
        raise NotImplementedError(f"{self.variant} has no components with responsibilities")

    def learned(self) -> dict[str, Learned]:
        """Return what was learned beside the projections, by name."""
        return {}

    # ------------------------------------------------------------------ decoding
    def new_cache(self, capacity: int = 0) -> Cache:
        """Return an empty memory for decoding, with room for `capacity` positions."""
        return KVCache(capacity, store_offsets=True)

    def bound_refusal(self) -> str | None:
        """Say why a cache of bounded length cannot serve ("cannot …"), or None if it can."""
        return None if self.can_drop_keys else "cannot decode from a bounded number of keys"

    def absorb(self, call: HeadCall) -> None:
        """Take keys without queries into the call's cache, where it keeps sums of them."""

    def reads_parts(self, call: HeadCall) -> bool:
        """Whether a call reads its cache part by part instead of through a backend."""
        return (
            self.steps_over_cache
            and isinstance(call.cache, KVCache)
            and call.scale is None  # offsets are stored for 1/√E
            and self.backend == "auto"
            and not self.training
            and call.query.shape[2] <= STEP_QUERIES
        )

    def key_offset(self, key: Tensor, first_position: int) -> Tensor | None:
        """Return what stored keys add to their scores, for the cache to keep; (B, …, L) or None."""
        return None

    def cached_scores(
        self, query: Tensor, key: Tensor, offset: Tensor | None, cols: range, call: HeadCall
    ) -> Tensor:
        """Return the scores of a part of the cache, (B, H, N, len(cols)); all of them finite.

        Args:
            query: (B, H, N, E) in the compute dtype.
            key: stored keys of the part, in the compute dtype.
            offset: stored offsets of the part, if the cache keeps them.
            cols: positions of the part.
            call: the whole call.
        """
        raise NotImplementedError(f"{self.variant} does not read a cache in parts")


def check_components(layout: HeadLayout, num_components: int, shifted: bool) -> None:
    """Check that a layout has K keys per head, or one that is shifted K times.

    Raises:
        ValueError: it has another number.
    """
    expected = 1 if shifted else num_components
    if layout.keys_per_head != expected:
        raise ValueError(
            f"the layout has keys_per_head={layout.keys_per_head}, expected {expected} with "
            f"num_components={num_components} and shifted_keys={shifted}"
        )


def key_or_fresh(rng: RandomKey | None) -> RandomKey:
    """Return the key, or one from torch's generator where a call names none."""
    return fresh_key() if rng is None else rng


@torch.no_grad()
def evict(core: Core, call: HeadCall, cache: BoundedCache) -> None:
    """Drop the positions beyond a cache's bound, by what the latest query of a call sees."""
    if not cache.num_surplus:
        return
    cols, last = range(cache.length), call.masks.num_queries - 1
    key, value, offset = cache.part(cols)
    dtype = compute_dtype(call.query)
    scores = core.cached_scores(call.query[:, :, -1:].to(dtype), key.to(dtype), offset, cols, call)
    rows = range(last, last + 1)
    scores = biased(scores, call.masks, rows, cols)
    allowed = call.masks.allowed(rows, cols, scores.device)
    cache.keep(kept_places(scores, value.to(dtype), allowed, cache.bound, core.row_eps))


def attend_to_cache(core: Core, call: HeadCall) -> Tensor:
    """Attend from a few new queries to everything cached, the new tokens included, part by part.

    Returns:
        (B, H, N, E_v), in at least float32.
    """
    cache, masks = call.cache, call.masks
    assert isinstance(cache, KVCache)
    dtype = compute_dtype(call.query)
    query, rows, parts = call.query.to(dtype), masks.all_rows, cache.parts()
    outputs, normalisers = [], []
    for cols in parts:
        key, value, offset = cache.part(cols)
        scores = core.cached_scores(query, key.to(dtype), offset, cols, call)
        scores = biased(scores, masks, rows, cols)
        allowed = masks.allowed(rows, cols, query.device)
        if len(parts) == 1 and not core.row_eps:  # nothing to merge with
            plain = allowed is None and masks.bias is None
            weights = scores.softmax(-1) if plain else masked_softmax(scores, allowed)
            return grouped_values(weights, value.to(dtype))
        output, normaliser = partial_attention(scores, value.to(dtype), allowed)
        outputs.append(output)
        normalisers.append(normaliser)
    if core.row_eps:
        outputs.append(torch.zeros_like(outputs[0]))
        normalisers.append(torch.full_like(normalisers[0], math.log(core.row_eps)))
    return merge_partials(outputs, normalisers)[0]
