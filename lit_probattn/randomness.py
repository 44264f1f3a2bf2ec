"""Counter-based random numbers, reproducible across backends, ranks and recomputation.

Attention dropout, score noise and random features never use torch's generator, unlike `Dropout` of
activations. They read the Philox4x32-10 generator (Salmon et al., 2011) at counters that name the
element (query index, key index, head, sample) under a key that names the draw (seed, step, layer,
purpose). The same element therefore gets the same number in a reference, a blockwise form, a fused
kernel, a recomputation in backward, and on any number of ranks.

An integer key stays outside `torch.compile` graphs: it changes at every step and its words wrap
modulo 2⁶⁴, neither of which the compiler supports. A key drawn inside a compiled call has a tensor
seed, and its draws are single operators of the graph (`attention/draws.py`). An exported program
draws with the operations of this file, where an integer key is a constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.base.graphs import is_symbol, is_transformed, written
from lit_probattn.base.memory import device_type
from lit_probattn.base.torch_internals import FakeTensor, outside_graphs

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_NUM_ROUNDS = 10
_CHUNK_COUNTERS = 1 << 16  # counters per chunk: the int64 temporaries fit the cache

_STEPS = 1 << 16  # of the numbers that decide which activations are dropped
_PER_WORD = 4  # of these numbers in 64 random bits

# One stream per purpose, so that no number is used for two of them.
STREAM_DROPOUT = 1  # dropout of attention weights
STREAM_NOISE = 2  # noise of FiSH's scores
STREAM_FEATURES = 3  # random features
STREAM_MASKING = 4  # tokens masked in masked language modelling
STREAM_SAMPLING = 5  # tokens sampled from a language model


@outside_graphs
def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words of Philox4x32-10 for each counter.

    Args:
        counter: four int64 tensors with values in [0, 2³²), broadcastable to one shape. Keep
            size-1 dimensions for words that do not vary: the first rounds are then cheaper.
        key: two integers in [0, 2³²).

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2³²).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    # An int64 product wraps modulo 2⁶⁴, which keeps all 64 bits of the unsigned product. c1 and c3
    # carry whole products; only their low words matter, and they are masked on use.
    for _ in range(_NUM_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((product_0 >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = product_1, product_0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    return c0, c1 & _MASK, c2, c3 & _MASK


def _mix64(value: int) -> int:
    """Scramble a 64-bit integer (the finaliser of SplitMix64); a bijection."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def _mix64_tensor(value: Tensor) -> Tensor:
    """`_mix64` in int64, which wraps modulo 2⁶⁴; its shifts extend the sign, hence the masks."""
    value = value + _signed(0x9E3779B97F4A7C15)
    value = (value ^ ((value >> 30) & (_MASK_64 >> 30))) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ ((value >> 27) & (_MASK_64 >> 27))) * _signed(0x94D049BB133111EB)
    return value ^ ((value >> 31) & (_MASK_64 >> 31))


def mix_integers(*values: int) -> int:
    """Hash integers, in order, to one integer in [0, 2⁶⁴)."""
    state = 0
    for value in values:
        state = _mix64(state ^ (value & _MASK_64))
    return state


@dataclass(frozen=True)
class RandomKey:
    """Identifies one draw: the numbers of this step, for these samples, in this layer.

    Args:
        seed: seed of the run; in a compiled graph, a tensor with it.
        step: optimiser step. Micro-batches of a step differ in their `sample_ids`.
        sample_ids: global indices of the samples in the batch, (B,) int64. None means 0 … B-1.
        layer: index of the layer, set by `fold`.
    """

    seed: int | Tensor
    step: int = 0
    sample_ids: Tensor | None = None
    layer: int = 0

    @outside_graphs
    def fold(self, layer: int) -> RandomKey:
        """Return the key of layer `layer`; repeated folds mix all indices."""
        return replace(self, layer=mix_integers(self.layer, layer + 1))

    @outside_graphs
    def philox_key(self, stream: int) -> tuple[int, int]:
        """Return the two key words of one stream."""
        if isinstance(self.seed, Tensor) and written() == "exported":
            return self._traced_words(stream)
        mixed = mix_integers(int(self.seed), self.step, self.layer, stream)
        return mixed & _MASK, mixed >> 32

    def _traced_words(self, stream: int) -> Any:
        """Return the words as tensors, for exported programs, which draw the seed at run time."""
        assert isinstance(self.seed, Tensor)
        state = _mix64_tensor(self.seed.view(()))
        for value in (self.step, self.layer, stream):
            state = _mix64_tensor(state ^ _signed(value))
        return state & _MASK, (state >> 32) & _MASK

    def samples(self, batch_size: int, device: torch.device) -> Tensor:
        """Return the counter words of the samples, (B,) int64.

        Raises:
            ValueError: the length of `sample_ids` differs from the batch size.
        """
        if self.sample_ids is None:
            return torch.arange(batch_size, device=device)
        if self.sample_ids.shape != (batch_size,):
            raise ValueError(
                f"RandomKey.sample_ids has shape {tuple(self.sample_ids.shape)}, "
                f"but the batch has {batch_size} samples: expected ({batch_size},)"
            )
        return self.sample_ids.to(device=device, dtype=torch.int64) & _MASK


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention weights with one keep decision per (sample, head, query, key).

    Eight neighbouring keys share one Philox call: key j reads 16-bit lane j mod 8 of the counter
    (query, j // 8, head, sample); lane 2w + h is half h (0 low, 1 high) of word w. A pair is kept
    when the lane, read as a signed 16-bit number, is at least `threshold`. The probability is
    therefore a multiple of 2⁻¹⁶, and `scale` is the inverse of the actual keep probability.

    Args:
        p: probability to drop, in [0, 1).
        key: the draw, folded with the layer's index.
    """

    p: float
    key: RandomKey

    @property
    def threshold(self) -> int:
        """Signed 16-bit bound below which a pair is dropped."""
        return round(self.p * 65536) - 32768

    @property
    def scale(self) -> float:
        """Factor on kept weights, 1 / (1 - p) for the actual p."""
        return 65536 / (32768 - self.threshold)

    @outside_graphs
    def keep(
        self,
        batch_size: int,
        num_heads: int,
        rows: range,
        cols: range,
        device: torch.device,
    ) -> Tensor:
        """Return the keep decisions of one block of scores, (B, H, rows, cols) bool."""
        samples = self.key.samples(batch_size, device).view(-1, 1, 1, 1)
        heads = torch.arange(num_heads, device=device).view(1, -1, 1, 1)
        first, last = cols.start // 8, -(-cols.stop // 8)
        groups = torch.arange(first, last, device=device).view(1, 1, 1, -1)
        philox_key = self.key.philox_key(STREAM_DROPOUT)
        shape = (batch_size, num_heads, rows.stop - rows.start, groups.shape[-1] * 8)
        kept = torch.empty(shape, dtype=torch.bool, device=device)
        for part, index in _chunks(rows, batch_size * num_heads * groups.numel(), device):
            words = philox4x32((index, groups, heads, samples), philox_key)
            lanes = torch.stack(words, -1).to(torch.int32).view(torch.int16).flatten(-2)
            kept[:, :, part] = lanes >= self.threshold
        skip = cols.start - first * 8
        return kept[..., skip : skip + cols.stop - cols.start]


def _chunks(rows: range, per_row: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices and indices (1, 1, n, 1) of row chunks whose counters fit the cache."""
    if is_symbol(rows.stop) or is_symbol(per_row):  # a loop would specialise the sizes
        yield slice(None), torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1)
        return
    step = max(1, _CHUNK_COUNTERS // max(1, per_row)) if device.type == "cpu" else len(rows)
    for start in range(rows.start, rows.stop, max(1, step)):
        stop = min(start + step, rows.stop)
        index = torch.arange(start, stop, device=device).view(1, 1, -1, 1)
        yield slice(start - rows.start, stop - rows.start), index


@outside_graphs
def normal_noise(
    key: RandomKey,
    batch_size: int,
    num_maps: int,
    rows: range,
    cols: range,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return standard normal noise for one block of score maps, (B, num_maps, rows, cols).

    Four neighbouring maps share one Philox call. Maps 4g … 4g + 3 read counter
    (query, key, g, sample); Box-Muller on the pair of words (x₀, x₁) gives the first two maps and
    (x₂, x₃) the last two: u₁ = (x₀ + 1) / 2³², u₂ = x₁ / 2³²,

        noise = sqrt(-2 log u₁) · (cos 2π u₂, sin 2π u₂),   evaluated in float64.
    """
    samples = key.samples(batch_size, device).view(-1, 1, 1, 1)
    groups = torch.arange(-(-num_maps // 4), device=device).view(1, -1, 1, 1)
    index_k = torch.arange(cols.start, cols.stop, device=device).view(1, 1, 1, -1)
    philox_key = key.philox_key(STREAM_NOISE)
    num_cols = index_k.numel()
    shape = (batch_size, num_maps, rows.stop - rows.start, num_cols)
    noise = torch.empty(shape, dtype=dtype, device=device)
    for rows_of_part, index_q in _chunks(rows, batch_size * groups.numel() * num_cols, device):
        words = philox4x32((index_q, index_k, groups, samples), philox_key)
        part = noise[:, :, rows_of_part]
        for first in range(0, min(num_maps, 4), 2):
            count = len(range(first, num_maps, 4))
            x0, x1 = words[first][:, :count], words[first + 1][:, :count]
            radius = torch.sqrt(-2.0 * torch.log((x0 + 1).to(torch.float64) * 2.0**-32))
            angle = x1.to(torch.float64) * (2.0**-32 * 2.0 * torch.pi)
            part[:, first::4] = radius * torch.cos(angle)
            count = len(range(first + 1, num_maps, 4))
            part[:, first + 1 :: 4] = radius[:, :count] * torch.sin(angle[:, :count])
    return noise


class Dropout(nn.Dropout):
    """`nn.Dropout` that draws faster on a CPU, where PyTorch draws one number after the other.

    There, 16 bits decide whether an element is dropped, as for attention weights: `p` is rounded to
    a multiple of 2⁻¹⁶, and the other elements are multiplied by 1 / (1 − p), rounded to the dtype
    of the input. The bits are those of PyTorch's generator and equal on all processors;
    `nn.Dropout` draws other numbers on Intel's. PyTorch's dropout is used in place, in recorded
    graphs and transforms, on other devices, for nested tensors and other subclasses of Tensor, and
    if `p` is rounded to 0 or 1.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return `input`, in training with dropped elements, of the same shape and dtype."""
        dropped = round(self.p * _STEPS)
        if self.inplace or not (self.training and 0 < dropped < _STEPS and _is_own(input)):
            return super().forward(input)
        kept = _are_at_least(dropped, input).to(input.dtype)
        return input * kept.mul_(_STEPS / (_STEPS - dropped))


def _are_at_least(least: int, like: Tensor) -> Tensor:
    """Draw a number below 65,536 for every element; return which are at least `least`."""
    words = like.new_empty(-(-like.numel() // _PER_WORD), dtype=torch.int64)
    words.random_(torch.iinfo(torch.int64).min, None)
    numbers = words.view(torch.int16)[: like.numel()].view(like.shape)
    return numbers >= least - _STEPS // 2


def _is_own(input: Tensor) -> bool:
    """Return whether this draws the numbers itself: on a CPU, outside of graphs and transforms."""
    is_plain = type(input) in (Tensor, nn.Parameter, FakeTensor) and not input.is_nested
    on_cpu = device_type(input.device) == "cpu"
    return is_plain and on_cpu and written() is None and not is_transformed()
