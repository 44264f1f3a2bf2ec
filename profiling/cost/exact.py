"""Exact closed forms of the models' cost.

The layer provides the cost of attention: `Cost.macs` for its reference, `Cost.pair_macs` for its
other backends. This module adds blocks, embeddings, heads and the backward pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lit_probattn.attention import Attention, Cost, variants
from lit_probattn.attention.backends import BACKENDS
from lit_probattn.base.errors import UnsupportedError


@dataclass(frozen=True)
class ExactCost:
    """Closed forms of one scope (model, layers or attention) for the forward pass of a batch.

    `macs` are matrix products of the reference; `norm_operations` are five per element of a
    normalisation, as fvcore does.
    """

    macs: int
    norm_operations: int
    num_parameters: int


def attention_cost(layer: Attention, seq_len: int) -> Cost:
    """Return the cost formula of a layer for one sequence, or raise an UnsupportedError."""
    try:
        return layer.cost(seq_len)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"{type(layer).__name__} has no cost formula: implement cost(seq_len)"
        ) from error


def layer_of_row(row: Mapping[str, Any]) -> Attention | None:
    """Return the layer of a row on the meta device; None if it is not a layer of this package."""
    cls = variants().get(row["attention_class"])
    if cls is None:
        return None
    try:  # a failed row can lack the number of heads
        heads, head_dim = int(row["num_heads"]), int(row["head_dim"])
        options = {**json.loads(row["attention_args"]), "num_heads": heads, "head_dim": head_dim}
        with torch.device("meta"):
            return cls(int(row.get("embed_dim", heads * head_dim)), **options)
    except (TypeError, ValueError):  # options of another version, or a package is missing
        return None


def backend_macs(
    layer: Attention,
    seq_len: int,
    backend: str,
    *,
    train: bool = False,
    dtype: torch.dtype = torch.float32,
) -> int | None:
    """Return the multiply-adds of a backend for one layer and sequence; None without closed form.

    In the forward pass, a fused backend may run more products than the reference: extra coordinates
    for norms and priors, and values once per component. Forward and backward together are three
    times the forward pass, twice for products with constants, plus recomputation: blockwise and
    PyTorch's fused attention recompute the scores (five products in backward for two in forward).
    """
    cost = attention_cost(layer, seq_len)
    macs = cost.macs
    scale = layer.num_heads * seq_len * seq_len
    if cost.pair_macs is None:
        if backend != layer.core.makes.stated_backend:
            return None
        return 3 * macs - cost.constant_macs if train else macs
    if backend not in BACKENDS or backend == "auto":
        return None
    reference, run = (cost.pair_macs(name, dtype) for name in ("reference", backend))
    linear = macs - scale * (reference.scores + reference.values) + seq_len * run.per_token
    forward = run.scores + run.values
    if not train:
        return linear + scale * forward
    repeated = {"reference": 0, "sdpa": forward // 2}
    again = repeated.get(backend, run.scores)
    return 3 * linear + scale * (3 * forward + again + run.m_step)


# ---------------------------------------------------------------------- models
@dataclass(frozen=True)
class ModelShape:
    """Sizes of a stack of blocks, its embeddings and its head.

    Args:
        num_layers: number of blocks of a stack.
        num_sequences: number of sequences per sample (2 for a pair).
        norm_first: pre-norm, with a final norm.
        embedding_parameters: token and position embeddings, and an output layer tied to them.
        head_parameters: the head and other parameters outside the blocks.
        head_macs: multiply-adds of the head for one sample.
        has_decoder: whether there is a second stack, whose blocks also have cross-attention and its
            norm; source and target have the same length.
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
    has_decoder: bool = False

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all stacks."""
        return self.num_layers * (2 if self.has_decoder else 1)

    @property
    def num_attentions(self) -> int:
        """Number of attention layers of all blocks."""
        return self.num_layers * (3 if self.has_decoder else 1)

    @property
    def num_norms(self) -> int:
        """Number of norms of all blocks: one per attention layer and one per MLP."""
        return self.num_attentions + self.num_blocks

    @property
    def calls(self) -> int:
        """Number of sequences per layer."""
        return self.batch_size * self.num_sequences


def scope_costs(shape: ModelShape, attention: Cost) -> dict[str, ExactCost]:
    """Return the closed forms of `attention` (all layers), `layers` (blocks) and `model`."""
    n, c, f, num_blocks = shape.seq_len, shape.embed_dim, shape.mlp_dim, shape.num_blocks
    attentions = shape.num_attentions
    total_attention = ExactCost(
        attention.macs * attentions * shape.calls, 0, attention.num_parameters * attentions
    )
    norm = 5 * n * c * shape.calls
    mlp_parameters = 2 * c * f + f + c
    blocks = ExactCost(
        total_attention.macs + 2 * n * c * f * num_blocks * shape.calls,
        shape.num_norms * norm,
        total_attention.num_parameters + num_blocks * mlp_parameters + shape.num_norms * 2 * c,
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
