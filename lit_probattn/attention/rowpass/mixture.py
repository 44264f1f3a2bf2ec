"""Attention in which every head has maps of its own: one for each component, or one for all."""

from __future__ import annotations

from torch import Tensor

from lit_probattn.attention.masks import Masks
from lit_probattn.attention.rowpass.tiled import tiled_attention
from lit_probattn.randomness import AttentionDropout


def mixture_attention(
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
    heads = query.shape[1]
    components = next(
        (x.shape[d] for x, d in ((coef, 1), (row, 3), (col, 2)) if x is not None), key.shape[2]
    )
    return tiled_attention(
        *(query, key, value, masks, dropout),
        reduction="hard" if hard else "soft",
        heads=heads,
        components=components,
        coef=coef,
        row=row,
        col=col,
    )
