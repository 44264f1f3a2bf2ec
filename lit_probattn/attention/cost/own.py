"""What a variant costs that is its scores alone: they are counted, the rest is softmax's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lit_probattn.attention.cost.counting import Cost, Sizes
from lit_probattn.attention.cost.mgk import softmax_like


def of_scores(sizes: Sizes, layer: Any) -> Cost:
    """Return the cost of a layer that gives `reference_scores`.

    Products of the scores are counted, and the papers' rule is applied to them: 2k − 1 for every
    sum of k products.

    Args:
        sizes: of layer and sequence.
        layer: the layer.
    """
    n, h = sizes.n, sizes.h
    found, plain = count_score_macs(layer, n), softmax_like(sizes)
    by_rule = 2 * found - n * n * h if found else 0
    return replace(
        plain,
        paper_flops=plain.paper_flops - n * n * h * (2 * sizes.e - 1) + by_rule,
        macs=plain.macs - n * n * h * sizes.e + found,
    )


def count_score_macs(layer: Any, seq_len: int) -> int:
    """Count the multiply-adds of a layer's scores over a sequence, in matrix products.

    Counted at three small lengths, and continued as the polynomial of degree 2 that they are.
    """
    first, second, third = (_score_macs(layer, length) for length in (1, 2, 3))
    step, bend = second - first, third - 2 * second + first
    n = seq_len - 1
    return first + n * step + n * (n - 1) // 2 * bend


def _score_macs(layer: Any, length: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    weight = layer.query_proj.weight
    heads = torch.zeros(1, layer.num_heads, length, layer.head_dim)
    heads = heads.to(weight.device, weight.dtype)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        places = [torch.arange(length, device=weight.device)] * 2
        layer.reference_scores(heads, heads, *(places if layer.core.knows_positions else []))
    return int(counter.get_total_flops()) // 2
