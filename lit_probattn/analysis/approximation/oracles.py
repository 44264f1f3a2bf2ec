"""Sparse approximations computed from all weights: the kept keys and their weights.

`weights` (…, N, L) are attention weights that sum to one over allowed keys, `value` is (…, L, E),
and `output` = weights @ value. Masked keys have weight zero; `allowed` (bool, broadcastable to
weights) distinguishes them from other keys with weight zero.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Window = Literal["exact_r", "literal"]


def keep_largest(weights: Tensor, ranking: Tensor, num_kept: int) -> Tensor:
    """Keep the weights of each row at the `num_kept` largest `ranking`, divided by their sum.

    Ties prefer the lower index. Rows with fewer keys keep all. Masked keys have ranking -inf.
    """
    if num_kept < 1:
        raise ValueError(f"num_kept must be at least 1, received {num_kept}")
    if num_kept >= weights.shape[-1]:
        return weights
    order = torch.sort(ranking, dim=-1, descending=True, stable=True).indices[..., :num_kept]
    return renormalise(torch.zeros_like(weights).scatter(-1, order, weights.gather(-1, order)))


def renormalise(weights: Tensor) -> Tensor:
    """Divide rows by their sums; zero rows are unchanged."""
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def _hide(ranking: Tensor, allowed: Tensor | None) -> Tensor:
    return ranking if allowed is None else ranking.masked_fill(~allowed, float("-inf"))


def value_oblivious(weights: Tensor, num_kept: int, allowed: Tensor | None = None) -> Tensor:
    """Return the weights of optimal-v-oblivious-r: the r largest, divided by their sum.

    Source: value-aware attention (Gupta and Berant, 2021), section 3, Eq. (2).
    The error of the output is not monotone in r.
    """
    return keep_largest(weights, _hide(weights, allowed), num_kept)


def by_norm(weights: Tensor, value: Tensor, num_kept: int, allowed: Tensor | None = None) -> Tensor:
    """Return the weights at the r largest α‖v‖, divided by their sum.

    Source: Kobayashi et al., 2020, as cited in section 3 of the value-aware paper.
    """
    ranking = weights * value.norm(dim=-1)[..., None, :]
    return keep_largest(weights, _hide(ranking, allowed), num_kept)


def nearest_value(value: Tensor, output: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Return the index of the single value closest to each output, (…, N): optimal-v-aware-1.

    Source: value-aware attention, section 3, Eq. (3): argmin_i ‖v_i‖² − 2 v_i · o.
    Fully masked rows return 0.
    """
    scores = value.square().sum(-1)[..., None, :] - 2.0 * output @ value.mT
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("inf"))
    return scores.argmin(-1)


def window_mask(
    num_queries: int,
    num_keys: int,
    num_kept: int,
    *,
    is_causal: bool,
    window: Window = "exact_r",
) -> Tensor:
    """Return the keys inside a window of r positions, (N, L) bool.

    Source: value-aware attention, section 4: "r/2 positions to its left and right", clipped at the
    ends. `exact_r`: i − ⌊r/2⌋ … i + ⌈r/2⌉ − 1, r keys with i itself; `literal`: i − ⌊r/2⌋ … i +
    ⌊r/2⌋, r + 1 keys for even r. Causal: i − r + 1 … i.

    Queries are aligned with the last keys, as in a causal mask.
    """
    if num_kept < 1:
        raise ValueError(f"num_kept must be at least 1, received {num_kept}")
    rows = torch.arange(num_queries)[:, None] + num_keys - num_queries
    cols = torch.arange(num_keys)
    half = num_kept // 2
    if is_causal:
        low, high = num_kept - 1, 0
    elif window == "exact_r":
        low, high = half, num_kept - half - 1
    else:
        low, high = half, half
    return (cols >= rows - low) & (cols <= rows + high)


def sliding_window(
    weights: Tensor,
    num_kept: int,
    allowed: Tensor | None = None,
    *,
    is_causal: bool,
    window: Window = "exact_r",
) -> Tensor:
    """Return the weights inside the window, divided by their sum.

    A row with an empty window uses its own position, if it may attend to it.
    """
    num_queries, num_keys = weights.shape[-2:]
    inside = window_mask(num_queries, num_keys, num_kept, is_causal=is_causal, window=window)
    kept = weights * inside.to(weights.device)
    own = torch.eye(num_queries, num_keys, dtype=torch.bool, device=weights.device)
    own = own.roll(num_keys - num_queries, -1)
    alone = own if allowed is None else own & allowed
    return renormalise(torch.where(kept.sum(-1, keepdim=True) == 0, alone.to(kept.dtype), kept))
