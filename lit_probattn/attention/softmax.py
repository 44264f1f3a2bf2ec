"""Softmax attention: scaled dot products, or one Gaussian per key; any head size, grouped heads.

Fixed head size attention (Bhojanapalli et al., 2020) is this class with a `head_dim` that is not
embed_dim / num_heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_probattn.attention.backends import (
    AUTO_RULES,
    AutoRule,
    Backend,
    BackendFunction,
    pair_arguments,
)
from lit_probattn.attention.blockwise import Block, blockwise_attention
from lit_probattn.attention.core import Choice, Core, Gaussians, HeadCall, HeadLayout
from lit_probattn.attention.cost import (
    Cost,
    CostTerm,
    PairMacs,
    fused_pairs,
    mixture_terms,
    num_parts,
)
from lit_probattn.attention.functional import (
    Heads,
    compute_dtype,
    grouped_scores,
    reference_output,
    repeat_heads,
    split_precision,
    squared_distance,
)
from lit_probattn.attention.layer import Attention, Example
from lit_probattn.attention.rowpass.mixture import mixture_attention
from lit_probattn.attention.sdpa import fused_attention

Score = Literal["dot", "gaussian"]


@dataclass(frozen=True)
class SoftmaxArguments:
    """The kind of score, and the factor on products in units of 1/√E."""

    score: Score
    scale_ratio: float = 1.0


def softmax_scores(query: Tensor, key: Tensor, arguments: SoftmaxArguments) -> Tensor:
    """Return the scores of softmax attention.

    Source: MGK, ICML 2022, section 2.1 and appendix A (Gaussian, one head):
        dot:       query[i] · key[j] / √E
        gaussian:  −‖query[i] − key[j]‖² / (2 √E)
    Departs from the source: nothing.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        arguments: which of the two, and a factor other than 1/√E.

    Returns:
        (B, H, N, L).
    """
    key = repeat_heads(key, query.shape[1])
    root = query.shape[-1] ** 0.5 / arguments.scale_ratio
    if arguments.score == "dot":
        return query @ key.mT / root
    return -squared_distance(query, key) / (2.0 * root)


def softmax_reference(given: Heads, arguments: SoftmaxArguments) -> Tensor:
    """Return softmax(scores) @ value, (B, H, N, E_v), in at least float32."""
    query, key, value, masks, dropout = given.precise()
    return reference_output(softmax_scores(query, key, arguments), value, masks, dropout)


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


def softmax_sdpa(given: Heads, arguments: SoftmaxArguments) -> Tensor:
    """Return the same by PyTorch's fused attention, O(N) memory."""
    query, key, value, masks, _ = given
    scale = query.shape[-1] ** -0.5 * arguments.scale_ratio
    if arguments.score == "gaussian":
        query, key = gaussian_as_dot(query, key)
    return fused_attention(query, key, value, masks=masks, scale=scale)


def softmax_blockwise(given: Heads, arguments: SoftmaxArguments) -> Tensor:
    """Return the same block by block, with dropout, O(N · block) memory."""
    query, key, value, masks, dropout = given.precise()
    scale = query.shape[-1] ** -0.5 * arguments.scale_ratio
    if arguments.score == "gaussian":
        query, key = gaussian_as_dot(query, key)

    def scores(_: Block, rows: Tensor, cols: Tensor) -> Tensor:
        return rows @ repeat_heads(cols, rows.shape[1]).mT

    return blockwise_attention(scores, (query * scale, key), ("row", "col"), value, masks, dropout)


def softmax_native(given: Heads, arguments: SoftmaxArguments) -> Tensor:
    """Return the same as `softmax_blockwise`, with the rows of a block in C."""
    query, key, value, masks, dropout = given.precise()
    scale, col = query.shape[-1] ** -0.5 * arguments.scale_ratio, None
    if arguments.score == "gaussian":
        centre = key.detach().mean(-2, keepdim=True)
        key, query = key - centre, query - repeat_heads(centre, query.shape[1])
        norm = key.square().sum(-1) * (scale / -2.0)
        col = repeat_heads(norm, query.shape[1])[:, :, None]
    return mixture_attention(query * scale, key[:, :, None], value, masks, dropout, col=col)


def softmax_triton(given: Heads, arguments: SoftmaxArguments) -> Tensor:
    """Return softmax attention by the fused kernel, O(N) memory, forward and backward."""
    from lit_probattn.kernels.dense.attention import mgk_attention, softmax_attention

    query, key, value, *_ = given
    scale, call = query.shape[-1] ** -0.5 * arguments.scale_ratio, pair_arguments(given)
    if arguments.score == "dot":
        return softmax_attention(query, key, value, scale=scale, **call)
    precision = torch.full((key.shape[1], 1), scale, dtype=torch.float32, device=key.device)
    return mgk_attention(
        *(query, key[:, :, None], value),
        precision=precision,
        offset=None,
        gaussian=True,
        equal_precision=True,
        hard=False,
        **call,
    )


class SoftmaxCore(Core):
    """Softmax attention from heads to heads; see `SoftmaxAttention`."""

    variant: ClassVar[str] = "softmax"
    row_operators = True
    steps_over_cache: ClassVar[bool] = True
    can_drop_keys: ClassVar[bool] = True
    has_gaussians: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = ("dense/softmax",)
    # PyTorch's kernels are at least as fast as ours; ours serve dropout and learned biases.
    auto_rules: Mapping[str, AutoRule] = {
        **AUTO_RULES,
        "cuda": AutoRule(("sdpa", "triton", "blockwise", "reference")),
    }
    backends: ClassVar[Mapping[str, BackendFunction]] = {
        "reference": softmax_reference,
        "sdpa": softmax_sdpa,
        "blockwise": softmax_blockwise,
        "native": softmax_native,
        "triton": softmax_triton,
    }

    def __init__(
        self, layout: HeadLayout, backend: Backend = "auto", *, score: Score = "dot"
    ) -> None:
        super().__init__(layout, backend)
        if score not in ("dot", "gaussian"):
            raise ValueError(f"score must be dot or gaussian, received {score!r}")
        self.score: Score = score

    def choose(self, call: HeadCall, backend: str) -> Choice:
        """Return the kind of score; keys as they are."""
        return Choice(backend, call.key, SoftmaxArguments(self.score, call.scale_ratio()))

    def scores(self, call: HeadCall) -> Tensor:
        """Return `softmax_scores`."""
        dtype = compute_dtype(call.query)
        arguments = SoftmaxArguments(self.score, call.scale_ratio())
        return softmax_scores(call.query.to(dtype), call.key.to(dtype), arguments)

    def gaussians(self, call: HeadCall) -> Gaussians:
        """Return one Gaussian per key with σ² = √E, whichever score."""
        heads = call.query.shape[1]
        ones = torch.ones(heads, 1, dtype=compute_dtype(call.query), device=call.query.device)
        key = repeat_heads(call.key, heads)[:, :, None]
        return Gaussians(key, None, ones * self.layout.head_dim**0.5)

    def key_offset(self, key: Tensor, first_position: int) -> Tensor | None:
        """Return −‖key‖² / (2 √E) of Gaussian scores, (B, H_kv, L)."""
        if self.score == "dot":
            return None
        return key.to(compute_dtype(key)).square().sum(-1) / (-2.0 * self.layout.head_dim**0.5)

    def cached_scores(
        self, query: Tensor, key: Tensor, offset: Tensor | None, cols: range, call: HeadCall
    ) -> Tensor:
        """Return the scores of a part of the cache, up to what is constant in a row."""
        scores = grouped_scores(query * self.layout.head_dim**-0.5, key)
        if self.score == "dot":
            return scores
        if offset is None:
            offset = self.key_offset(key, cols.start)
        assert offset is not None
        return scores + repeat_heads(offset, query.shape[1])[:, :, None]


class SoftmaxAttention(Attention):
    """Softmax attention, the baseline of every other variant.

    Source: MGK, ICML 2022, Eq. (1); fixed head size: Bhojanapalli et al., 2020, Eq. (5).
        attn_weights[i, j] ∝ exp(query[i] · key[j] / √E)                score = dot
        attn_weights[i, j] ∝ exp(−‖query[i] − key[j]‖² / (2 √E))         score = gaussian
    Departs from the source: nothing.

    Args:
        score: scaled dot product, or one Gaussian per key with variance √E.
        common: the other arguments of `Attention`.

    Raises:
        ValueError: unknown score; see also `Attention`.
    """

    core: SoftmaxCore
    kernel_examples = (
        Example("softmax"),
        Example("softmax, grouped", {"num_heads": 4, "num_kv_heads": 2}, ("causal",)),
        Example("softmax, value size 9", {"value_head_dim": 9}, ("key", "dropout")),
        Example("gaussian", {"score": "gaussian"}, ("pairs", "bias")),
    )
    kernel_forms = (Example("softmax"),)

    def __init__(
        self, embed_dim: int, num_heads: int, *, score: Score = "dot", **common: Any
    ) -> None:
        super().__init__(embed_dim, num_heads, **common)
        self.core = SoftmaxCore(self.layout, self._backend, score=score)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost by MGK appendix B: N²H(4E−1) + NHE(6C+2HE−5), output width HE.

        Grouped heads project fewer keys and values; the paper's formula covers H_kv = H only and
        is given for that case.
        """
        return self.softmax_cost(seq_len)

    def pair_macs(self, backend: str, dtype: torch.dtype) -> PairMacs:
        """Gaussian scores carry the norm of the key in coordinates of its own."""
        size = self.head_dim
        if self.core.score == "gaussian" and backend in ("sdpa", "blockwise"):
            size += num_parts(backend, dtype)
        return fused_pairs(size, self.value_head_dim, 1, backend)

    def cost_terms(self, seq_len: int) -> list[CostTerm] | None:
        """Return the terms where all heads have one size and keys of their own."""
        sizes = (self.num_heads, self.head_dim, self.embed_dim)
        return mixture_terms(seq_len, *sizes) if self.has_plain_heads else None
