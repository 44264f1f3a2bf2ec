"""Sequences of variable length, and pairs of them: cached arrays, samples, padded batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.core.cache import Cache, CacheWriter, Mapped
from datamodules.core.order import FILL


@dataclass(frozen=True, eq=False)
class Ragged(Mapped):
    """Rows of variable length, stored consecutively.

    Args:
        stored: The steps of all rows. Shape (num_steps, ...).
        offsets: Start of each row, and the end of the last. Shape (num_rows + 1,).
    """

    stored: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    @classmethod
    def open(cls, cache: Cache, name: str, kind: str = "tokens") -> Ragged:
        """Open the rows that `ragged_writer` or `write_sequences` stored under `name`."""
        return cls(cache.array(f"{name}_{kind}"), np.asarray(cache.array(f"{name}_offsets")))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        """Return a view of a row, (length, ...)."""
        return self.stored[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Length of each row, (num_rows,)."""
        return np.diff(self.offsets)


@contextmanager
def ragged_writer(
    writer: CacheWriter, name: str, dtype: npt.DTypeLike = np.int32
) -> Iterator[Callable[[npt.ArrayLike], None]]:
    """Write rows of token ids one by one; yields the function that appends a row."""
    ends = [0]
    with writer.stream(f"{name}_tokens", dtype) as append:

        def append_row(row: npt.ArrayLike) -> None:
            ids = np.asarray(row, dtype=dtype)
            append(ids)
            ends.append(ends[-1] + len(ids))

        yield append_row
    writer.add(f"{name}_offsets", np.array(ends, dtype=np.int64))


class Sample(NamedTuple):
    """One sample.

    Args:
        values: Token ids, (length,) int64; a tuple of two such texts; or a series,
            (length, num_features) float32.
        sample_id: Index of the sample in its split, or FILL.
    """

    values: Any
    target: int
    sample_id: int


class SequenceSplit(Mapped):
    """The sequences of one split, stored consecutively; a map-style data set.

    Args:
        stored: All stored sequences.
        targets: Class of each sample. Shape (num_stored,).
        max_length: Longer sequences are truncated to this length.
        rows: Indices of the stored sequences in the split. Default: all.
    """

    kind = "tokens"  # name of the stored array in a cache

    def __init__(
        self,
        stored: Ragged,
        targets: npt.NDArray[np.integer],
        max_length: int,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._stored, self._targets = stored, targets
        self._max_length = max_length
        self._rows = np.arange(len(targets)) if rows is None else rows

    @classmethod
    def from_cache(cls, cache: Cache, name: str, *arguments: Any, **options: Any) -> Self:
        """Open the split that `write_sequences` stored under `name`; passes on other arguments."""
        targets = np.asarray(cache.array(f"{name}_targets"))
        return cls(Ragged.open(cache, name, cls.kind), targets, *arguments, **options)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`; FILL returns the first sample with the id FILL."""
        row = self._rows[0 if index == FILL else index]
        return Sample(self.values(row), int(self._targets[row]), int(index))

    def values(self, row: int) -> Any:
        """Return the model's input for a stored sequence."""
        raise NotImplementedError

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Class of each sample, shape (num_samples,)."""
        return self._targets[self._rows]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Length of each sample before truncation, shape (num_samples,)."""
        return self._stored.lengths[self._rows]

    @property
    def num_cut(self) -> int:
        """Number of truncated samples."""
        return int((self.lengths > self._max_length).sum())


class TokenSplit(SequenceSplit):
    """Token sequences.

    Args:
        *arguments: Arguments of SequenceSplit.
        shift: Added to stored tokens to obtain ids; id 0 is padding.
        **options: Arguments of SequenceSplit.
    """

    def __init__(self, *arguments: Any, shift: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._shift = shift

    def values(self, row: int) -> Any:
        """Return the token ids of a stored sequence, (length,) int64."""
        return self._stored[row][: self._max_length].astype(np.int64) + self._shift


class PairSplit(TokenSplit):
    """Pairs of texts, each text stored once.

    Args:
        *arguments: Arguments of TokenSplit.
        pairs: Indices of the two texts of each sample. Shape (num_samples, 2).
        text_lengths: Number of tokens of each text before truncation. Shape (num_samples, 2).
        **options: Arguments of TokenSplit.
    """

    def __init__(
        self,
        *arguments: Any,
        pairs: npt.NDArray[np.integer],
        text_lengths: npt.NDArray[np.integer],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.pairs, self._text_lengths = pairs, text_lengths

    def values(self, row: int) -> Any:
        """Return the token ids of both texts of a pair."""
        return tuple(map(super().values, self.pairs[row]))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of the longer text of each pair before truncation, shape (num_samples,)."""
        return self._text_lengths.max(axis=1).astype(np.int64)


def write_sequences(
    writer: CacheWriter,
    name: str,
    pieces: Sequence[npt.NDArray[Any]],
    lengths: Iterable[int],
    targets: Iterable[int],
    kind: str = "tokens",
) -> None:
    """Add the sequences of one split to a cache.

    Args:
        pieces: Concatenated content of all sequences; piece boundaries are arbitrary.
        lengths: Length of each sequence.
        targets: Class of each sample, below 65536; negative if it has no label.
    """
    ends = np.cumsum(np.fromiter(lengths, dtype=np.int64))
    writer.add(f"{name}_{kind}", np.concatenate(pieces))
    writer.add(f"{name}_offsets", np.concatenate([np.zeros(1, dtype=np.int64), ends]))
    writer.add(f"{name}_targets", as_targets(targets))


def as_targets(classes: Iterable[int]) -> npt.NDArray[np.integer]:
    """Return the class of each sample as it is stored; negative classes denote missing labels."""
    found = np.fromiter(classes, dtype=np.int32)
    return found if (found < 0).any() else found.astype(np.uint16)


def padded_length(longest: int, multiple: int, most: int) -> int:
    """Return the length of a batch: `longest` rounded up to a multiple, at most `most`."""
    return max(longest, min(-(-longest // multiple) * multiple, most))


def padded(
    rows: Sequence[npt.NDArray[np.int64]], length: int, fill: int, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ids padded with `fill`, and a mask of the real ones; both (B, length).

    Args:
        left: Whether padding comes before the ids.
    """
    ids = np.full((len(rows), length), fill, dtype=np.int64)
    real = np.zeros((len(rows), length), dtype=np.bool_)
    for number, row in enumerate(rows):
        place = slice(length - len(row), None) if left else slice(0, len(row))
        ids[number, place], real[number, place] = row, True
    return torch.from_numpy(ids), torch.from_numpy(real)


def batch_of(samples: Sequence[Any], inputs: Tensor, key_mask: Tensor) -> dict[str, Tensor]:
    """Return a batch including the class and id of each sample: `target`, `sample_ids` (B,)."""
    return {
        "inputs": inputs,
        "key_mask": key_mask,
        "target": torch.tensor([sample.target for sample in samples]),
        "sample_ids": torch.tensor([sample.sample_id for sample in samples]),
    }


@dataclass(frozen=True)
class PadCollate:
    """Collate sequences, padded at the end with 0; both texts of a pair have the same length.

    Args:
        pad_to: `longest` pads to the longest sequence of the batch, `max` to `max_seq_len`.
        pad_multiple: The padded length is rounded up to a multiple of this, up to `max_seq_len`.
    """

    pad_to: Literal["longest", "max"]
    pad_multiple: int
    max_seq_len: int

    def length(self, longest: int) -> int:
        """Return the padded length of a batch."""
        if self.pad_to == "max":
            return self.max_seq_len
        return padded_length(longest, self.pad_multiple, self.max_seq_len)

    def __call__(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Return `inputs` (B, N), (B, 2, N) or (B, N, F), `key_mask` without F, and `batch_of`."""
        paired = isinstance(samples[0].values, tuple)
        rows = [sample.values if paired else (sample.values,) for sample in samples]
        lengths = np.array([[len(piece) for piece in row] for row in rows])
        length = self.length(max(1, int(lengths.max())))
        first = rows[0][0]
        inputs = np.zeros((*lengths.shape, length, *first.shape[1:]), dtype=first.dtype)
        for place, row in zip(inputs, rows, strict=True):
            for part, piece in zip(place, row, strict=True):
                part[: len(piece)] = piece
        mask = np.arange(length) < lengths[..., None]
        if not paired:
            inputs, mask = inputs[:, 0], mask[:, 0]
        return batch_of(samples, torch.from_numpy(inputs), torch.from_numpy(mask))


def next_power_of_two(length: int) -> int:
    """Return the smallest power of two that is not below `length`."""
    return 1 << (length - 1).bit_length()
