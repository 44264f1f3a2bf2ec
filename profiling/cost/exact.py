"""What our models cost to the unit: multiply-adds and parameters, as closed forms of their sizes.

The attention part comes from the layer's own `cost(seq_len)`, which states what its reference
runs. The forms here add blocks, embeddings and heads, the parameters of the layers we know, and
what a backend runs beyond the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lit_probattn.attention import Attention, LinearAttention, MGKAttention, SoftmaxAttention
from profiling.cost.formulas import printed_gap


class NoFormulaError(NotImplementedError):
    """A variant gives no closed form for its cost."""


@dataclass(frozen=True)
class ExactCost:
    """Closed forms of one scope (model, layers or attention), forward, one batch.

    Args:
        macs: multiply-adds in matrix products of the reference.
        norm_operations: what fvcore adds for normalisations, five per element.
        num_parameters: parameters.
    """

    macs: int
    norm_operations: int
    num_parameters: int


# ---------------------------------------------------------------------- attention layers
def _projection_parameters(layer: Attention) -> int:
    """Count the four projections from sizes."""
    inner = layer.num_query_heads * layer.head_dim
    values = layer.num_value_heads * layer.value_head_dim
    outer = layer.num_heads * layer.value_head_dim
    weights = layer.embed_dim * (inner + outer) + layer.key_embed_dim * (layer.key_width + values)
    biases = inner + layer.key_width + values + layer.embed_dim if layer.use_bias else 0
    return weights + biases


def _softmax_parameters(layer: SoftmaxAttention) -> int:
    return _projection_parameters(layer)


def _mgk_parameters(layer: MGKAttention) -> int:
    """Projections; per owner K priors (setting A), K·E shifts, K variances (if learned)."""
    owners = layer.num_kv_heads if layer.mixture_heads == "kv" else layer.num_heads
    total, k = _projection_parameters(layer), layer.num_components
    if layer.e_step == "learned" and layer.prior is not None:
        per_head = {"layer": k, "head": owners * k}
        share = layer.prior.share
        total += per_head[share] if share in per_head else owners * k * layer.prior.value.shape[-1]
    if layer.shifted_keys:
        total += owners * k * layer.head_dim
    if layer.variance.log_variance is not None:
        total += owners * k
    return total


PARAMETERS: dict[type[Attention], Callable[[Any], int]] = {
    SoftmaxAttention: _softmax_parameters,
    MGKAttention: _mgk_parameters,
}


def attention_cost(layer: Attention, seq_len: int) -> ExactCost:
    """Return the closed forms of one layer over one sequence.

    Raises:
        NoFormulaError: the variant has none.
    """
    try:
        cost = layer.cost(seq_len)
    except NotImplementedError as error:
        raise NoFormulaError(
            f"{type(layer).__name__} gives no cost formula: implement cost(seq_len)"
        ) from error
    known = PARAMETERS.get(type(layer))
    return ExactCost(cost.macs, 0, cost.num_parameters if known is None else known(layer))


# ---------------------------------------------------------------------- backends
def _split_count(dtype: torch.dtype) -> int:
    """Return into how many coordinates a scalar goes: low precision splits it in three."""
    return 1 if dtype in (torch.float32, torch.float64) else 3


@dataclass(frozen=True)
class PairMacs:
    """Multiply-adds per (head, query, key position), forward.

    Args:
        scores: query·key over all components and extra coordinates.
        values: weights·value.
    """

    scores: int
    values: int


def _softmax_pairs(layer: SoftmaxAttention, backend: str, dtype: torch.dtype) -> PairMacs:
    gaussian = layer.score == "gaussian" and backend not in ("reference", "triton")
    parts = _split_count(torch.float32 if backend == "blockwise" else dtype)
    size = layer.head_dim + (parts if gaussian else 0)
    if backend == "sdpa":
        size = max(size, layer.value_head_dim)
        return PairMacs(size, size)
    return PairMacs(size, layer.value_head_dim)


def _mgk_pairs(layer: MGKAttention, backend: str, dtype: torch.dtype) -> PairMacs:
    """K keys, with the coordinates that carry prior and norm; fused: K values too.

    Kernels add norms and priors as terms, and shifted keys share one product.
    """
    k = layer.num_components
    if backend == "triton":
        products = 1 if layer.shares_product else k
        return PairMacs(products * layer.head_dim, layer.value_head_dim)
    if backend == "reference":
        return PairMacs(k * layer.head_dim, layer.value_head_dim)
    parts = _split_count(torch.float32 if backend == "blockwise" else dtype)
    size = layer.head_dim + parts
    if layer.score == "gaussian" and not layer.variance.is_equal:
        size += {1: 1, 3: 6}[parts]
    if backend == "sdpa":
        size = max(size, layer.value_head_dim)
        return PairMacs(k * size, k * size)
    return PairMacs(k * size, layer.value_head_dim)


def _shift_products(layer: MGKAttention) -> int:
    """Return multiply-adds per position of query · shift and, for Gaussian scores, key · shift."""
    owners = layer.num_kv_heads if layer.mixture_heads == "kv" else layer.num_heads
    heads = layer.num_heads + (owners if layer.score == "gaussian" else 0)
    return heads * layer.num_components * layer.head_dim


PAIRS: dict[type[Attention], Callable[[Any, str, torch.dtype], PairMacs]] = {
    SoftmaxAttention: _softmax_pairs,
    MGKAttention: _mgk_pairs,
}


def m_step_pair_macs(layer: Attention) -> int:
    """Return what setting B adds per pair in training: component scores for the M-step."""
    if isinstance(layer, MGKAttention) and layer.prior is not None and layer.prior.by_m_step:
        return layer.num_components * layer.head_dim
    return 0


def stated_backend(layer: Attention) -> str:
    """Return the implementation whose products `layer.cost(seq_len).macs` states.

    Linear attention states its O(N) form; its reference stores the N x N map to be a yardstick.
    """
    return "blockwise" if isinstance(layer, LinearAttention) else "reference"


def backend_macs(
    layer: Attention,
    seq_len: int,
    backend: str,
    *,
    train: bool = False,
    dtype: torch.dtype = torch.float32,
) -> int | None:
    """Return what a backend runs for one layer and one sequence, or None if we have no form.

    Forward, a fused backend may run more products than the reference: extra coordinates that carry
    norms and priors, and values once per component. Forward and backward together are three times
    the forward, plus what is computed again: blockwise repeats the scores; PyTorch's fused
    attention repeats them too (five products in backward for two in forward).
    """
    macs = attention_cost(layer, seq_len).macs
    pairs_of = PAIRS.get(type(layer))
    scale = layer.num_heads * seq_len * seq_len
    if pairs_of is None:
        return macs * (3 if train else 1) if backend == stated_backend(layer) else None
    if backend not in ("reference", "sdpa", "blockwise", "triton"):
        return None
    reference, run = pairs_of(layer, "reference", dtype), pairs_of(layer, backend, dtype)
    linear = macs - scale * (reference.scores + reference.values)
    if backend == "triton" and isinstance(layer, MGKAttention) and layer.shares_product:
        linear += seq_len * _shift_products(layer)
    forward = run.scores + run.values
    if not train:
        return linear + scale * forward
    repeated = {"reference": 0, "sdpa": forward // 2}
    again = repeated.get(backend, run.scores)
    return 3 * linear + scale * (3 * forward + again + m_step_pair_macs(layer))


def printed_gap_operations(layer: Attention, seq_len: int) -> int:
    """Return how far the paper's simplified total lies below the corrected one for this layer."""
    if not isinstance(layer, MGKAttention) or layer.shifted_keys:
        return 0
    k = layer.num_components
    return int(printed_gap(seq_len, layer.num_heads * k, layer.head_dim, k))


# ---------------------------------------------------------------------- models
@dataclass(frozen=True)
class ModelShape:
    """Sizes of a stack of blocks and what stands around it.

    Args:
        num_layers: blocks.
        embed_dim: C.
        mlp_dim: inner width.
        seq_len: N.
        num_sequences: sequences that one sample sends through the blocks (2 for a pair).
        batch_size: samples.
        norm_first: pre-norm, with a final norm.
        embedding_parameters: token and position tables (and an output layer tied to them).
        head_parameters: the head, and what is not in the blocks otherwise.
        head_macs: the head's products for one sample.
    """

    num_layers: int
    embed_dim: int
    mlp_dim: int
    seq_len: int
    num_sequences: int
    batch_size: int
    norm_first: bool
    embedding_parameters: int
    head_parameters: int
    head_macs: int

    @property
    def calls(self) -> int:
        """Sequences through every layer."""
        return self.batch_size * self.num_sequences


def scope_costs(shape: ModelShape, attention: ExactCost) -> dict[str, ExactCost]:
    """Return the closed forms of `attention` (all layers), `layers` (blocks) and `model`."""
    n, c, f, layers = shape.seq_len, shape.embed_dim, shape.mlp_dim, shape.num_layers
    total_attention = ExactCost(
        attention.macs * layers * shape.calls, 0, attention.num_parameters * layers
    )
    norm = 5 * n * c * shape.calls
    mlp_parameters = 2 * c * f + f + c
    blocks = ExactCost(
        total_attention.macs + 2 * n * c * f * layers * shape.calls,
        2 * layers * norm,
        total_attention.num_parameters + layers * (mlp_parameters + 4 * c),
    )
    final = shape.norm_first
    model = ExactCost(
        blocks.macs + shape.head_macs * shape.batch_size,
        blocks.norm_operations + (norm if final else 0),
        blocks.num_parameters
        + (2 * c if final else 0)
        + shape.embedding_parameters
        + shape.head_parameters,
    )
    return {"attention": total_attention, "layers": blocks, "model": model}
