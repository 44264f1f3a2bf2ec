"""Cost of a variant that is defined by hooks: hooks are counted, the rest is softmax attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention.cost.counting import Cost, Sizes
from lit_probattn.attention.cost.mgk import softmax_like


def of_scores(sizes: Sizes, layer: Any) -> Cost:
    """Return the cost of a layer that defines `reference_scores`.

    Products of the hooks are counted. The papers' rule applies to the products of the scores,
    2k − 1 for every sum of k products; a multiply-add of the other hooks is two operations.

    Args:
        sizes: sizes of layer and sequence.
        layer: the layer.
    """
    n, h = sizes.n, sizes.h
    found, plain = _count(layer, n, _run_scores), softmax_like(sizes)
    maps = _run_scores(layer, 1).shape[1]
    after = _count(layer, n, partial(_run_weights, maps)) if layer.hooks() else 0
    by_rule = 2 * found - n * n * h if found else 0
    cost = replace(
        plain,
        paper_flops=plain.paper_flops - n * n * h * (2 * sizes.e - 1) + by_rule + 2 * after,
        macs=plain.macs - n * n * h * sizes.e + found + after,
    )
    return with_gate(cost, layer, n)


def with_gate(cost: Cost, layer: Any, seq_len: int) -> Cost:
    """Return a cost plus the products of the layer's `gate`, two operations per multiply-add."""
    if "gate" not in layer.hooks():
        return cost
    found = _count(layer, seq_len, _run_gate)
    flops, macs = cost.paper_flops + 2 * found, cost.macs + found
    return replace(cost, paper_flops=flops, macs=macs, terms=())


def _count(layer: Any, seq_len: int, run: Callable[[Any, int], object]) -> int:
    """Count the multiply-adds of hooks over a sequence, in matrix products.

    Counted at three small lengths and extrapolated, because they are a polynomial of degree 2.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for length in (1, 2, 3):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            run(layer, length)
        counts.append(int(counter.get_total_flops()) // 2)
    step, bend = counts[1] - counts[0], counts[2] - 2 * counts[1] + counts[0]
    n = seq_len - 1
    return counts[0] + n * step + n * (n - 1) // 2 * bend


def _zeros(layer: Any, *shape: int) -> Tensor:
    weight = layer.query_proj.weight
    return torch.zeros(shape, device=weight.device, dtype=weight.dtype)


def _run_scores(layer: Any, length: int) -> Tensor:
    heads = _zeros(layer, 1, layer.layout.query, length, layer.head_dim)
    places = [torch.arange(length, device=heads.device)] * 2
    scores: Tensor = layer.reference_scores(
        heads, heads, *(places if layer.core.knows_positions else [])
    )
    return scores


def _run_weights(maps: int, layer: Any, length: int) -> None:
    """Run the hooks on this many score maps."""
    from lit_probattn.attention.own.derived import Parts

    heads = _zeros(layer, 1, layer.layout.query, length, layer.head_dim)
    side = layer.query_side(_zeros(layer, 1, length, layer.embed_dim))
    parts, variant = Parts(heads, heads, side), layer.core.variant(None)
    weights = _zeros(layer, 1, maps, length, length)
    for hook in (variant.normaliser, variant.mixer):
        weights = weights if hook is None else hook(weights, *parts.beside(hook))


def _run_gate(layer: Any, length: int) -> None:
    out = _zeros(layer, 1, layer.layout.out, length, layer.value_head_dim)
    layer.gate(out, _zeros(layer, 1, length, layer.embed_dim))
