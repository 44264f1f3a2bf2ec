"""Attention by the tiles of tiles.c: forward and backward are one call each, on plain tensors.

It is independent of variants, and computes scores from maps of queries and keys, added terms, and
the reduction of maps to the score of a head, which tiles.c defines.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
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

Reduction = Literal["soft", "hard", "sum", "layers", "power"]
KINDS = ("soft", "hard", "sum", "layers", "power")
_WIDE = 128  # keys of a tile, as in tiles.c
_TILES_PER_JOB = 8  # fewer where there would be fewer than 4 jobs per thread

_SIZES = ("batch", "heads", "rows", "cols", "size", "value_size", "maps", "components", "kind")
_HEADS = ("query", "key", "value")
_GRADS = ("query", "key", "value", "coef", "row", "col", "bias")
_MIXING = ("noise_scale", "first", "first_bias", "second")


class Inputs(NamedTuple):
    """Arguments of attention by tiles; tiles.c defines the computation.

    Args:
        query: (B, H, N, E); (B, R, N, E) if heads share the maps (`sum`, `layers`).
        key: (B, H_key, R, L, E), R components or 1 for all; (B, 1, R, L, E) if heads share it.
        value: (B, H_value, L, E_v). H is a multiple of the numbers of key and value heads. All
            three have one dtype: float32 or float64, like all other tensors, or, if the library
            supports it (`Library.low_products`), bfloat16 with float32 for others.
        coef: c, (H, K); for `sum` (H, R).
        row: a, (B, H, N, K). col: β, (B, H_col, K, L).
        bias: (1 or B, 1 or H, 1 or N, 1 or L).
        noise_scale: standard deviation of the noise of every map, or unit (`unit_noise`).
        first, first_bias, second: layers, (U, R), (U,) and (H, U); (H, R) only for a single layer.
        key_mask: (B, L) bool. query_mask: (B, N) bool; the output at other queries is 0. pair_mask:
            like the bias, bool.
        draw, noise: `draws.philox_words` for dropout and for noise, (2 + B,).
        kind: index in `Reduction`.
        heads: H.
        components: K.
        unit_noise: whether the noise is that of the units of the first layer.
        degree: the even power, for `power`.
        threshold: threshold of the dropout.
        first_row: position of query 0 among all tokens, for the noise.
        scale: factor on products of queries and keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    coef: Tensor | None
    row: Tensor | None
    col: Tensor | None
    bias: Tensor | None
    noise_scale: Tensor | None
    first: Tensor | None
    first_bias: Tensor | None
    second: Tensor | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    pair_mask: Tensor | None
    draw: Tensor | None
    noise: Tensor | None
    kind: int
    heads: int
    components: int
    unit_noise: bool
    degree: int
    is_causal: bool
    threshold: int
    first_row: int
    scale: float

    @property
    def common(self) -> bool:
        """Whether all heads of a sample share the same maps."""
        return KINDS[self.kind] in ("sum", "layers")

    @property
    def low(self) -> bool:
        """Whether the heads are in bfloat16."""
        return self.query.dtype == torch.bfloat16

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of scores, sums, terms and the gradients of terms."""
        return torch.float32 if self.low else self.query.dtype

    def sizes(self) -> list[int]:
        """Return the numbers of `_SIZES`."""
        (batch, _, rows, size), cols = self.query.shape, self.key.shape[3]
        maps, kind = self.key.shape[2], self.kind
        sizes = [batch, self.heads, rows, cols, size, self.value.shape[-1], maps]
        return [*sizes, self.components, kind]


class _Call(Block):
    """Mirror of `Call` in tiles.c."""

    _fields_ = (
        *numbers(f"{' '.join(_SIZES)} common low key_heads value_heads col_heads"),
        *reals("scale"),
        *pointers("query key value coef row col"),
        *strides("query:3 key:4 value:3"),
        *pointers("bias"),
        *strides("bias:4"),
        *pointers("key_mask"),
        *strides("key_mask:1"),
        *pointers("query_mask"),
        *strides("query_mask:1"),
        *pointers("pair_mask"),
        *strides("pair_mask:4"),
        *numbers("causal"),
        *pointers("draw"),
        *numbers("threshold"),
        *pointers("noise"),
        *numbers("first_row hidden unit_noise degree"),
        *pointers("noise_scale first first_bias second out top inverse"),
        *strides("out:3"),
        *pointers("grad_out"),
        *strides("grad_out:3"),
        *pointers("grad_query grad_key grad_value grad_row grad_col grad_bias"),
        *strides("grad_query:3 grad_key:4 grad_value:3 grad_bias:4"),
        *pointers("grad_coef grad_noise_scale grad_first grad_first_bias grad_second"),
    )


def _check(call: Inputs) -> None:
    counts = [call.components, call.key.shape[2]]
    counts += [] if call.first is None else [*call.first.shape, call.heads]
    if max(counts) > MOST:
        raise NotImplementedError(
            f"attention by tiles supports at most {MOST} components, maps, hidden units, or heads "
            f"with layers, received {max(counts)}; use backend='blockwise'"
        )
    given = call._asdict()
    for name in (*_HEADS, *_GRADS[3:], *_MIXING):
        expected = call.query.dtype if name in _HEADS else call.dtype
        if given[name] is not None and given[name].dtype != expected:
            raise TypeError(
                f"attention by tiles of {call.query.dtype} expected {name} in {expected}, "
                f"received {given[name].dtype}"
            )


def _describe(call: Inputs, out: Tensor, sums: Tensor) -> _Call:
    block = _Call(**dict(zip(_SIZES, call.sizes(), strict=True)), common=call.common)
    block.low = load().low_products if call.low else 0
    block.key_heads, block.value_heads = call.key.shape[1], call.value.shape[1]
    block.col_heads = 1 if call.col is None else call.col.shape[1]
    block.scale, block.causal = call.scale, call.is_causal
    block.threshold, block.first_row = call.threshold, call.first_row
    block.unit_noise, block.degree = call.unit_noise, call.degree
    block.hidden = 0 if call.first is None else call.first.shape[0]
    masks = ("key_mask", "query_mask", "pair_mask")
    for name in (*_HEADS, *_GRADS[3:], *_MIXING, *masks, "draw", "noise"):
        block.read(name, getattr(call, name))
    block.put("out", out)
    block.put("top", sums[0])
    block.put("inverse", sums[1])
    return block


def _function(name: str, call: Inputs) -> Any:
    """Return a function of the library.

    Raises:
        NotImplementedError: the library does not support bfloat16.
    """
    library = load()
    if call.low and not library.low_products:
        raise NotImplementedError("attention by tiles has no bfloat16 here: convert to float32")
    return getattr(library, f"tiles_{name}_{'float' if call.dtype == torch.float32 else 'double'}")


def _new_outputs(call: Inputs) -> tuple[Tensor, Tensor]:
    """Return buffers for the output, (B, H, N, E_v), and maxima and inverse sums, (2, B, H, N).

    Heads of a position are adjacent, as the output projection reads them.
    """
    batch, _, rows, _ = call.query.shape
    out = call.value.new_empty(batch, rows, call.heads, call.value.shape[-1]).transpose(1, 2)
    return out, call.value.new_empty(2, batch, call.heads, rows, dtype=call.dtype)


def job_bounds(items: int) -> list[int]:
    """Return the bounds of the jobs of a number of tiles of queries.

    Samples have different lengths, so there are up to 16 jobs per thread. Every job packs the keys
    of its heads again, which takes about a third of the time of a tile.
    """
    threads = torch.get_num_threads()
    most = max(4 * threads, min(16 * threads, items // _TILES_PER_JOB)) if threads > 1 else 1
    jobs = min(items, most)
    return [items * n // jobs for n in range(jobs + 1)]


def _forward(call: Inputs) -> tuple[Tensor, Tensor]:
    out, sums = _new_outputs(call)
    if only_shapes(out) or not out.numel():
        return out, sums
    block, function = _describe(call, out, sums), _function("forward", call)
    batch, _, rows, _ = call.query.shape
    items = (batch if call.common else batch * call.heads) * -(-rows // TALL)
    stops = job_bounds(items)
    jobs = range(len(stops) - 1)
    run_jobs(lambda n: function(ctypes.byref(block), stops[n], stops[n + 1]), jobs)
    return out, sums


def _jobs(call: Inputs) -> tuple[list[tuple[int, ...]], int]:
    """Return jobs (sample, first head, end, first tile of keys, step, slot), and the slots.

    Heads that share keys, values or column terms are in one job. Gradients that several jobs add to
    have one slot per job that shares the keys of an owner.
    """
    threads, keys = torch.get_num_threads(), -(-call.key.shape[3] // _WIDE)
    owners = [call.key.shape[1], call.value.shape[1]]
    owners += [] if call.col is None else [call.col.shape[1]]
    span = call.heads if call.common else call.heads // math.gcd(*owners)
    groups = call.query.shape[0] * call.heads // span
    even = groups % threads == 0 or groups >= 4 * threads
    slots = 1 if even else min(threads, keys)
    return [
        (sample, head, head + span, part, slots, part)
        for sample in range(call.query.shape[0])
        for head in range(0, call.heads, span)
        for part in range(slots)
    ], slots


def _backward(
    call: Inputs, grad: Tensor, out: Tensor, sums: Tensor, skipped: Sequence[str]
) -> tuple[Tensor, ...]:
    """Return the gradients of `_GRADS` and `_MIXING`, empty if skipped."""
    made = new_gradients(call, (*_GRADS, *_MIXING), skipped, keep_strides=True, dtype=None)
    grads = dict(zip((*_GRADS, *_MIXING), made, strict=True))
    wanted = [n for n in grads if getattr(call, n) is not None and n not in skipped]
    if only_shapes(out):
        if "row" in wanted:  # for its memory
            _take_out_rest(grads["row"])
        return made
    if not out.numel() or not call.key.shape[3]:
        for name in wanted:
            grads[name].zero_()
        return made
    block = _describe(call, out, sums)
    block.read("grad_out", grad)
    jobs, slots = _jobs(call)
    parts: dict[str, Tensor] = {}
    for name in wanted:
        place = grads[name]
        if (name in ("query", "row") and slots > 1) or (name == "query" and call.low):
            place = parts[name] = place.new_zeros(slots, *place.shape, dtype=call.dtype)
        elif name in ("coef", *_MIXING):  # sums over all pairs
            owners = (slots, call.query.shape[0], *((call.heads,) if name == "coef" else ()))
            own = place.shape[1:] if name == "coef" else place.shape
            place = parts[name] = place.new_zeros(*owners, *own, dtype=torch.float64)
        elif name not in ("key", "value", "col") or call.key_mask is not None:
            place.zero_()  # added to, or unchanged for keys after the last real key
        block.put(f"grad_{name}", place[0] if name == "query" and name in parts else place)
        if name == "bias":
            grads[name] = place
    function = _function("backward", call)
    run_jobs(lambda n: function(ctypes.byref(block), *jobs[n]), range(len(jobs)), "bias" in wanted)
    for name, part in parts.items():
        if name in ("query", "row"):
            grads[name].copy_(part.sum(0) if slots > 1 else part[0])
        else:
            grads[name].copy_(part.sum((0, 1)))
    if "row" in wanted:
        _take_out_rest(grads["row"])
    return made


def _take_out_rest(grad_row: Tensor) -> None:
    """Subtract what is left of a row's sum over components, which is 0 but for rounding.

    The gradients of queries would multiply it by their norms. Each component loses a part that is
    proportional to its gradient.

    Args:
        grad_row: (B, H, N, K), changed in place.
    """
    sizes = grad_row.abs()
    total = sizes.sum(-1, keepdim=True)
    rest = grad_row.sum(-1, keepdim=True) / total.masked_fill(total == 0, 1.0)
    grad_row.addcmul_(sizes, rest, value=-1.0)


def attend(call: Inputs) -> Tensor:
    """Return attention, (B, H, N, E_v), in the dtype of the heads, differentiable, on the CPU.

    Raises:
        NotImplementedError: there are more components or maps than tiles support, or the library
            does not support bfloat16.
        TypeError: dtypes do not match.
    """
    _check(call)
    return _attention(*call)[0]


def _flops(x: Any, backward: bool) -> int:
    """Return FLOPs of scores (products of maps, their mixing) and of weights · values."""
    batch, owners, rows, size = x.query
    products = owners if x.common else owners * x.key[2]
    mixing = x.heads * owners if x.common else 0
    if x.first is not None:
        mixing = math.prod(x.first) + (0 if x.second is None else math.prod(x.second))
    pairs = 2 * batch * rows * x.key[3]
    scores, values = pairs * (products * size + mixing), pairs * x.heads * x.value[3]
    return 3 * scores + 2 * values if backward else scores + values


_attention = define_operators(
    ("tiles", "tiles_backward"),
    Inputs,
    _forward,
    _backward,
    new_outputs=_new_outputs,
    gradients=(*_GRADS, *_MIXING),
    optional=tuple((name,) for name in (*_GRADS, *_MIXING)),
    flops=_flops,
    keep_strides=True,
    dtype=None,
    is_seen=lambda _: written() == "compiled",
)
