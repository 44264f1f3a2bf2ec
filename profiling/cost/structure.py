"""What a model is made of: its attention layers, whether blocks are alike, parameters by scope."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from lit_probattn.attention import Attention
from lit_probattn.models.adaptive_softmax import AdaptiveSoftmax
from profiling.measure.rows import Scope


def attention_layers(model: nn.Module) -> list[Attention]:
    """Return the attention layers of a model, in order."""
    return [m for m in model.modules() if isinstance(m, Attention)]


def require_identical(blocks: nn.ModuleList) -> None:
    """Check that all blocks of a stack have the same structure and parameter shapes.

    Raises:
        ValueError: they differ, so that counting one of them would not do.
    """

    def signature(block: nn.Module) -> tuple[str, list[tuple[str, tuple[int, ...]]]]:
        return repr(block), [(n, tuple(p.shape)) for n, p in block.named_parameters()]

    first = signature(blocks[0])
    for index, block in enumerate(blocks):
        if signature(block) != first:
            raise ValueError(f"block {index} differs from block 0: expected identical blocks")


def count_parameters(model: nn.Module, attention_only: bool) -> dict[Scope, int]:
    """Count the parameters of the attention layers, the blocks and the whole model."""
    layers = attention_layers(model)
    counts: dict[Scope, int] = {"attention": sum(_numel(layer) for layer in layers)}
    if not attention_only:
        counts["layers"] = _numel(cast(Any, model.encoder).blocks)
        counts["model"] = _numel(model)
    return counts


def table_parameters(model: nn.Module) -> int:
    """Count token and position tables, and an output layer that is tied to them."""
    tables = (nn.Embedding, AdaptiveSoftmax)
    return sum(_numel(m) for m in model.modules() if isinstance(m, tables))


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
