"""Random ListOps expressions, many at a time; chunks in order, drawn by several processes."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lit_probattn.base.errors import DataError
from lit_probattn.base.processes import job_of_worker, workers

__all__ = ["TOKENS", "Chunk", "GeneratorSettings", "generate_chunk", "generate_chunks"]

IntArray = npt.NDArray[np.int64]

# Token ids: 0 is padding, 1..4 the operators, 5 the closing bracket, 6..15 the digits 0..9.
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
TOKENS = ("<pad>", *OPERATORS, "]", *(str(digit) for digit in range(10)))
CLOSE, FIRST_DIGIT = TOKENS.index("]"), TOKENS.index("0")
MEDIAN = OPERATORS.index("[MED")

# Trees drawn per chunk; a part of the meaning of a seed, so a change needs a new GENERATOR_VERSION.
CHUNK_TREES = 8192
GENERATOR_VERSION = 1


@dataclass(frozen=True)
class GeneratorSettings:
    """What decides the expressions, as in `ListOps`."""

    min_length: int
    max_length: int
    max_depth: int
    max_args: int
    seed: int


@dataclass(frozen=True)
class Chunk:
    """Kept expressions of one chunk, in order.

    Args:
        tokens: Token ids of all expressions, one after the other. Shape (sum of lengths,), uint8.
        lengths: Tokens per expression. Shape (num_samples,), int32.
        targets: Value of each expression, 0..9. Shape (num_samples,), uint8.
    """

    tokens: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int32]
    targets: npt.NDArray[np.uint8]

    def expressions(self) -> Iterator[tuple[npt.NDArray[np.uint8], int]]:
        """Yield tokens and value of each expression."""
        pieces = np.split(self.tokens, np.cumsum(self.lengths)[:-1])
        return zip(pieces, self.targets.tolist(), strict=False)


@dataclass
class _Level:
    """Nodes of one depth of all trees, ordered by tree, then from left to right."""

    tree: IntArray  # index of the tree
    num_args: IntArray  # children; 0 for a leaf


def generate_chunk(settings: GeneratorSettings, chunk: int) -> Chunk:
    """Draw CHUNK_TREES trees and return those of permitted length, with their values."""
    bits = np.random.PCG64DXSM(np.random.SeedSequence([settings.seed, chunk]))
    levels, lengths, growing = _grow(bits, settings)
    keep = growing & (lengths > settings.min_length) & (lengths < settings.max_length)
    return _label(bits, _select(levels, keep), lengths[keep])


def _grow(
    bits: np.random.PCG64DXSM, settings: GeneratorSettings
) -> tuple[list[_Level], IntArray, npt.NDArray[np.bool_]]:
    """Draw the shapes. Returns levels, the trees' lengths, and which trees grew to the end."""
    tree = np.arange(CHUNK_TREES)
    lengths = np.zeros(CHUNK_TREES, dtype=np.int64)
    growing = np.ones(CHUNK_TREES, dtype=bool)
    levels = []
    for depth in range(1, settings.max_depth + 1):
        num_args = np.zeros(len(tree), dtype=np.int64)
        if depth < settings.max_depth:
            raw = bits.random_raw(len(tree))
            inner = np.flatnonzero(raw >> np.uint64(62) == 0)  # two bits: probability 1/4
            num_args[inner] = 2 + _uniform(raw[inner], settings.max_args - 1)
        levels.append(_Level(tree, num_args))
        lengths += np.bincount(tree, minlength=CHUNK_TREES)
        lengths += np.bincount(tree[num_args > 0], minlength=CHUNK_TREES)
        tree = np.repeat(tree, num_args)
        if not len(tree):
            break
        growing &= lengths + np.bincount(tree, minlength=CHUNK_TREES) < settings.max_length
        tree = tree[growing[tree]]
    return levels, lengths, growing


def _uniform(raw: npt.NDArray[np.uint64], count: int) -> IntArray:
    """Map the low 32 bits of raw draws to 0..count-1, to within count / 2**32 of uniform."""
    return ((raw & np.uint64(0xFFFFFFFF)) * np.uint64(count) >> np.uint64(32)).astype(np.int64)


def _select(levels: list[_Level], keep: npt.NDArray[np.bool_]) -> list[_Level]:
    """Drop all nodes of the trees that are not kept, and number the rest from 0."""
    number = np.cumsum(keep) - 1
    kept = []
    for level in levels:
        mask = keep[level.tree]
        if not mask.any():
            break
        kept.append(_Level(number[level.tree[mask]], level.num_args[mask]))
    return kept


def _label(bits: np.random.PCG64DXSM, levels: list[_Level], lengths: IntArray) -> Chunk:
    """Draw digits and operators, evaluate bottom-up, and write the tokens top-down."""
    values: list[IntArray] = []
    operators: list[IntArray] = []
    for level in levels:
        raw = bits.random_raw(len(level.tree))
        values.append(_uniform(raw, 10))
        operators.append((raw >> np.uint64(62)).astype(np.int64)[level.num_args > 0])
    digits = [value.copy() for value in values]
    sizes = [np.ones(len(level.tree), dtype=np.int64) for level in levels]
    for depth in range(len(levels) - 2, -1, -1):
        num_args = levels[depth].num_args
        inner = np.flatnonzero(num_args)
        first = _starts(num_args[inner])
        values[depth][inner] = _reduce(values[depth + 1], first, num_args[inner], operators[depth])
        sizes[depth][inner] = 2 + np.add.reduceat(sizes[depth + 1], first)
    tokens = np.zeros(int(lengths.sum()), dtype=np.uint8)
    start = _starts(lengths)
    for depth, level in enumerate(levels):
        leaf, inner = np.flatnonzero(level.num_args == 0), np.flatnonzero(level.num_args)
        tokens[start[leaf]] = FIRST_DIGIT + digits[depth][leaf]
        tokens[start[inner]] = 1 + operators[depth]
        tokens[start[inner] + sizes[depth][inner] - 1] = CLOSE
        if depth + 1 < len(levels):
            start = _child_starts(start[inner], level.num_args[inner], sizes[depth + 1])
    targets = values[0] if levels else np.zeros(0)
    return Chunk(tokens, lengths.astype(np.int32), targets.astype(np.uint8))


def _starts(counts: IntArray) -> IntArray:
    """Return the index of the first element of each of consecutive groups."""
    return np.cumsum(counts) - counts


def _child_starts(parent: IntArray, num_args: IntArray, sizes: IntArray) -> IntArray:
    """Position of each child's first token, from its parent's position and its siblings' sizes."""
    before = _starts(sizes)
    return before + np.repeat(parent + 1 - before[_starts(num_args)], num_args)


def _reduce(
    children: IntArray, first: IntArray, num_args: IntArray, operators: IntArray
) -> IntArray:
    """Apply one operator to each group of consecutive children. Returns values 0..9."""
    result = np.choose(
        operators,
        [
            np.minimum.reduceat(children, first),
            np.maximum.reduceat(children, first),
            np.zeros(len(first), dtype=np.int64),
            np.add.reduceat(children, first) % 10,
        ],
    )
    rows = np.flatnonzero(operators == MEDIAN)
    if len(rows):
        count = num_args[rows]
        column = np.arange(count.sum()) - np.repeat(_starts(count), count)
        table = np.full((len(rows), int(count.max())), 10, dtype=np.uint8)
        row = np.repeat(np.arange(len(rows)), count)
        table[row, column] = children[np.repeat(operators == MEDIAN, num_args)]
        table.sort(axis=1)
        every = np.arange(len(rows))
        result[rows] = (table[every, (count - 1) // 2] + table[every, count // 2]) // 2
    return result


def generate_chunks(
    settings: GeneratorSettings, num_processes: int
) -> Generator[Chunk, None, None]:
    """Yield chunk 0, 1, 2, … without end, drawn by `num_processes` processes.

    Close the generator (or let it go) to stop the workers; one that ends by itself is a DataError.
    """
    if num_processes == 1:
        yield from (generate_chunk(settings, chunk) for chunk in itertools.count())
        return
    with workers(__name__, num_processes, dataclasses.asdict(settings)) as started:
        for worker in itertools.cycle(started):
            assert worker.stdout is not None
            try:
                chunk: Chunk = pickle.load(worker.stdout)
            except (EOFError, pickle.UnpicklingError):
                raise DataError(
                    f"ListOps: a generating process ended early (exit status {worker.wait()})"
                ) from None
            yield chunk


def serve() -> None:
    """Write every W-th chunk to the standard output until the reader goes away."""
    rank, num_processes, settings = job_of_worker()
    with open(os.dup(1), "wb") as pipe:
        try:
            for chunk in itertools.count(rank, num_processes):
                pickle.dump(generate_chunk(GeneratorSettings(**settings), chunk), pipe)
                pipe.flush()
        except BrokenPipeError:
            os._exit(0)
