"""Linear attention by the chunks of linear.c: forward and backward are one call each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_probattn.base.graphs import written
from lit_probattn.base.memory import only_shapes
from lit_probattn.kernels.cpu.jobs import run_jobs
from lit_probattn.kernels.cpu.library import load
from lit_probattn.kernels.cpu.structure import (
    MOST,
    TALL,
    Block,
    numbers,
    pointers,
    reals,
    strides,
)
from lit_probattn.kernels.operator import define_operators, new_gradients

FeatureMap = Literal["none", "elu", "relu"]
MAPS = ("none", "elu", "relu")
_MULTIPLE = 16  # to which sizes are rounded up
# Entries of the states of a job.
_STATE_ENTRIES = 1 << 15

_GRADS = ("query", "key", "value", "prior")


class LinearInputs(NamedTuple):
    """Arguments of linear attention by chunks.

        out[h, i] = inverse Σ_j (φ(query[h, i]) · f[s, j]) keep[s, j] value[s, j]
        f[s, j] = Σ_r prior[s, r, j] φ(key[s, r, j])
        inverse = factor / (Σ_j φ(query[h, i]) · f[s, j] + eps), or factor without `divides`

    over real keys, H/S adjacent heads h sharing one source s. Rows whose sum is zero give zeros;
    sums below the root of the smallest normal number get no gradient, because their square would
    underflow.

    Args:
        query: (B, H, N, F), float32 or float64, like all other tensors with numbers.
        key: (B, S, K, L, F); H is a multiple of S.
        value: (B, S, L, E).
        prior: (S, K, 1 or L). None requires K = 1.
        key_mask: real keys, (B, L) bool; the features and values of others are ignored.
        keep: factors of values, (B, S, L), without gradient.
        row_map: φ of queries, an index in `MAPS`; `none` if they are features already.
        col_map: the same for keys.
        divides: whether rows are divided by their sums.
        is_causal: j ≤ i, with N = L; otherwise all keys.
        eps: added to the sums.
        factor: factor of the output.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    prior: Tensor | None
    key_mask: Tensor | None
    keep: Tensor | None
    row_map: int
    col_map: int
    divides: bool
    is_causal: bool
    eps: float
    factor: float


class _Call(Block):
    """Mirror of `Call` in linear.c."""

    _fields_ = (
        *numbers("batch heads groups rows cols size value_size components causal divides"),
        *numbers("row_map col_map prior_cols"),
        *reals("eps factor"),
        *pointers("query key value prior keep"),
        *strides("query:3 key:4 value:3 keep:3"),
        *pointers("key_mask"),
        *strides("key_mask:1"),
        *pointers("out inverse states"),
        *strides("out:3"),
        *pointers("grad_out"),
        *strides("grad_out:3"),
        *pointers("grad_query grad_key grad_value"),
        *strides("grad_query:3 grad_key:4 grad_value:3"),
        *pointers("grad_prior"),
    )


def linear_by_chunks(call: LinearInputs) -> Tensor:
    """Return linear attention, (B, H, N, E), differentiable, on the CPU.

    Raises:
        NotImplementedError: there are more than `MOST` components.
        TypeError: dtypes differ.
        ValueError: a causal call has different numbers of queries and keys, or several components
            have no prior.
    """
    if call.key.shape[2] > MOST:
        raise NotImplementedError(
            f"linear attention by chunks supports at most {MOST} components, received "
            f"{call.key.shape[2]}; use backend='blockwise'"
        )
    if call.key.shape[2] > 1 and call.prior is None:
        raise ValueError(f"keys of {call.key.shape[2]} components need a prior, received None")
    if call.is_causal and call.query.shape[2] != call.key.shape[3]:
        raise ValueError(
            "causal linear attention by chunks needs as many keys as queries, received "
            f"{call.query.shape[2]} queries and {call.key.shape[3]} keys"
        )
    for name in ("key", "value", "prior", "keep"):
        given = getattr(call, name)
        if given is not None and given.dtype != call.query.dtype:
            raise TypeError(
                f"linear attention by chunks expected {name} in {call.query.dtype}, received "
                f"{given.dtype}"
            )
    return _linear(*call)[0]


def _new_outputs(call: LinearInputs) -> tuple[Tensor, Tensor]:
    """Return buffers for the output and for what backward needs: factors of rows, and states.

    Heads of a position are adjacent, as the output projection reads them.
    """
    (batch, heads, rows, size), (sources, _, cols) = call.query.shape, call.key.shape[1:4]
    value_size = call.value.shape[-1]
    out = call.value.new_empty(batch, rows, heads, value_size).transpose(1, 2)
    full, wide = (-(-n // _MULTIPLE) * _MULTIPLE for n in (size, value_size))
    chunks = -(-cols // TALL) if call.is_causal else 1
    states = batch * sources * chunks * full * (wide + 1)
    return out, call.value.new_empty(batch * heads * rows + states)


def _describe(call: LinearInputs, out: Tensor, kept: Tensor) -> _Call:
    (batch, heads, rows, size), (sources, components, cols) = call.query.shape, call.key.shape[1:4]
    sizes = (batch, sources, heads // sources, rows, cols, size, call.value.shape[-1], components)
    block = _Call(*sizes, call.is_causal, call.divides, call.row_map, call.col_map)
    block.eps, block.factor = call.eps, call.factor
    block.prior_cols = 0 if call.prior is None else call.prior.shape[2]
    for name in ("query", "key", "value", "prior", "key_mask", "keep"):
        block.read(name, getattr(call, name))
    block.put("out", out)
    if kept.numel():
        block.put("inverse", kept)
        block.put("states", kept[batch * heads * rows :])
    return block


def _jobs(call: LinearInputs) -> list[tuple[int, int, int]]:
    """Return jobs (sample, first source, end): few, but enough for all threads.

    The states of a job's sources stay in the cache.
    """
    (batch, sources, _, _, size), value_size = call.key.shape, call.value.shape[-1]
    per_job = max(1, min(sources, _STATE_ENTRIES // (size * value_size)))
    while per_job > 1 and batch * -(-sources // per_job) < torch.get_num_threads():
        per_job = -(-per_job // 2)
    return [
        (sample, first, min(first + per_job, sources))
        for sample in range(batch)
        for first in range(0, sources, per_job)
    ]


def _run(name: str, call: LinearInputs, block: _Call) -> None:
    real = "float" if call.query.dtype == torch.float32 else "double"
    function = getattr(load(), f"linear_{name}_{real}")
    jobs = _jobs(call)
    run_jobs(lambda n: function(ctypes.byref(block), *jobs[n]), range(len(jobs)))


def _forward(call: LinearInputs, keeps: bool = True) -> tuple[Tensor, Tensor]:
    out, kept = _new_outputs(call)
    kept = kept if keeps else kept.new_empty(0)
    if only_shapes(out) or not out.numel():
        return out, kept
    _run("forward", call, _describe(call, out, kept))
    return out, kept


def _backward(
    call: LinearInputs, grad: Tensor, out: Tensor, kept: Tensor, skipped: Sequence[str]
) -> tuple[Tensor, ...]:
    """Return the gradients of `_GRADS`, empty if skipped."""
    made = new_gradients(call, _GRADS, skipped, keep_strides=True, dtype=None)
    grads: dict[str, Tensor] = dict(zip(_GRADS, made, strict=True))
    wanted = [n for n in grads if getattr(call, n) is not None and n not in skipped]
    if only_shapes(out):
        return made
    if not out.numel():
        for name in wanted:
            grads[name].zero_()
        return made
    block = _describe(call, out, kept)
    block.read("grad_out", grad)
    shares: Any = None
    for name in wanted:
        if name == "prior":
            shares = kept.new_zeros(len(call.query), *grads[name].shape, dtype=torch.float64)
            block.put("grad_prior", shares)
        else:
            block.put(f"grad_{name}", grads[name])
    _run("backward", call, block)
    if shares is not None:
        grads["prior"].copy_(shares.sum(0))
    return made


def _flops(x: Any, backward: bool) -> int:
    """Return FLOPs of the O(N) form, and of the pairs within chunks; not of the mixing of keys."""
    batch, heads, rows, size = x.query
    columns = x.value[3] + x.divides
    work = 2 * batch * size * columns
    states = work * (x.value[1] * x.value[2] + heads * rows)
    whole, rest = divmod(rows, TALL) if x.is_causal else (0, 0)
    pairs = 2 * batch * heads * (whole * TALL**2 + rest**2)
    scores, values = pairs * size, pairs * columns
    return 2 * states + 3 * scores + 2 * values if backward else states + scores + values


_linear = define_operators(
    ("linear_chunks", "linear_chunks_backward"),
    LinearInputs,
    _forward,
    _backward,
    new_outputs=_new_outputs,
    gradients=_GRADS,
    optional=tuple((name,) for name in _GRADS),
    flops=_flops,
    keep_strides=True,
    dtype=None,
    is_seen=lambda _: written() == "compiled",
    inference=partial(_forward, keeps=False),
)
