"""Random draws by the C library, with the same bits as `lit_probattn.randomness`."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn.kernels.cpu.jobs import run_jobs
from lit_probattn.kernels.cpu.library import load
from lit_probattn.randomness import STREAM_DROPOUT, STREAM_NOISE, AttentionDropout, RandomKey


def keep(
    dropout: AttentionDropout,
    batch_size: int,
    num_heads: int,
    rows: range,
    cols: range,
) -> Tensor:
    """Return the bits of `AttentionDropout.keep` for a block; (B, H, rows, cols) bool."""
    samples = dropout.key.samples(batch_size, torch.device("cpu")).contiguous()
    shape = (batch_size, num_heads, len(rows), len(cols))
    kept = torch.empty(shape, dtype=torch.bool, device="cpu")
    sizes = (batch_size, 0, num_heads, rows.start, len(rows), cols.start, len(cols))
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

    run_jobs(draw, range(batch_size))
    return noise
