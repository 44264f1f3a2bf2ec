"""Cosine attention: a variant that the package does not have, for the proof that it could.

`python -m tests.attention.addition_proof` uses it from outside the package, and copies it inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_probattn.attention.backends import Backend, BackendFunction
from lit_probattn.attention.blockwise import blockwise_attention
from lit_probattn.attention.core import (
    Choice,
    Core,
    HeadCall,
    HeadLayout,
    Learned,
)
from lit_probattn.attention.cost import Cost
from lit_probattn.attention.functional import (
    Heads,
    compute_dtype,
    grouped_scores,
    reference_output,
    repeat_heads,
)
from lit_probattn.attention.layer import Attention


class CosineArguments(NamedTuple):
    """Inverse temperatures, (H,)."""

    sharpness: Tensor


def cosine_scores(query: Tensor, key: Tensor, sharpness: Tensor) -> Tensor:
    """Return sharpness · cos(query[i], key[j]), (B, H, N, L)."""
    key = repeat_heads(F.normalize(key, dim=-1), query.shape[1])
    return sharpness.to(query.dtype)[:, None, None] * (F.normalize(query, dim=-1) @ key.mT)


def cosine_reference(given: Heads, arguments: CosineArguments) -> Tensor:
    """Return softmax(scores) @ value, storing the maps."""
    query, key, value, masks, dropout = given
    dtype = compute_dtype(query)
    scores = cosine_scores(query.to(dtype), key.to(dtype), arguments.sharpness)
    return reference_output(scores, value, masks, dropout)


def cosine_blockwise(given: Heads, arguments: CosineArguments) -> Tensor:
    """Return the same block by block."""
    query, key, value, masks, dropout = given
    dtype = compute_dtype(query)
    sharpness = arguments.sharpness.to(dtype)[:, None, None]
    return blockwise_attention(
        lambda _, rows, cols: rows @ repeat_heads(cols, rows.shape[1]).mT,
        (F.normalize(query.to(dtype), dim=-1) * sharpness, F.normalize(key.to(dtype), dim=-1)),
        ("row", "col"),
        value.to(dtype),
        masks,
        dropout,
    )


class CosineCore(Core):
    """Cosine attention from heads to heads; any scale cancels."""

    variant: ClassVar[str] = "cosine"
    steps_over_cache: ClassVar[bool] = True
    backends: ClassVar[Mapping[str, BackendFunction]] = {
        "reference": cosine_reference,
        "blockwise": cosine_blockwise,
    }

    def __init__(self, layout: HeadLayout, backend: Backend, sharpness: float) -> None:
        super().__init__(layout, backend)
        self.log_sharpness = nn.Parameter(torch.full((layout.out,), sharpness).log())

    def choose(self, call: HeadCall, backend: str) -> Choice:
        """Return the sharpness; keys as they are."""
        return Choice(backend, call.key, CosineArguments(self.log_sharpness.exp()))

    def scores(self, call: HeadCall) -> Tensor:
        """Return `cosine_scores`."""
        query, key = (x.to(compute_dtype(x)) for x in (call.query, call.key))
        return cosine_scores(query, key, self.log_sharpness.exp())

    def cached_scores(
        self, query: Tensor, key: Tensor, offset: Tensor | None, cols: range, call: HeadCall
    ) -> Tensor:
        """Return the scores of a part of the cache."""
        sharpness = self.log_sharpness.exp().to(query.dtype)[:, None, None]
        return sharpness * grouped_scores(F.normalize(query, dim=-1), F.normalize(key, dim=-1))

    def learned(self) -> dict[str, Learned]:
        """Return the sharpness of every head."""
        return {"sharpness": Learned(self.log_sharpness.exp()[:, None], "sharpness", "1/T")}


class CosineAttention(Attention):
    """Attention whose scores are cosines: attn_weights ∝ exp(cos(query[i], key[j]) / T_h).

    Args:
        embed_dim: C.
        num_heads: H.
        sharpness: 1/T at the start.
        common: the other arguments of `Attention`.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, sharpness: float = 10.0, **common: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **common)
        self.core = CosineCore(self.layout, self._backend, sharpness)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost of softmax attention; norms have no products."""
        return self.softmax_cost(seq_len)
