"""Self-test of softmax and mixture attention: all forms of score against float64 sums."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_probattn.kernels.dense.lowering import lower_points
from lit_probattn.kernels.dense.operators import MixtureInputs, mixture_attention
from lit_probattn.kernels.runtime import NO_PAIRS, PairOptions
from lit_probattn.kernels.selftest import (
    HeadDims,
    Selection,
    beside,
    causal,
    in_float64,
    masked,
    random_tensor,
)

_BATCH, _HEADS, _KEY_HEADS, _VALUE_HEADS, _ROWS, _KEYS = 2, 4, 2, 1, 149, 167


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
    hard: bool,
    selected: Selection | None = None,
) -> Tensor:
    """Compute `mixture_attention` by the equation, in the dtype of the inputs."""
    heads = query.shape[1]
    key, scales, key_bias, value = (
        x.repeat_interleave(heads // x.shape[dim], dim)
        for x, dim in ((key, 1), (scales, 0), (key_bias, 1), (value, 1))
    )
    scores = scales[None, :, :, None, None] * (query[:, :, None] @ key.mT)
    scores = scores + row_bias[..., None] + key_bias[..., None, :]
    pairs = scores.amax(2) if hard else scores.logsumexp(2)
    return (pairs.softmax(-1) if selected is None else selected.weights(pairs)) @ value


def self_test(
    family: str, device: torch.device, dtype: torch.dtype, head_dims: HeadDims
) -> list[tuple[Tensor, Tensor]]:
    """Return outputs and gradients of a family's scores, paired with float64 results.

    Heads are grouped, four query heads to two key heads and one value head. Every form is tested
    with a causal mask and more keys than queries, in odd sizes: whole tiles and tiles at both
    edges. The first form is also tested with masks and dropout.
    """
    compared = compare if family == "softmax" else compare_points
    pairs = []
    for number, form in enumerate(FORMS[family]):
        pairs += compared(form, "causal", number, device, dtype, head_dims)
    return pairs + compared(FORMS[family][0], "masked", 7, device, dtype, head_dims)


def compare(
    form: _Form,
    selection: Literal["causal", "masked", "all"],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: HeadDims,
    sizes: tuple[int, int] = (_ROWS, _KEYS),
) -> list[tuple[Tensor, Tensor]]:
    """Return (found, float64) of the output and of all existing gradients."""
    (rows, keys), (head_dim, value_dim) = sizes, head_dims
    shapes = [
        (_BATCH, _HEADS, rows, head_dim),
        (_BATCH, _KEY_HEADS, form.products, keys, head_dim),
        (_BATCH, _VALUE_HEADS, keys, value_dim),
        (_KEY_HEADS, form.components),
        (_BATCH, _HEADS, form.components, rows),
        (_BATCH, _KEY_HEADS, form.components, keys),
        (_BATCH, _HEADS, rows, value_dim),
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
    if form.equal:
        given[3] = leaves[3][:, :1].detach()
    if not form.terms:
        given[3:] = [None] * 3
    selected = _select(selection, (_BATCH, _HEADS, rows, keys), device)
    terms = dict(zip(MixtureInputs._fields, given, strict=False))
    flags = {"scale": head_dim**-0.5, "hard": form.hard}
    pairs: PairOptions = {**NO_PAIRS, **({} if selected is None else selected.options)}
    out, _ = mixture_attention(*MixtureInputs(**terms, **flags, **pairs))  # type: ignore[arg-type]
    exact = in_float64(inputs)
    truth = plain_attention(*exact, form.hard, selected)  # type: ignore[call-arg, arg-type]
    ours, theirs = ([tensors[i] for i in wanted] for tensors in (leaves, exact))
    return beside([out], [truth], ours, theirs, [cotangent])


def _select(
    selection: str, shape: tuple[int, int, int, int], device: torch.device
) -> Selection | None:
    if selection == "causal":
        return causal(*shape[2:], device)
    return masked(shape, device) if selection == "masked" else None


def point_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    precision: Tensor,
    offset: Tensor,
    shift: Tensor | None,
    form: _Form,
    pairs: PairOptions,
    gaussian: bool = True,
) -> Tensor:
    """Return attention to mixtures of Gaussian keys by their normal form."""
    numbers = [precision[..., None], offset] + ([] if shift is None else [shift])
    query, key, row, col = lower_points(query, key, torch.cat(numbers, 2), gaussian, form.equal)
    terms: dict[str, Any] = {
        "scales": precision[:, :1].detach() if form.equal else precision,
        "row_bias": row if row.dim() > 1 else None,
        **{"key_bias": col, "scale": 1.0, "hard": form.hard},
        **{**NO_PAIRS, **pairs},
    }
    out, _ = mixture_attention(*MixtureInputs(query, key, value, **terms))
    return out


def plain_points(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    precision: Tensor,
    offset: Tensor,
    shift: Tensor | None,
    hard: bool,
    selected: Selection | None,
    gaussian: bool = True,
) -> Tensor:
    """Compute `point_attention` by the equation, storing all distances."""
    heads = query.shape[1]
    if shift is not None:
        key = key + shift[:, :, None]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    precision, offset = (x.repeat_interleave(heads // x.shape[0], 0) for x in (precision, offset))
    if gaussian:
        scores = (query[:, :, None, :, None] - key[:, :, :, None]).square().sum(-1) / -2.0
    else:
        scores = query[:, :, None] @ key.mT
    scores = scores * precision[None, :, :, None, None] + offset[None, :, :, None]
    pairs = scores.amax(2) if hard else scores.logsumexp(2)
    return (pairs.softmax(-1) if selected is None else selected.weights(pairs)) @ value


def without_ties(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries, and keys of two components, whose scores differ in every pair.

    Between scores that are equal up to rounding, rounding selects the component that gets the whole
    gradient. Here the components differ only in the sign of one coordinate of at least 2, as it is
    in queries: their scores differ by 8 τ or more.
    """
    query, key = query.clone(), key.clone()
    for x in (query, key):
        x[..., 0] = torch.where(x[..., 0] < 0, x[..., 0] - 2, x[..., 0] + 2)
    key[:, :, 1] = key[:, :, 0]
    key[:, :, 1, :, 0] *= -1
    return query, key


def compare_points(
    form: _Form,
    selection: Literal["causal", "masked", "all"],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: HeadDims,
    sizes: tuple[int, int] = (_ROWS, _KEYS),
    gaussian: bool = True,
) -> list[tuple[Tensor, Tensor]]:
    """Return (found, float64) of `point_attention` and every gradient."""
    (rows, keys), (head_dim, value_dim) = sizes, head_dims
    shapes = [
        (_BATCH, _HEADS, rows, head_dim),
        (_BATCH, _KEY_HEADS, form.products, keys, head_dim),
        (_BATCH, _VALUE_HEADS, keys, value_dim),
        (_KEY_HEADS, form.components),
        (_KEY_HEADS, form.components, 1),
        (_KEY_HEADS, form.components, head_dim),
        (_BATCH, _HEADS, rows, value_dim),
    ]
    *inputs, cotangent = (
        random_tensor(*shape, seed=10 * seed + i, device=device, dtype=dtype)
        for i, shape in enumerate(shapes)
    )
    inputs[3:] = [x.float() for x in inputs[3:]]
    inputs[3] = torch.full_like(inputs[3], head_dim**-0.5)
    if not form.equal:
        inputs[3] = inputs[3] * (torch.arange(form.components, device=device) + 1.0)
    if form.hard and form.products > 1:  # components of shifted keys differ by their shifts
        inputs[:2] = without_ties(*inputs[:2])
        inputs[4] = inputs[4] / 16  # log-priors differ by less than the scores
    is_shifted = form.products < form.components
    wanted = [0, 1, 2, 4] + ([] if form.equal else [3]) + ([5] if is_shifted else [])
    leaves = [x.detach().requires_grad_() for x in inputs]
    query, key, value, precision, offset, shift = leaves
    selected = _select(selection, (_BATCH, _HEADS, rows, keys), device)
    out = point_attention(
        *(query, key, value, precision, offset, shift if is_shifted else None),
        *(form, {} if selected is None else selected.options, gaussian),
    )
    exact = in_float64(inputs)
    shifts = exact[5] if is_shifted else None
    query, key, value, precision, offset = exact[:5]
    truth = plain_points(
        query, key, value, precision, offset, shifts, form.hard, selected, gaussian
    )
    ours, theirs = ([tensors[i] for i in wanted] for tensors in (leaves, exact))
    return beside([out], [truth], ours, theirs, [cotangent])
