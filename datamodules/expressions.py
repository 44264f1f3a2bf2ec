"""The demo's data: short ListOps expressions of MIN and MAX, generated on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from datamodules.lra.listops_generator import TOKENS, GeneratorSettings, generate_chunk

SETTINGS = GeneratorSettings(min_length=6, max_length=25, max_depth=3, max_args=4, seed=0)
MAX_LEN = SETTINGS.max_length - 1
NUM_CLASSES = 10
NUM_TEST = 400
_NUM_CHUNKS = 48
# MIN and MAX are learned within seconds, unlike medians and sums modulo 10.
_LEFT_OUT = bytes([TOKENS.index("[MED"), TOKENS.index("[SM")])


@dataclass(frozen=True)
class Expressions:
    """Expressions and their values.

    Args:
        tokens: ids, 0 is padding, (S, N).
        values: 0 to 9, (S,).
    """

    tokens: Tensor
    values: Tensor

    def take(self, index: Tensor | slice) -> Expressions:
        """Return a subset without columns that contain only padding."""
        tokens = self.tokens[index]
        longest = int((tokens > 0).sum(1).max())
        return Expressions(tokens[:, :longest], self.values[index])

    def words(self, index: int) -> list[str]:
        """Return the tokens of one expression."""
        return [TOKENS[number] for number in self.tokens[index].tolist() if number > 0]


def draw(seed: int) -> tuple[Expressions, Expressions]:
    """Return disjoint training and test expressions."""
    settings = replace(SETTINGS, seed=seed)
    found: dict[bytes, int] = {}
    for chunk in range(_NUM_CHUNKS):
        for drawn, value in generate_chunk(settings, chunk).expressions():
            data = drawn.tobytes()
            if not any(left_out in data for left_out in _LEFT_OUT):
                found[data] = value
    padded = np.zeros((len(found), MAX_LEN), dtype=np.int64)
    for row, data in enumerate(found):
        padded[row, : len(data)] = np.frombuffer(data, np.uint8)
    order = np.random.default_rng(seed).permutation(len(found))
    tokens = torch.from_numpy(padded[order])
    values = torch.tensor(list(found.values()))[torch.from_numpy(order)]
    every = Expressions(tokens, values)
    return every.take(slice(NUM_TEST, None)), every.take(slice(NUM_TEST))


def batches(data: Expressions, size: int, seed: int) -> Iterator[Expressions]:
    """Yield random batches indefinitely."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield data.take(torch.randint(len(data.values), (size,), generator=generator))
