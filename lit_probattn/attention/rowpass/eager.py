"""The pass over rows in torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lit_probattn.attention.draws import keep_pairs
from lit_probattn.attention.rowpass.terms import Buffers, Place, RowFactors, RowGrads, RowTerms
from lit_probattn.base.graphs import written
from lit_probattn.base.memory import only_shapes
from lit_probattn.base.torch_internals import outside_graphs

# How far components may be apart for one exponential: their sum keeps at least exp(-40) of the
# largest factor, and float32 begins at exp(-87).
_FAR = 40.0
# Numbers of the rooms for maps of a pass; those of components go down from the last.
_SPARE, _TOTAL, _KEPT, _FIRST = -3, -4, -5, -6


class TorchRows:
    """The pass in torch operations: the oracle of the one in C, and the path without a compiler.

    Maps that belong to one component of one head are worked on in place.
    """

    least_rows = 1  # larger blocks were slower: every operation goes through its maps once more

    @outside_graphs
    def prepare(self, terms: RowTerms) -> RowTerms:
        """See `RowPass`."""
        row, col = terms.row, terms.col
        several = terms.reduction == "soft" and terms.shared and terms.coef is None
        several = several and written() is None  # the choice depends on the numbers
        if not several or row is None or col is None or type(col) is not Tensor:
            return terms
        top = col.amax(1, keepdim=True)
        below = (top - col).masked_fill_(top == float("-inf"), 0.0)
        highest = row.amax(-1, keepdim=True)
        near = ((highest - row).amax((1, 2)) < _FAR) | (below.amax((1, 2)) < _FAR)  # NaN: no
        found = [True] * len(near) if only_shapes(near) else near.tolist()
        factors = RowFactors((row - highest).exp_(), (-below).exp_(), top, found)
        return replace(terms, factors=factors)

    @outside_graphs
    def forward(
        self, terms: RowTerms, place: Place, maps: Sequence[Tensor], out: Tensor, room: Buffers
    ) -> None:
        """See `RowPass`."""
        _, inverse = _weigh(terms, place, maps, out, room)
        weights = out.mul_(inverse)
        factor = _kept(terms, place, room)
        if factor is not None:
            weights.mul_(factor)

    @outside_graphs
    def backward(
        self,
        terms: RowTerms,
        place: Place,
        maps: Sequence[Tensor],
        weights: Tensor,
        grad: Tensor,
        wanted: RowGrads,
        room: Buffers,
    ) -> None:
        """See `RowPass`."""
        parts, inverse = _weigh(terms, place, maps, weights, room)
        weights.mul_(inverse)
        factor = _kept(terms, place, room)
        if factor is not None:
            grad.mul_(factor)
        delta = torch.mul(weights, grad, out=room(_SPARE, place.shape)).sum(-1, keepdim=True)
        delta /= weights.sum(-1, keepdim=True).clamp_min_(torch.finfo(grad.dtype).tiny)
        grad.sub_(delta)
        factors = _factors(terms, place)
        if factors is not None:
            _spread_factors(factors, parts[0].mul_(grad.mul_(inverse)), parts[1], grad, wanted)
        else:
            spare = room(_SPARE, place.shape)
            shares = _shares(terms, parts, weights, inverse, grad, spare)
            _spread(terms, place, maps, shares, wanted)
        if factor is not None:
            weights.mul_(factor)


def _weigh(
    terms: RowTerms, place: Place, maps: Sequence[Tensor], out: Tensor, room: Buffers
) -> tuple[list[Tensor], Tensor]:
    """Write exp(l - top) into `out`; return what gradients need, and the inverse of row sums.

    Gradients need exp(t_r - top) of every component, or (hard) every t_r and their maximum last,
    or (one exponential for all) that exponential and the sum of factors.
    """
    factors = _factors(terms, place)
    if factors is not None:
        found = [maps[0].add_(factors.top)]
        extra = _additive(terms, place, maps[0])
        if extra is not None:
            found[0].add_(extra)
        _exponentials(found)
        found.append(_sum_of_factors(factors, room(_TOTAL, place.shape)))
        torch.mul(*found, out=out)
    else:
        found = _components(terms, place, maps, room)
        if len(found) == 1:
            torch.sub(found[0], _top(found), out=out).exp_()
        elif terms.reduction == "hard":
            found.append(_maximum(found, room(_TOTAL, place.shape)))
            torch.sub(found[-1], _top(found[-1:]), out=out).exp_()
        else:
            _exponentials(found)
            torch.add(found[0], found[-1], out=out)  # `out` may be either of them
            for part in found[1:-1]:
                out.add_(part)
    total = out.sum(-1, keepdim=True)
    return found, total.reciprocal().masked_fill_(total == 0, 0.0)


def _exponentials(found: Sequence[Tensor]) -> None:
    """Turn scores into their exponentials below the largest of a row."""
    top = _top(found)
    for t in found:
        t.sub_(top).exp_()


def _top(found: Sequence[Tensor]) -> Tensor:
    """Return the largest number of every row, 0 where a row sees nothing; (count, n, 1)."""
    top = found[0].amax(-1, keepdim=True)
    for t in found[1:]:
        torch.maximum(top, t.amax(-1, keepdim=True), out=top)
    return top.masked_fill_(top == float("-inf"), 0.0)


def _maximum(found: Sequence[Tensor], out: Tensor) -> Tensor:
    largest = torch.maximum(found[0], found[1], out=out)
    for t in found[2:]:
        torch.maximum(largest, t, out=largest)
    return largest


def _shares(
    terms: RowTerms,
    parts: Sequence[Tensor],
    weights: Tensor,
    inverse: Tensor,
    grad: Tensor,
    spare: Tensor,
) -> list[Tensor]:
    """Turn `grad`, of the weights less δ, into the gradient of l; return those of every t_r."""
    if terms.reduction == "sum" or terms.num_components == 1:
        return [grad.mul_(weights)] * terms.num_components
    if terms.reduction == "soft":  # d l / d t_r = exp(t_r) / Σ_s exp(t_s)
        rest = torch.mul(grad, inverse, out=spare)
        grad.mul_(weights)
        return [part.mul_(rest) for part in parts]
    rest, shares = grad.mul_(weights), []
    *parts, largest = parts
    for part in parts[:-1]:  # the first largest takes the gradient
        shares.append(torch.eq(part, largest, out=part).mul_(rest))
        rest = torch.sub(rest, shares[-1], out=parts[-1])
    return [*shares, rest]


def _components(
    terms: RowTerms, place: Place, maps: Sequence[Tensor], room: Buffers
) -> list[Tensor]:
    """Return t_r of every component with bias and masks, each (count, n, l), ours to change."""
    found, rows = [], slice(place.rows.start, place.rows.stop)
    for r in range(terms.num_components):
        t = maps[0 if terms.shared else r]
        if terms.coef is not None:
            coef = _of_heads(terms.coef, terms, place)[:, r, None, None]
            t = torch.mul(t, coef, out=room(_FIRST - r, place.shape))
        elif terms.shared and r + 1 < terms.num_components:
            t = room(_FIRST - r, place.shape).copy_(t)
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


def _sum_of_factors(factors: RowFactors, out: Tensor) -> Tensor:
    """Write Σ_r A_r B_r."""
    own, columns = factors.own, factors.columns
    torch.mul(own[..., :1], columns[:, :1], out=out)
    for r in range(1, own.shape[-1]):
        out.addcmul_(own[..., r, None], columns[:, r, None])
    return out


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


def _factors(terms: RowTerms, place: Place) -> RowFactors | None:
    """Return a block's part of the factors, or None if its components need their own."""
    found = terms.factors
    if found is None or not all(found.near[place.pairs]):
        return None
    rows, cols = slice(place.rows.start, place.rows.stop), slice(0, len(place.cols))
    return RowFactors(
        found.own[place.pairs, rows],
        found.columns[place.pairs, :, cols],
        found.top[place.pairs, :, cols],
        found.near,
    )


def _spread_factors(
    factors: RowFactors,
    common: Tensor,
    total: Tensor,
    grad: Tensor,
    wanted: RowGrads,
) -> None:
    """Write all gradients from `common`, that of t_r but for A_r B_r, and from Σ_r A_r B_r."""
    torch.mul(common, total, out=grad)
    if wanted.row is not None:
        wanted.row.copy_(common @ factors.columns.mT).mul_(factors.own)
    if wanted.col is not None:
        torch.matmul(factors.own.mT, common, out=wanted.col).mul_(factors.columns)
    if wanted.maps[0] is not grad:
        wanted.maps[0].copy_(grad)


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


def _kept(terms: RowTerms, place: Place, room: Buffers) -> Tensor | None:
    """Return the factors of dropout of a block, 0 or 1 / (1 - p); (count, n, l) or None."""
    if terms.dropout is None or terms.samples is None:
        return None
    heads, done, factor = terms.num_heads, 0, room(_KEPT, place.shape)
    for sample in range(place.first // heads, -(-(place.first + place.count) // heads)):
        first = max(place.first - sample * heads, 0)
        count = min(place.first + place.count - sample * heads, heads) - first
        key = replace(terms.dropout.key, sample_ids=terms.samples[sample : sample + 1])
        part = replace(terms.dropout, key=key)
        kept = keep_pairs(part, 1, count, place.rows, place.cols, factor.device, first)
        factor[done : done + count] = kept[0]
        done += count
    return factor.mul_(terms.dropout.scale)
