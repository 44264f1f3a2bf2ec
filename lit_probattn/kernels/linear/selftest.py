"""Self-test of linear attention over chunks: outputs and all gradients beside float64 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn.kernels.linear.operators import read_sources
from lit_probattn.kernels.selftest import HeadDims, beside, in_float64, random_tensor

_BATCH, _HEADS, _SOURCES, _ROWS, _KEYS = 2, 4, 2, 149, 167


def plain_sources(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return what `read_sources` computes, by the equation, storing all pairs."""
    pairs = torch.einsum("bhie,bsje->bhsij", query, key)
    if is_causal:
        pairs = pairs.tril(key.shape[2] - query.shape[2])
    num = torch.einsum("hs,bhsij,bsjd->bhid", weight, pairs, value)
    return num, torch.einsum("hs,bhsij->bhi", norm_weight, pairs)[..., None]


def self_test(
    family: str, device: torch.device, dtype: torch.dtype, head_dims: HeadDims
) -> list[tuple[Tensor, Tensor]]:
    """Return causal outputs and gradients; `linear_fish` with weights, the others grouped heads."""
    return compare(family == "linear_fish", True, device, dtype, head_dims, (_ROWS, _KEYS))


def compare(
    weighted: bool,
    is_causal: bool,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: HeadDims,
    sizes: tuple[int, int],
) -> list[tuple[Tensor, Tensor]]:
    """Return (found, float64) of numerators, denominators and every gradient."""
    (rows, keys), (head_dim, value_dim) = sizes, head_dims
    shapes = [
        (_BATCH, _HEADS, rows, head_dim),
        (_BATCH, _SOURCES, keys, head_dim),
        (_BATCH, _SOURCES, keys, value_dim),
        (_HEADS, _SOURCES),
        (_HEADS, _SOURCES),
    ]
    inputs = [
        random_tensor(*shape, seed=i, device=device, dtype=dtype) for i, shape in enumerate(shapes)
    ]
    inputs[:2] = [x.abs() / head_dim**0.5 for x in inputs[:2]]
    inputs[3:] = [x.float() for x in inputs[3:]]
    if not weighted:
        groups = torch.arange(_HEADS, device=device) // (_HEADS // _SOURCES)
        inputs[3:] = [torch.nn.functional.one_hot(groups, _SOURCES).float()] * 2
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    weights = (leaves[3], leaves[4]) if weighted else (None, None)
    num, den = read_sources(
        *leaves[:3], weight=weights[0], norm_weight=weights[1], is_causal=is_causal
    )
    exact = in_float64(inputs)
    truth = plain_sources(*exact, is_causal)  # type: ignore[call-arg, arg-type]
    cotangents = [
        random_tensor(*x.shape, seed=7, device=device, dtype=torch.float32) for x in truth
    ]
    wanted = 5 if weighted else 3
    assert den is not None
    return beside([num, den], truth, leaves[:wanted], exact[:wanted], cotangents)
