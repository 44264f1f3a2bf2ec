"""The C library on tensors: draws, and the rows of a block forward and backward.

A block covers queries [row, row + rows) of some (sample, head) pairs, which are numbered
z = sample · heads + head. The files rows.h and rows.c say what is computed.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lit_probattn.kernels.cpu.library import load
from lit_probattn.randomness import STREAM_DROPOUT, STREAM_NOISE, AttentionDropout, RandomKey

SOFT, HARD, SUM = 0, 1, 2
MOST_MAPS = 16
# Rows of a block that are worth a thread of their own.
_ROWS_PER_THREAD = 8


class Block(ctypes.Structure):
    """Mirror of `Block` in rows.c."""

    _fields_ = [
        *[(n, ctypes.c_int64) for n in ("heads", "first", "count", "row", "rows", "cols")],
        *[(n, ctypes.c_int64) for n in ("all_rows", "all_cols", "components", "kind", "shared")],
        ("common", ctypes.c_int64),
        *[(n, ctypes.c_void_p) for n in ("coef", "row_terms", "col_terms")],
        *[(n, ctypes.c_int64) for n in ("masked", "causal", "causal_offset")],
        ("bias", ctypes.c_void_p),
        ("bias_strides", ctypes.c_int64 * 4),
        ("key_mask", ctypes.c_void_p),
        ("key_stride", ctypes.c_int64),
        ("pair_mask", ctypes.c_void_p),
        ("pair_strides", ctypes.c_int64 * 4),
        ("dropped", ctypes.c_int64),
        ("samples", ctypes.c_void_p),
        ("k0", ctypes.c_uint32),
        ("k1", ctypes.c_uint32),
        ("threshold", ctypes.c_int32),
        ("scale", ctypes.c_double),
    ]


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="lit_probattn-rows")


def _parts(rows: int) -> list[tuple[int, int]]:
    """Cut rows into one part per thread of torch; C calls leave the interpreter's lock."""
    threads = max(1, min(torch.get_num_threads(), rows // _ROWS_PER_THREAD))
    stops = [rows * n // threads for n in range(threads + 1)]
    return list(itertools.pairwise(stops))


def _run(call: Callable[[int, int, int], int], rows: int) -> None:
    """Call with (index, from, to) for every part, in threads; what fails raises."""
    parts = _parts(rows)
    if len(parts) == 1:
        failed = [call(0, *parts[0])]
    else:
        pool = _pool(len(parts))
        jobs = [pool.submit(call, n, *part) for n, part in enumerate(parts)]
        failed = [job.result() for job in jobs]
    if any(failed):
        raise MemoryError("the CPU library could not allocate its rows")


def run_jobs(call: Callable[[int], int], jobs: range, alone: bool = False) -> None:
    """Call for every job, in as many threads as torch has, or `alone` one after the other."""
    threads = torch.get_num_threads()
    if alone or threads == 1 or len(jobs) == 1:
        failed = [call(n) for n in jobs]
    else:
        failed = list(_pool(threads).map(call, jobs))
    if any(failed):
        raise MemoryError("the CPU library could not allocate its tiles")


def _name(tensor: Tensor) -> str:
    return "float" if tensor.dtype == torch.float32 else "double"


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[x.data_ptr() for x in tensors])


def rows_forward(block: Block, maps: Sequence[Tensor], out: Tensor) -> None:
    """Write the dropped weights of a block, (heads of the block, rows, cols), into `out`.

    Args:
        block: what the rows have in common.
        maps: score maps, each (heads of the block, rows, cols), or (rows, cols) where heads share
            them; contiguous.
        out: contiguous; may be the first map.
    """
    call = getattr(load(), f"rows_forward_{_name(out)}")
    pointers = _pointers(maps)

    def part(_: int, start: int, stop: int) -> int:
        return int(call(ctypes.byref(block), pointers, out.data_ptr(), start, stop))

    _run(part, block.rows * (1 if block.common else block.count))


@dataclass
class RowGrads:
    """Where a backward pass writes, each None where it is not wanted.

    Args:
        maps: gradients of the maps; may be the maps themselves, but for SUM and where heads share
            them, which are added to.
        row_terms: (heads of the block, rows, K), set.
        col_terms: (threads, heads of the block, K, cols), added to.
        coef: (heads of the block, rows, K), set.
    """

    maps: Sequence[Tensor]
    row_terms: Tensor | None = None
    col_terms: Tensor | None = None
    coef: Tensor | None = None


def rows_backward(
    block: Block, maps: Sequence[Tensor], weights: Tensor, grad: Tensor, grads: RowGrads
) -> None:
    """Turn the gradients of the dropped weights into those of the scores.

    Args:
        block: as in the forward pass.
        maps: as in the forward pass, computed again.
        weights: gets the dropped weights, (heads of the block, rows, cols).
        grad: gradients of the dropped weights; becomes the gradient of the reduced scores.
        grads: gets the others.
    """
    call = getattr(load(), f"rows_backward_{_name(grad)}")
    pointers, targets = _pointers(maps), _pointers(grads.maps)
    row_terms, coef = (None if x is None else x.data_ptr() for x in (grads.row_terms, grads.coef))

    def part(index: int, start: int, stop: int) -> int:
        col_terms = None if grads.col_terms is None else grads.col_terms[index].data_ptr()
        places = (weights.data_ptr(), grad.data_ptr(), targets, row_terms, col_terms, coef)
        return int(call(ctypes.byref(block), pointers, *places, start, stop))

    _run(part, block.rows * (1 if block.common else block.count))


def keep(
    dropout: AttentionDropout,
    batch_size: int,
    num_heads: int,
    rows: range,
    cols: range,
    first_head: int = 0,
) -> Tensor:
    """Return `AttentionDropout.keep` of a block, the same bits; (B, H, rows, cols) bool."""
    samples = dropout.key.samples(batch_size, torch.device("cpu")).contiguous()
    shape = (batch_size, num_heads, len(rows), len(cols))
    kept = torch.empty(shape, dtype=torch.bool, device="cpu")
    heads = (first_head, num_heads)
    sizes = (batch_size, *heads, rows.start, len(rows), cols.start, len(cols))
    words = dropout.key.philox_key(STREAM_DROPOUT)
    load().keep_block(kept.data_ptr(), samples.data_ptr(), *sizes, *words, dropout.threshold)
    return kept


def normal_noise(
    key: RandomKey, batch_size: int, num_maps: int, rows: range, cols: range
) -> Tensor:
    """Return `randomness.normal_noise` of a block, (B, num_maps, rows, cols) float32."""
    shape = (batch_size, num_maps, len(rows), len(cols))
    noise = torch.empty(shape, dtype=torch.float32, device="cpu")
    samples = key.samples(batch_size, torch.device("cpu")).tolist()
    words, call = key.philox_key(STREAM_NOISE), load().noise_tile
    places = (rows.start, len(rows), cols.start, len(cols))
    strides = (len(rows) * len(cols), len(cols))

    def draw(index: int) -> None:
        call(noise[index].data_ptr(), *strides, num_maps, *places, samples[index], *words)

    if torch.get_num_threads() > 1 and batch_size > 1:
        list(_pool(torch.get_num_threads()).map(draw, range(batch_size)))
    else:
        for index in range(batch_size):
            draw(index)
    return noise
