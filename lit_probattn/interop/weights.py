"""Attention weights of any library by heads: reading, adding components, merging heads.

Weights of every library are converted to this form and back; heads are changed only here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lit_probattn.interop.algebra import (
    best_groups,
    cosine_distances,
    form_products,
    low_rank_product,
    shared_query_factors,
)

# Pairs of dimensions of a head that a host rotates together: halves, or adjacent dimensions.
RotaryPairs = Literal["halves", "neighbours"]


@dataclass(frozen=True)
class HeadWeights:
    """Weights of one attention layer by heads; a bias is the last column, if any.

    Args:
        query: (H, E, C_q [+ 1]).
        key: K components of every key head, (H_kv, K, E, C_k [+ 1]).
        value: (H_kv, E_v, C_v [+ 1]).
        out: (C, H, E_v).
        out_bias: (C,) or None.
        biased: whether query, key and value have a bias column.
        groups: the merged query heads of every head. None means that no heads were merged.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    out_bias: Tensor | None
    biased: tuple[bool, bool, bool]
    groups: list[list[int]] | None = None

    def to(self, dtype: torch.dtype) -> HeadWeights:
        """Return the weights in a dtype."""
        bias = None if self.out_bias is None else self.out_bias.to(dtype)
        query, key, value, out = (t.to(dtype) for t in (self.query, self.key, self.value, self.out))
        return replace(self, query=query, key=key, value=value, out=out, out_bias=bias)


Rows = tuple[Tensor, Tensor | None]  # weight and bias as in `nn.Linear`


def head_rows(weight: Tensor, bias: Tensor | None, num_heads: int) -> Tensor:
    """Return a projection by heads, with its bias as last column: (H, rows, C [+ 1])."""
    if bias is not None:
        weight = torch.cat([weight, bias[:, None]], 1)
    return weight.unflatten(0, (num_heads, -1))


def read_heads(
    query: Rows, key: Rows, value: Rows, out: Rows, num_heads: int, num_kv_heads: int
) -> HeadWeights:
    """Return four projections in float64, one component per key head."""
    (q, q_bias), (k, k_bias), (v, v_bias), (o, o_bias) = map(_double, (query, key, value, out))
    return HeadWeights(
        query=head_rows(q, q_bias, num_heads),
        key=head_rows(k, k_bias, num_kv_heads)[:, None],
        value=head_rows(v, v_bias, num_kv_heads),
        out=o.unflatten(1, (num_heads, -1)),
        out_bias=o_bias,
        biased=(q_bias is not None, k_bias is not None, v_bias is not None),
    )


def _double(rows: Rows) -> Rows:
    weight, bias = rows
    return weight.detach().double(), None if bias is None else bias.detach().double()


def projection(rows: Tensor, biased: bool) -> Rows:
    """Return weight and bias of a projection with these rows, (…, C [+ 1])."""
    flat = rows.reshape(-1, rows.shape[-1])
    return (flat[:, :-1], flat[:, -1]) if biased else (flat, None)


# ---------------------------------------------------------------------- changes of heads
def widen_keys(weights: HeadWeights, times: int, spread: float, seed: int) -> HeadWeights:
    """Split every component of a key into several, slightly apart so that training separates them.

    Equal components have equal gradients and never separate. Their mean is unchanged, so the effect
    of the distance on a score is of second order.

    Args:
        times: number of new components per component.
        spread: standard deviation of the distance, in units of the standard deviation of the key's
            weights. 0 gives equal components.
        seed: seed of the distances.
    """
    if times == 1:
        return weights
    key = weights.key.repeat_interleave(times, 1)  # (H_kv, K · times, E, C_k [+ 1])
    if spread:
        noise = torch.randn(key.shape, generator=torch.Generator().manual_seed(seed)).to(key)
        if weights.biased[1]:
            noise[..., -1] = 0.0
        learned = weights.key[..., :-1] if weights.biased[1] else weights.key
        parts = noise.unflatten(1, (-1, times))
        key = key + spread * learned.std() * (parts - parts.mean(2, keepdim=True)).flatten(1, 2)
    return replace(weights, key=key)


def group_heads(weights: HeadWeights, size: int) -> list[list[int]]:
    """Divide the key heads into groups with the most similar bilinear forms."""
    kv = weights.key.shape[0]
    query = weights.query.unflatten(0, (kv, -1)).transpose(0, 1)
    return best_groups(cosine_distances(form_products(query, weights.key[:, 0])), size)


def merge_heads(
    weights: HeadWeights, groups: list[list[int]], rotary: RotaryPairs | None = None
) -> HeadWeights:
    """Merge every group of K key heads into one head with K key components and one value.

    The query heads of the group are merged one by one: the i-th of each key head. Logits and values
    are reduced to the old head sizes, each with the least squared error in the weights. With rotary
    positions, logits are reduced separately per frequency, so that this commutes with the rotation.

    Args:
        weights: one component per key head.
        groups: key heads of every new head, all of equal size.
        rotary: pairs of dimensions that the host rotates. None means no rotation.
    """
    kv, rank = weights.value.shape[:2]
    query = weights.query.unflatten(0, (kv, -1))  # (H_kv, G, E, C_q)
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    olds: list[list[int]] = []
    for group in groups:
        stack, keys = query[group].transpose(0, 1), weights.key[group, 0]
        new_query, new_keys = merge_scores(stack, keys, rotary)
        heads = [[h * query.shape[1] + i for h in group] for i in range(query.shape[1])]
        out = torch.stack([weights.out[:, old].flatten(1) for old in heads])  # (G, C, K·E_v)
        left, right, _ = low_rank_product(
            out.flatten(0, 1), weights.value[group].flatten(0, 1), rank
        )
        parts.append((new_query, new_keys, right, left.unflatten(0, (len(heads), -1))))
        olds.extend(heads)
    queries, keys_of, values, outs = (list(column) for column in zip(*parts, strict=True))
    return replace(
        weights,
        query=torch.cat(queries),
        key=torch.stack(keys_of),
        value=torch.stack(values),
        out=torch.cat(outs).transpose(0, 1),
        groups=olds,
    )


def merge_scores(
    query: Tensor, keys: Tensor, rotary: RotaryPairs | None = None
) -> tuple[Tensor, Tensor]:
    """Return G query maps (G, E, C_q) and K key maps (K, E, C_k) from (G, K, E, C_q) and K.

    A pair of rows that is rotated together is one complex row: q becomes conj(q), the score of a
    frequency is Re conj(q) k e^{iθ(i−j)}, and the best shared query has rank one per frequency.
    """
    size = keys.shape[1]
    if rotary is None:
        factors = shared_query_factors(query, keys, size)
        return factors.query, factors.keys
    first, second = rotary_rows(size, rotary)
    turned = torch.complex(query[:, :, first], -query[:, :, second])  # (G, K, E/2, C_q)
    others = torch.complex(keys[:, first], keys[:, second])  # (K, E/2, C_k)
    new_query = torch.empty_like(query[:, 0])
    new_keys = torch.empty_like(keys)
    for row in range(size // 2):
        factors = shared_query_factors(turned[:, :, row : row + 1], others[:, row : row + 1], 1)
        new_query[:, first[row]], new_query[:, second[row]] = (
            factors.query[:, 0].real,
            -factors.query[:, 0].imag,
        )
        new_keys[:, first[row]], new_keys[:, second[row]] = (
            factors.keys[:, 0].real,
            factors.keys[:, 0].imag,
        )
    return new_query, new_keys


def rotary_rows(size: int, rotary: RotaryPairs) -> tuple[list[int], list[int]]:
    """Return the rows of a head that are rotated together, first and second row of every pair."""
    if rotary == "halves":
        return list(range(size // 2)), list(range(size // 2, size))
    return list(range(0, size, 2)), list(range(1, size, 2))
