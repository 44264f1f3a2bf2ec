"""Self-test of softmax and mixture attention: every form of score against float64 sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_probattn.kernels.dense.operators import mixture_attention
from lit_probattn.kernels.selftest import beside, hide_future, in_float64, random_tensor

_BATCH, _HEADS, _ROWS, _KEYS = 2, 2, 149, 167


class _Form(NamedTuple):
    """A form of score: components, products, hard, equal scales, terms per query and key."""

    components: int
    products: int
    hard: bool
    equal: bool
    terms: bool = True


FORMS = {
    "softmax": (_Form(1, 1, False, True, terms=False),),
    "mgk": (_Form(2, 2, False, False), _Form(2, 2, True, True)),
    "smgk": (_Form(2, 1, False, True), _Form(2, 1, False, False)),
}


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scales: Tensor,
    row_bias: Tensor,
    key_bias: Tensor,
    is_causal: bool,
    hard: bool,
) -> Tensor:
    """Return what `mixture_attention` computes, by the equation, in the dtype of the inputs."""
    scores = scales[None, :, :, None, None] * (query[:, :, None] @ key.mT)
    scores = scores + row_bias[..., None] + key_bias[..., None, :]
    pairs = scores.amax(2) if hard else scores.logsumexp(2)
    return (hide_future(pairs) if is_causal else pairs).softmax(-1) @ value


def self_test(
    family: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> list[tuple[Tensor, Tensor]]:
    """Return outputs and gradients of a family's scores beside those of float64 sums.

    Causal with more keys than queries, in ragged sizes: whole tiles and tiles at both edges.
    """
    pairs = []
    for number, form in enumerate(FORMS[family]):
        pairs += compare(form, True, number, device, dtype, head_dim)
    return pairs


def compare(
    form: _Form,
    is_causal: bool,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    sizes: tuple[int, int] = (_ROWS, _KEYS),
) -> list[tuple[Tensor, Tensor]]:
    """Return (found, float64) of the output and of every gradient that exists."""
    rows, keys = sizes
    shapes = [
        (_BATCH, _HEADS, rows, head_dim),
        (_BATCH, _HEADS, form.products, keys, head_dim),
        (_BATCH, _HEADS, keys, head_dim),
        (_HEADS, form.components),
        (_BATCH, _HEADS, form.components, rows),
        (_BATCH, _HEADS, form.components, keys),
        (_BATCH, _HEADS, rows, head_dim),
    ]
    tensors = [
        random_tensor(*shape, seed=10 * seed + i, device=device, dtype=dtype)
        for i, shape in enumerate(shapes)
    ]
    tensors[3:6] = [x.float() * form.terms for x in tensors[3:6]]
    tensors[3] = torch.full_like(tensors[3], head_dim**-0.5)
    if not form.equal:
        tensors[3] = tensors[3] * (torch.arange(form.components, device=device) + 1.0)
    *inputs, cotangent = tensors
    wanted = [0, 1, 2] + ([] if form.equal else [3]) + ([4, 5] if form.terms else [])
    leaves = [x.detach().requires_grad_() for x in inputs]
    given: list[Tensor | None] = list(leaves)
    if not form.terms:
        given[3:] = [None] * 3
    out, _ = mixture_attention(
        *(*given, None, None, None, None, head_dim**-0.5, is_causal, form.hard, form.equal, 0)
    )
    exact = in_float64(inputs)
    truth = plain_attention(*exact, is_causal, form.hard)  # type: ignore[call-arg, arg-type]
    ours, theirs = ([tensors[i] for i in wanted] for tensors in (leaves, exact))
    return beside([out], [truth], ours, theirs, [cotangent])
