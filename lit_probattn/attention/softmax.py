"""Softmax attention: scaled dot products, or one Gaussian per key; any head size, grouped heads.

Fixed head size attention (Bhojanapalli et al., 2020) is this class with a `head_dim` that is not
embed_dim / num_heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_probattn.attention.backends import AUTO_RULES, AutoRule, Backend, pair_arguments
from lit_probattn.attention.blockwise import Block, blockwise_attention
from lit_probattn.attention.functional import (
    compute_dtype,
    grouped_scores,
    reference_output,
    repeat_heads,
    split_precision,
    squared_distance,
)
from lit_probattn.attention.layer import Attention, BackendFunction, Cost
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.sdpa import fused_attention
from lit_probattn.randomness import AttentionDropout

Score = Literal["dot", "gaussian"]


def softmax_scores(query: Tensor, key: Tensor, *, score: Score) -> Tensor:
    """Return the scores of softmax attention.

    Source: MGK, ICML 2022, section 2.1 and appendix A (Gaussian, one head):
        dot:       query[i] · key[j] / √E
        gaussian:  −‖query[i] − key[j]‖² / (2 √E)
    Departs from the source: nothing.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        score: which of the two.

    Returns:
        (B, H, N, L).
    """
    key = repeat_heads(key, query.shape[1])
    scale = query.shape[-1] ** 0.5
    if score == "dot":
        return query @ key.mT / scale
    return -squared_distance(query, key) / (2.0 * scale)


def softmax_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    score: Score,
) -> Tensor:
    """Return softmax(scores) @ value, (B, H, N, E_v), in at least float32."""
    dtype = compute_dtype(query)
    scores = softmax_scores(query.to(dtype), key.to(dtype), score=score)
    return reference_output(scores, value, masks, dropout)


def gaussian_as_dot(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return query and key whose dot product, scaled by 1/√E, is the Gaussian score.

    −‖q − k‖²/2 = q·k − ‖k‖²/2 − ‖q‖²/2, and the last term is constant in a row. The query gains a
    1 and the key its norm: (B, H, N, E + 1) and (B, H_kv, L, E + 1). Low precision splits the
    norm into parts.
    """
    dtype = compute_dtype(query)
    centre = key.detach().to(dtype).mean(-2, keepdim=True)
    low_key = (key.to(dtype) - centre).to(query.dtype)
    query_centre = repeat_heads(centre, query.shape[1])
    low_query = (query.to(dtype) - query_centre).to(query.dtype)
    norm = low_key.to(dtype).square().sum(-1, keepdim=True) * -0.5
    parts = split_precision(norm, query.dtype)
    ones = torch.ones_like(low_query[..., :1]).expand(*low_query.shape[:-1], len(parts))
    return torch.cat([low_query, ones], -1), torch.cat([low_key, *parts], -1)


def softmax_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    score: Score,
) -> Tensor:
    """Return the same through PyTorch's fused attention, O(N) memory."""
    scale = query.shape[-1] ** -0.5
    if score == "gaussian":
        query, key = gaussian_as_dot(query, key)
    return fused_attention(query, key, value, masks=masks, scale=scale)


def softmax_blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    score: Score,
) -> Tensor:
    """Return the same block by block, with dropout, O(N · block) memory."""
    dtype = compute_dtype(query)
    scale = query.shape[-1] ** -0.5
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if score == "gaussian":
        query, key = gaussian_as_dot(query, key)

    def scores(_: Block, rows: Tensor, cols: Tensor) -> Tensor:
        return rows @ repeat_heads(cols, rows.shape[1]).mT

    out, _ = blockwise_attention(
        scores,
        (query * scale, key),
        ("row", "col"),
        value,
        num_heads=query.shape[1],
        masks=masks,
        dropout=dropout,
    )
    return out


def softmax_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    score: Literal["dot", "gaussian"],
) -> Tensor:
    """Return softmax attention by the fused kernel, O(N) memory, forward and backward."""
    from lit_probattn.kernels.dense.attention import centred, point_terms, softmax_attention

    scale, key_bias = query.shape[-1] ** -0.5, None
    if score == "gaussian":
        query, key = centred(query, key)
        squares, _ = point_terms(key, None)
        key_bias = squares * (scale / -2.0)
    call = pair_arguments(masks, dropout, query)
    return softmax_attention(query, key, value, scale=scale, key_bias=key_bias, **call)


class SoftmaxAttention(Attention):
    """Softmax attention, the baseline of every other variant.

    Source: MGK, ICML 2022, Eq. (1); fixed head size: Bhojanapalli et al., 2020, Eq. (5).
        attn_weights[i, j] ∝ exp(query[i] · key[j] / √E)                score = dot
        attn_weights[i, j] ∝ exp(−‖query[i] − key[j]‖² / (2 √E))         score = gaussian
    Departs from the source: nothing.

    Args:
        embed_dim: C.
        head_dim: E; any size ("fixed head size" when it is not C / H).
        num_heads: H.
        num_kv_heads: key/value heads, a divisor of H; 1 is multi-query attention.
        key_embed_dim: width of keys and values in cross-attention.
        value_head_dim: size of a value head.
        bias: biases of the projections.
        dropout: attention dropout in training.
        backend: implementation.
        score: scaled dot product, or one Gaussian per key with variance √E.
        rotary_dim: entries of a head that rotary positions turn; 0 for none.
        rotary_base: base of the rotary angles.
    """

    variant: ClassVar[str] = "softmax"
    steps_over_cache: ClassVar[bool] = True
    # PyTorch's kernels are at least as fast as ours; ours serve dropout and learned biases.
    auto_rules: ClassVar[Mapping[str, AutoRule]] = {
        **AUTO_RULES,
        "cuda": AutoRule(("sdpa", "triton", "blockwise", "reference")),
    }
    backends: ClassVar[dict[str, BackendFunction]] = {
        "reference": softmax_reference,
        "sdpa": softmax_sdpa,
        "blockwise": softmax_blockwise,
        "triton": softmax_triton,
    }

    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        key_embed_dim: int | None = None,
        value_head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        backend: Backend = "auto",
        score: Score = "dot",
        rotary_dim: int = 0,
        rotary_base: float = 10000.0,
    ) -> None:
        super().__init__(
            embed_dim,
            head_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            key_embed_dim=key_embed_dim,
            value_head_dim=value_head_dim,
            bias=bias,
            dropout=dropout,
            backend=backend,
            rotary_dim=rotary_dim,
            rotary_base=rotary_base,
        )
        if score not in ("dot", "gaussian"):
            raise ValueError(f"score must be dot or gaussian, received {score!r}")
        self.score: Score = score

    def score_arguments(self, num_keys: int) -> dict[str, Any]:
        """Return the kind of score."""
        return {"score": self.score}

    def reference_scores(self, query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
        """Return `softmax_scores`."""
        return softmax_scores(query, key, **arguments)

    def key_offset(self, key: Tensor, first_position: int) -> Tensor | None:
        """Return −‖key‖² / (2 √E) of Gaussian scores, (B, H_kv, L)."""
        if self.score == "dot":
            return None
        return key.to(compute_dtype(key)).square().sum(-1) / (-2.0 * self.head_dim**0.5)

    def cached_scores(
        self, query: Tensor, key: Tensor, offset: Tensor | None, cols: range, num_keys: int
    ) -> Tensor:
        """Return the scores of a part of the cache, up to what is constant in a row."""
        scores = grouped_scores(query * self.head_dim**-0.5, key)
        if self.score == "dot":
            return scores
        if offset is None:
            offset = self.key_offset(key, cols.start)
        assert offset is not None
        return scores + repeat_heads(offset, query.shape[1])[:, :, None]

    def cost(self, seq_len: int) -> Cost:
        """Return the cost by MGK appendix B: N²H(4E−1) + NHE(6C+2HE−5), output width HE.

        Grouped heads project fewer keys and values; the paper's formula covers H_kv = H only and
        is given for that case.
        """
        n, c, e, h = seq_len, self.embed_dim, self.head_dim, self.num_heads
        e_v, kv, width = self.value_head_dim, self.num_kv_heads, self.key_embed_dim
        projections = n * (c * h * e + width * kv * (e + e_v) + h * e_v * c)
        return Cost(
            paper_flops=n * n * h * (4 * e - 1) + n * h * e * (6 * c + 2 * h * e - 5),
            macs=projections + n * n * h * (e + e_v),
            num_parameters=sum(p.numel() for p in self.parameters()),
        )
