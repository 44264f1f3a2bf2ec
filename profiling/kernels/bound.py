"""Lower bound on the time of attention: counted work at the measured rates of the processor.

The work consists of matrix products of heads, exponentials, multiply-adds that mix score maps, and
normal draws, forward and backward, for an implementation that stores no N × N map and recomputes
the scores in backward. Memory accesses, maxima, sums and Python are not counted. In bfloat16,
matrix products run at the rate of a large `torch.mm`, everything else at the rates of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter

import torch

from lit_probattn.attention import HeadCall
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.variant import Layers, MapFunction, Scores, wide_heads
from lit_probattn.kernels.cpu import draws, library
from lit_probattn.measure.timing import alone_on, time_once
from lit_probattn.randomness import RandomKey

_SECONDS = 0.05  # duration of one measurement of a rate
_OPERANDS, _SQUARE = 1 << 14, 1024


@dataclass(frozen=True)
class Work:
    """Counted work of a call.

    Args:
        products: multiply-adds in matrix products of heads.
        exponentials: exponentials of the softmax.
        mixing: multiply-adds that mix score maps or apply factors of components.
        normals: normal draws.
    """

    products: int
    exponentials: int
    mixing: int
    normals: int

    def seconds(self, threads: int = 1, dtype: torch.dtype = torch.float32) -> float:
        """Return the bound on this processor; only matrix products run in bfloat16."""
        rates = measured_rates()
        products = rates.products if dtype == torch.float32 else max(rates.products, mm_rate(dtype))
        found = 2 * (self.products / products + self.mixing / rates.products)
        found += self.exponentials / rates.exponentials
        return (found + self.normals / rates.normals) / threads


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matrix products, exponentials/s and normal draws/s of one core in float32."""

    products: float
    exponentials: float
    normals: float


def visible_pairs(masks: Masks) -> int:
    """Return the number of pairs of a head under a causal mask; other masks are ignored."""
    if not masks.is_causal:
        return masks.num_queries * masks.num_keys
    hidden = masks.num_keys - masks.num_queries
    return sum(max(0, hidden + row + 1) for row in range(masks.num_queries))


def softmax_work(heads: int, head_dim: int, pairs: int, *, train: bool) -> Work:
    """Return the work of softmax attention over `pairs` pairs of all samples."""
    passes = 2 if train else 1
    products = 7 if train else 2  # backward: scores and the gradients of four operands
    return Work(pairs * heads * products * head_dim, pairs * heads * passes, 0, 0)


def work(call: HeadCall, scores: Scores, *, train: bool) -> Work:
    """Return the work of a call whose scores are in normal form; logarithms of powers are free.

    Raises:
        NotImplementedError: the scores are a function of the maps other than layers and powers.
    """
    pairs = call.query.shape[0] * visible_pairs(call.masks)
    size, value_size = scores.query.shape[-1], call.value.shape[-1]
    heads = call.value.shape[1] if scores.shares_maps else scores.query.shape[1]
    components, noise, mixing = scores.num_components, scores.noise, 0
    if scores.shares_maps:
        maps, softmaxes = scores.key.shape[1], heads // wide_heads(scores, call)
        mixing = maps * softmaxes
    else:
        maps, softmaxes = heads * scores.key.shape[2], heads
    exponentials = softmaxes
    if isinstance(scores.reduce, MapFunction):
        form = scores.reduce.form
        if form is None:
            raise NotImplementedError("no work count for this function of the score maps")
        if isinstance(form, Layers):
            noise, mixing = form.noise, _layer_mixing(form)
    elif scores.reduce == "soft" and components > 1:
        if scores.key.shape[2] == 1 and scores.coef is None:  # factors of one exponential
            mixing = components * heads
        else:
            exponentials = components * heads
    products = maps * size + heads * value_size
    if train:  # recomputed scores, and gradients of both operands of every product
        products += 3 * maps * size + 2 * heads * value_size
    passes = 2 if train else 1
    mixing *= 4 if train else 1  # recomputation, and gradients of both operands
    normals = 0 if noise is None else noise.num_maps * passes
    found = products, exponentials * passes, mixing, normals
    return Work(*(pairs * count for count in found))


def _layer_mixing(layers: Layers) -> int:
    second = 0 if layers.second is None else layers.second.numel()
    return layers.first.numel() + second


def product_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return FLOP/s of a square matrix product on random data, the best of ten trials."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    function = partial(torch.mm, a, b)
    function()
    with alone_on(device):
        return 2 * size**3 / min(time_once(function, device) for _ in range(10))


@lru_cache
def mm_rate(dtype: torch.dtype) -> float:
    """Return FLOP/s of a large `torch.mm` on one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return product_rate(torch.device("cpu"), dtype, _SQUARE)
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=1)
@alone_on(torch.device("cpu"))
def measured_rates() -> Rates:
    """Return the rates of one core, each the best of seven trials.

    Raises:
        UnsupportedError: the C library is not available.
    """
    loaded, operands = library.load(), torch.zeros(_OPERANDS)
    key = RandomKey(0)

    def rate(run: Callable[[int], int]) -> float:
        def timed(rounds: int) -> tuple[float, float]:
            begin = perf_counter()
            done = run(rounds)
            passed = perf_counter() - begin
            return passed, done / passed

        rounds = 1
        while timed(rounds)[0] < _SECONDS:
            rounds *= 2
        return max(timed(rounds)[1] for _ in range(7))

    def draw(rounds: int) -> int:
        for _ in range(rounds):
            draws.normal_noise(key, 1, 8, range(48), range(128))
        return rounds * 8 * 48 * 128

    return Rates(
        rate(lambda rounds: loaded.peak_products(operands.data_ptr(), rounds)),
        rate(lambda rounds: loaded.peak_exponentials(operands.data_ptr(), rounds)),
        rate(draw),
    )
