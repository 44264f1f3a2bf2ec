"""The pass over rows in torch operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lit_probattn.attention.draws import keep_pairs
from lit_probattn.attention.rowpass.terms import Place, RowGrads, RowTerms


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
