"""Attention over blocks of queries with gradients written by hand, O(N · block) memory.

The matrix products of a block go to PyTorch, into buffers that stay in the cache. What lies between
them is a pass over rows: row and column terms, sums or maxima over components, masks, softmax and
dropout, and their gradients. It exists twice, in torch operations and in C (`kernels/cpu`):

    t_r = c_r S_r + a_ir + β_jr          S_r = query · key_r, a map of scores
    weights = dropout(softmax_j(l + bias)),  l = log Σ_r exp t_r, max_r t_r, or Σ_r c_r S_r

A block holds whole rows, so nothing of size N x N is kept and no normaliser saved: backward makes
the maps again, and δ = Σ_j weights ∘ d_weights comes from the weights that it multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lit_probattn.attention.draws import keep_pairs
from lit_probattn.attention.functional import repeat_heads
from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import AttentionDropout

Reduction = Literal["soft", "hard", "sum"]

# Scores of one map in a block: small enough to stay in the cache of a CPU core together with their
# gradients; on CUDA large enough to fill the device.
BLOCK_SCORES = {"cpu": 1 << 17, "cuda": 1 << 25}


@dataclass(frozen=True)
class RowTerms:
    """What the rows of a call have in common.

    Args:
        masks: what each query may see, and the bias.
        dropout: one decision per pair.
        num_heads: H.
        reduction: how the maps of components become scores.
        num_components: K, or the number of maps that are summed.
        shared: one map serves all components of a head.
        common: all heads of a sample read the same maps (`sum`).
        coef: c, (H, K).
        row: a, (B·H, N, K).
        col: β, (B·H, K, L).
        samples: counter words of the samples, (B,), where there is dropout.
    """

    masks: Masks
    dropout: AttentionDropout | None
    num_heads: int
    reduction: Reduction = "soft"
    num_components: int = 1
    shared: bool = False
    common: bool = False
    coef: Tensor | None = None
    row: Tensor | None = None
    col: Tensor | None = None
    samples: Tensor | None = None


@dataclass(frozen=True)
class Place:
    """A block: `count` (sample, head) pairs from `first` on, some queries, a prefix of keys."""

    first: int
    count: int
    rows: range
    cols: range

    @property
    def pairs(self) -> slice:
        """The (sample, head) pairs."""
        return slice(self.first, self.first + self.count)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one map of the block."""
        return self.count, len(self.rows), len(self.cols)


@dataclass
class RowGrads:
    """Gradients that a pass over rows writes, each None where it is not wanted.

    Args:
        maps: of the maps; may be the maps themselves, or the gradient of l where that is the same
            (one map, no coefficients). Those that heads have in common are added to.
        row: (count, n, K). col: (count, K, l). coef: (count, K).
    """

    maps: Sequence[Tensor]
    row: Tensor | None = None
    col: Tensor | None = None
    coef: Tensor | None = None


class RowPass(Protocol):
    """A pass over the rows of a block, in torch operations or in C."""

    def forward(self, terms: RowTerms, place: Place, maps: Sequence[Tensor], out: Tensor) -> None:
        """Write the dropped weights into `out`, (count, n, l), which may be the first map."""
        ...

    def backward(
        self,
        terms: RowTerms,
        place: Place,
        maps: Sequence[Tensor],
        weights: Tensor,
        grad: Tensor,
        wanted: RowGrads,
    ) -> None:
        """Fill `weights` with the dropped weights and turn `grad` into the gradient of l."""
        ...


class TorchRows:
    """The pass in torch operations: the oracle of the one in C, and the path without a compiler.

    Maps that belong to one component of one head are worked on in place.
    """

    def forward(self, terms: RowTerms, place: Place, maps: Sequence[Tensor], out: Tensor) -> None:
        """See `RowPass`."""
        mass, inverse, _ = _exponentials(terms, place, maps)
        weights = torch.mul(mass, inverse, out=out)
        factor = _kept(terms, place, weights)
        if factor is not None:
            weights.mul_(factor)

    def backward(
        self,
        terms: RowTerms,
        place: Place,
        maps: Sequence[Tensor],
        weights: Tensor,
        grad: Tensor,
        wanted: RowGrads,
    ) -> None:
        """See `RowPass`."""
        mass, inverse, parts = _exponentials(terms, place, maps)
        torch.mul(mass, inverse, out=weights)
        factor = _kept(terms, place, weights)
        if factor is not None:
            grad.mul_(factor)
        delta = torch.linalg.vecdot(weights, grad).unsqueeze(-1)
        delta /= weights.sum(-1, keepdim=True).clamp_min_(torch.finfo(grad.dtype).tiny)
        grad.sub_(delta)
        if terms.reduction == "soft" and terms.num_components > 1:
            # d l / d t_r = exp(t_r) / Σ_s exp(t_s)
            rest = grad * inverse
            grad.mul_(weights)
            shares = [part.mul_(rest) for part in parts]
        else:
            grad.mul_(weights)
            shares = [grad] * terms.num_components
        if terms.reduction == "hard" and terms.num_components > 1:
            rest, largest, shares = grad.clone(), parts[-1], []
            for part in parts[:-1]:  # the first largest takes the gradient
                shares.append(torch.eq(part, largest, out=part).mul_(rest))
                rest.sub_(shares[-1])
        if factor is not None:
            weights.mul_(factor)
        _spread(terms, place, maps, shares, wanted)


def _exponentials(
    terms: RowTerms, place: Place, maps: Sequence[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return exp(l - top), the inverse of its row sums, and what the gradients of l need.

    These are exp(t_r - top) of every component, or (hard) every t_r and their maximum last.
    """
    found = _components(terms, place, maps)
    top = found[0].amax(-1, keepdim=True)
    for t in found[1:]:
        torch.maximum(top, t.amax(-1, keepdim=True), out=top)
    top.masked_fill_(top == float("-inf"), 0.0)
    if terms.reduction == "hard" and len(found) > 1:
        largest = torch.maximum(found[0], found[1])
        for t in found[2:]:
            torch.maximum(largest, t, out=largest)
        mass, found = torch.sub(largest, top).exp_(), [*found, largest]
    else:
        found = [t.sub_(top).exp_() for t in found]
        mass = found[0] if len(found) == 1 else found[0] + found[1]
        for t in found[2:]:
            mass += t
    total = mass.sum(-1, keepdim=True)
    inverse = total.reciprocal().masked_fill_(total == 0, 0.0)
    return mass, inverse, found


def _components(terms: RowTerms, place: Place, maps: Sequence[Tensor]) -> list[Tensor]:
    """Return t_r of every component with bias and masks, each (count, n, l), ours to change."""
    found, rows = [], slice(place.rows.start, place.rows.stop)
    for r in range(terms.num_components):
        t = maps[0 if terms.shared else r]
        if terms.coef is not None:
            t = t * _of_heads(terms.coef, terms, place)[:, r, None, None]
        elif terms.shared and r + 1 < terms.num_components:
            t = t.clone()
        if terms.row is not None:
            t = t.add_(terms.row[place.pairs, rows, r, None])
        if terms.col is not None:
            t = t.add_(terms.col[place.pairs, r, None, : len(place.cols)])
        found.append(t)
    if terms.reduction == "sum":
        for t in found[1:]:
            found[0].add_(t)
        del found[1:]
    extra = _additive(terms, place, maps[0])
    return found if extra is None else [t.add_(extra) for t in found]


def _spread(
    terms: RowTerms,
    place: Place,
    maps: Sequence[Tensor],
    shares: Sequence[Tensor],
    wanted: RowGrads,
) -> None:
    """Write the gradients of maps and terms from those of t_r."""
    coef = None if terms.coef is None else _of_heads(terms.coef, terms, place)
    if wanted.coef is not None:
        for r, share in enumerate(shares):
            wanted.coef[:, r] = (share * maps[0 if terms.shared else r]).sum((-2, -1))
    total: Tensor | None = None
    for r, share in enumerate(shares):
        if wanted.row is not None:
            wanted.row[..., r] = share.sum(-1)
        if wanted.col is not None:
            wanted.col[:, r] = share.sum(-2)
        scaled = share if coef is None else share * coef[:, r, None, None]
        if terms.common:
            wanted.maps[r].add_(scaled.sum(0))
        elif not terms.shared:
            if wanted.maps[r] is not scaled:
                wanted.maps[r].copy_(scaled)
        elif coef is not None:
            total = scaled if total is None else total + scaled
    if total is not None:
        wanted.maps[0].copy_(total)


def _of_heads(tensor: Tensor, terms: RowTerms, place: Place) -> Tensor:
    """Pick the rows of (H, …) that belong to a block's (sample, head) pairs."""
    index = torch.arange(place.first, place.first + place.count, device=tensor.device)
    return tensor[index % terms.num_heads]


def _additive(terms: RowTerms, place: Place, like: Tensor) -> Tensor | None:
    """Return bias and masks of a block as one additive tensor, (count, n, l), or None."""
    masks = terms.masks
    allowed = masks.allowed(place.rows, place.cols, like.device)
    bias = masks.bias_block(place.rows, place.cols)
    extra = None if bias is None else _pairs_of(bias.to(like.dtype), terms, place)
    if allowed is None:
        return extra
    if extra is None:
        extra = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(_pairs_of(allowed, terms, place), extra, float("-inf"))


def _pairs_of(tensor: Tensor, terms: RowTerms, place: Place) -> Tensor:
    """Pick the (sample, head) pairs of a block from (B or 1, H or 1, …): (count or 1, …)."""
    if tensor.shape[0] == tensor.shape[1] == 1:
        return tensor[0]
    index = torch.arange(place.first, place.first + place.count, device=tensor.device)
    sample, head = index // terms.num_heads, index % terms.num_heads
    return tensor[
        sample if tensor.shape[0] > 1 else sample * 0, head if tensor.shape[1] > 1 else head * 0
    ]


def _kept(terms: RowTerms, place: Place, like: Tensor) -> Tensor | None:
    """Return the factors of dropout of a block, 0 or 1 / (1 - p); (count, n, l) or None."""
    if terms.dropout is None or terms.samples is None:
        return None
    heads, stop = terms.num_heads, place.first + place.count
    first, last = place.first // heads, -(-stop // heads)
    key = replace(terms.dropout.key, sample_ids=terms.samples[first:last])
    part = replace(terms.dropout, key=key)
    kept = keep_pairs(part, last - first, heads, place.rows, place.cols, like.device).flatten(0, 1)
    kept = kept[place.first - first * heads : stop - first * heads]
    return kept.to(like.dtype).mul_(part.scale)


# ---------------------------------------------------------------------- the products around it
def _places(terms: RowTerms, batch_heads: int, device: torch.device) -> Iterator[Place]:
    """Cut all queries of all heads into blocks: whole heads together, or rows of one."""
    masks, budget = terms.masks, BLOCK_SCORES["cpu" if device.type == "cpu" else "cuda"]
    rows = max(1, min(masks.num_queries, budget // max(1, masks.num_keys)))
    count = 1
    if rows == masks.num_queries:
        count = max(1, min(batch_heads, budget // max(1, rows * masks.num_keys)))
    for first in range(0, batch_heads, count):
        here = min(count, batch_heads - first)
        for start in range(0, masks.num_queries, rows):
            block = range(start, min(start + rows, masks.num_queries))
            yield Place(first, here, block, masks.visible_keys(block))


class _Buffers:
    """Room for maps of a block, given out again for every block."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.rooms = like, dict[int, Tensor]()

    def __call__(self, index: int, shape: Sequence[int]) -> Tensor:
        size = shape[0] * shape[1] * shape[2]
        room = self.rooms.get(index)
        if room is None or room.numel() < size:
            room = self.rooms[index] = self.like.new_empty(size)
        return room[:size].view(*shape)


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Multiply (count, n, x) with (count, x, m) into a dense `out`; one matrix by one product."""
    if a.shape[0] == 1:
        torch.mm(a[0], b[0], out=out[0])
        return out
    return torch.bmm(a, b, out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a view of a gradient."""
    if a.shape[0] == 1:
        total[0].addmm_(a[0], b[0])
    else:
        total.baddbmm_(a, b)


class _Mixture(torch.autograd.Function):
    """Every head has maps of its own, one for each component or one for all."""

    @staticmethod
    def forward(
        ctx: Any,
        run: RowPass,
        terms: RowTerms,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        coef: Tensor | None,
        row: Tensor | None,
        col: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        out, buffer = value.new_zeros(*query.shape[:2], value.shape[-1]), _Buffers(query)
        terms = replace(terms, coef=coef, row=row, col=col)
        for place in _places(terms, query.shape[0], query.device):
            if not place.cols:
                continue
            maps = _mixture_maps(query, key, place, buffer)
            run.forward(terms, place, maps, maps[0])
            rows = slice(place.rows.start, place.rows.stop)
            _product(maps[0], value[place.pairs, : len(place.cols)], out[place.pairs, rows])
        ctx.run, ctx.terms = run, terms
        ctx.save_for_backward(query, key, value, coef, row, col, bias)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, coef, row, col, bias = ctx.saved_tensors
        run, terms, needs = ctx.run, ctx.terms, ctx.needs_input_grad[2:]
        grad_out = grad_out.contiguous()
        grads = [
            torch.zeros_like(x) if x is not None and n else None
            for x, n in zip((query, key, value, coef, row, col, bias), needs, strict=True)
        ]
        grad_query, grad_key, grad_value, grad_coef, grad_row, grad_col, grad_bias = grads
        buffer, num_maps, components = _Buffers(query), key.shape[1], terms.num_components
        for place in _places(terms, query.shape[0], query.device):
            if not place.cols:
                continue
            pairs, rows = place.pairs, slice(place.rows.start, place.rows.stop)
            cols, (count, _, length) = slice(0, len(place.cols)), place.shape
            maps = _mixture_maps(query, key, place, buffer)
            weights, part = buffer(num_maps, place.shape), grad_out[pairs, rows]
            grad = _product(part, value[pairs, cols].mT, buffer(num_maps + 1, place.shape))
            plain = coef is None and (terms.shared or components == 1)
            wanted = RowGrads(
                [grad] if plain else maps,
                None if grad_row is None else grad_row[pairs, rows],
                None if grad_col is None else grad_col.new_empty(count, components, length),
                None if grad_coef is None else grad_coef.new_empty(count, components),
            )
            run.backward(terms, place, maps, weights, grad, wanted)
            if grad_value is not None:
                _add_product(grad_value[pairs, cols], weights.mT, part)
            for r, grad_map in enumerate(wanted.maps):
                if grad_key is not None:
                    _add_product(grad_key[pairs, r, cols], grad_map.mT, query[pairs, rows])
                if grad_query is not None:
                    _add_product(grad_query[pairs, rows], grad_map, key[pairs, r, cols])
            if grad_col is not None and wanted.col is not None:
                grad_col[pairs, :, cols] += wanted.col
            _add_by_head(grad_coef, wanted.coef, terms, place)
            _add_bias(grad_bias, grad, terms, place)
        return (None, None, *grads)


def _mixture_maps(query: Tensor, key: Tensor, place: Place, buffer: _Buffers) -> list[Tensor]:
    rows, cols = slice(place.rows.start, place.rows.stop), slice(0, len(place.cols))
    part = query[place.pairs, rows]
    return [
        _product(part, key[place.pairs, r, cols].mT, buffer(r, place.shape))
        for r in range(key.shape[1])
    ]


def _add_by_head(total: Tensor | None, part: Tensor | None, terms: RowTerms, place: Place) -> None:
    """Add (count, K) of a block's (sample, head) pairs to (H, K)."""
    if total is None or part is None:
        return
    head = torch.arange(place.first, place.first + place.count, device=part.device)
    total.index_add_(0, head % terms.num_heads, part)


def _add_bias(total: Tensor | None, grad: Tensor, terms: RowTerms, place: Place) -> None:
    """Add gradients of a block's scores to those of the bias, over what it is broadcast along."""
    if total is None:
        return
    heads = terms.num_heads
    block_rows = slice(place.rows.start, place.rows.stop) if total.shape[2] > 1 else slice(None)
    block_cols = slice(place.cols.start, place.cols.stop) if total.shape[3] > 1 else slice(None)
    sums = [d for d, size in ((-2, total.shape[2]), (-1, total.shape[3])) if size == 1]
    grad = grad.sum(sums, keepdim=True) if sums else grad
    index = torch.arange(place.first, place.first + place.count, device=grad.device)
    sample, head = index // heads % total.shape[0], index % heads % total.shape[1]
    flat = total.flatten(0, 1)[:, block_rows, block_cols]
    flat.index_add_(0, sample * total.shape[1] + head, grad)


def mixture_attention(
    run: RowPass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    dropout: AttentionDropout | None,
    *,
    coef: Tensor | None = None,
    row: Tensor | None = None,
    col: Tensor | None = None,
    hard: bool = False,
) -> Tensor:
    """Attend by softmax_j(l_ij) with l = logsumexp_r or max_r of the scores of K components.

        t_ijr = c_r query[i] · key[j, r] + a_ir + β_jr

    Args:
        run: who passes over the rows.
        query: (B, H, N, E), in the compute dtype.
        key: (B, H_kv, R, L, E): one for each component, R = K, or one for all, R = 1.
        value: (B, H_kv, L, E_v).
        masks: what each query may see; a bias gets its gradient.
        dropout: drawn again in backward.
        coef: c, (H, K). None means 1.
        row: a, (B, H, N, K). None means 0.
        col: β, (B, H, K, L). None means 0.
        hard: maximum in place of the sum over components; the first largest takes the gradient.

    Returns:
        (B, H, N, E_v).
    """
    batch, heads = query.shape[:2]
    components = next(
        (x.shape[d] for x, d in ((coef, 1), (row, 3), (col, 2)) if x is not None), key.shape[2]
    )
    flat = [repeat_heads(x, heads).flatten(0, 1).contiguous() for x in (query, key, value)]
    terms = [None if x is None else x.flatten(0, 1).contiguous() for x in (row, col)]
    common = RowTerms(
        masks,
        dropout,
        heads,
        "hard" if hard else "soft",
        components,
        shared=flat[1].shape[1] == 1 and components > 1,
        samples=None if dropout is None else dropout.key.samples(batch, query.device),
    )
    coef = None if coef is None else coef.contiguous()
    bias = None if masks.bias is None else masks.bias.to(query.dtype)
    common = replace(common, masks=replace(masks, bias=None if bias is None else bias.detach()))
    out: Tensor = _Mixture.apply(run, common, *flat, coef, *terms, bias)
    return out.unflatten(0, (batch, heads))
