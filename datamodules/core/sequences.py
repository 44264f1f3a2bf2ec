"""Token sequences of different lengths, and pairs of them: arrays in a cache, samples, batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.order import FILL

__all__ = [
    "PadCollate",
    "PairCollate",
    "PairSample",
    "PairSplit",
    "TextTable",
    "TokenSample",
    "TokenSplit",
    "next_power_of_two",
    "write_sequences",
]


class TokenSample(NamedTuple):
    """One sequence.

    Args:
        tokens: Token ids, shape (length,), int64.
        target: Class.
        sample_id: Index of the sample in its split, or FILL.
    """

    tokens: npt.NDArray[np.int64]
    target: int
    sample_id: int


class TokenSplit:
    """The sequences of one split; a map-style data set.

    Arrays may be memory-mapped: a copy of this object in another process opens the files anew.

    Args:
        tokens: Stored tokens of all sequences, one after the other. Shape (num_tokens,).
        offsets: Where each sequence begins, and the end of the last. Shape (num_stored + 1,).
        targets: Class of each sequence. Shape (num_stored,).
        max_tokens: Sequences are cut off after so many tokens.
        shift: Added to stored tokens to give ids; id 0 is for padding.
        rows: The stored sequences that belong to the split. None means all.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.integer],
        offsets: npt.NDArray[np.int64],
        targets: npt.NDArray[np.integer],
        max_tokens: int,
        shift: int = 0,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._tokens, self._offsets, self._targets = tokens, offsets, targets
        self._max_tokens, self._shift = max_tokens, shift
        self._rows = np.arange(len(targets)) if rows is None else rows

    @classmethod
    def from_cache(
        cls,
        cache: Cache,
        name: str,
        max_tokens: int,
        shift: int = 0,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> TokenSplit:
        """Open what `write_sequences` wrote under `name`."""
        tokens = cache.array(f"{name}_tokens")
        offsets, targets = (np.asarray(cache.array(f"{name}_{x}")) for x in ("offsets", "targets"))
        return cls(tokens, offsets, targets, max_tokens, shift, rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> TokenSample:
        """Return sample `index`; FILL gives the first one under the id FILL."""
        row = self._rows[0 if index == FILL else index]
        first = self._offsets[row]
        last = min(self._offsets[row + 1], first + self._max_tokens)
        tokens = self._tokens[first:last].astype(np.int64) + self._shift
        return TokenSample(tokens, int(self._targets[row]), int(index))

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        if isinstance(self._tokens, np.memmap):
            state["_tokens"] = str(self._tokens.filename)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        if isinstance(state["_tokens"], str):
            state["_tokens"] = np.load(state["_tokens"], mmap_mode="r")
        self.__dict__.update(state)

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Class of each sample, shape (num_samples,)."""
        return self._targets[self._rows]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sample before it is cut off, shape (num_samples,)."""
        return np.diff(self._offsets)[self._rows]

    @property
    def num_cut(self) -> int:
        """Samples that are cut off."""
        return int((self.lengths > self._max_tokens).sum())


def write_sequences(
    writer: CacheWriter,
    name: str,
    tokens: list[npt.NDArray[np.uint8]],
    lengths: Iterable[int],
    targets: Iterable[int],
) -> None:
    """Add one split to a cache.

    Args:
        writer: The cache.
        name: Name of the split.
        tokens: Pieces of the tokens of all sequences; where a piece ends does not matter.
        lengths: Tokens of each sequence.
        targets: Class of each sequence, below 65536.
    """
    ends = np.cumsum(np.fromiter(lengths, dtype=np.int64))
    writer.add(f"{name}_tokens", np.concatenate(tokens))
    writer.add(f"{name}_offsets", np.concatenate([np.zeros(1, dtype=np.int64), ends]))
    writer.add(f"{name}_targets", np.fromiter(targets, dtype=np.uint16))


@dataclass(frozen=True)
class PadCollate:
    """Make a batch of sequences, padded at the end with id 0.

    Args:
        pad_to: `longest` pads to the longest sequence of the batch, `max` to `max_seq_len`.
        pad_multiple: The padded length is rounded up to a multiple of this, up to `max_seq_len`.
        max_seq_len: Largest padded length.
    """

    pad_to: Literal["longest", "max"]
    pad_multiple: int
    max_seq_len: int

    def __call__(self, samples: list[TokenSample]) -> dict[str, Tensor]:
        """Return `inputs` and `key_mask` (B, N), `target` and `sample_ids` (B,)."""
        lengths = np.array([len(sample.tokens) for sample in samples])
        length = self.max_seq_len
        if self.pad_to == "longest":
            longest = int(lengths.max())
            length = min(-(-longest // self.pad_multiple) * self.pad_multiple, length)
        inputs = np.zeros((len(samples), length), dtype=np.int64)
        for row, sample in enumerate(samples):
            inputs[row, : len(sample.tokens)] = sample.tokens
        return {
            "inputs": torch.from_numpy(inputs),
            "key_mask": torch.from_numpy(np.arange(length) < lengths[:, None]),
            "target": torch.tensor([sample.target for sample in samples]),
            "sample_ids": torch.tensor([sample.sample_id for sample in samples]),
        }


def next_power_of_two(length: int) -> int:
    """Return the smallest power of two that is not below `length`."""
    return 1 << (length - 1).bit_length()


class PairSample(NamedTuple):
    """Two sequences with one label.

    Args:
        tokens: Token ids of each text, shapes (length,), int64.
        target: Class.
        sample_id: Index of the sample in its split, or FILL.
    """

    tokens: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    target: int
    sample_id: int


class TextTable:
    """Different texts, one after the other.

    Tokens may be memory-mapped: a copy of this object in another process opens the file anew.

    Args:
        tokens: Stored tokens of all texts. Shape (num_tokens,).
        offsets: Where each text begins, and the end of the last. Shape (num_texts + 1,).
        max_tokens: Texts are cut off after so many tokens.
        shift: Added to stored tokens to give ids; id 0 is for padding.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.integer],
        offsets: npt.NDArray[np.int64],
        max_tokens: int,
        shift: int = 0,
    ) -> None:
        self._tokens, self._offsets = tokens, offsets
        self.max_tokens, self._shift = max_tokens, shift

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> npt.NDArray[np.int64]:
        """Return the token ids of a text, shape (length,)."""
        first = self._offsets[row]
        last = min(self._offsets[row + 1], first + self.max_tokens)
        return self._tokens[first:last].astype(np.int64) + self._shift

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        if isinstance(self._tokens, np.memmap):
            state["_tokens"] = str(self._tokens.filename)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        if isinstance(state["_tokens"], str):
            state["_tokens"] = np.load(state["_tokens"], mmap_mode="r")
        self.__dict__.update(state)


class PairSplit:
    """The pairs of one split; a map-style data set.

    Args:
        texts: The texts.
        rows: The two texts of each pair. Shape (num_pairs, 2).
        text_lengths: Tokens of each of them before any cut. Shape (num_pairs, 2).
        targets: Class of each pair. Shape (num_pairs,).
    """

    def __init__(
        self,
        texts: TextTable,
        rows: npt.NDArray[np.integer],
        text_lengths: npt.NDArray[np.integer],
        targets: npt.NDArray[np.integer],
    ) -> None:
        self.texts, self.rows, self.text_lengths = texts, rows, text_lengths
        self._targets = targets

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> PairSample:
        """Return sample `index`; FILL gives the first one under the id FILL."""
        pair = 0 if index == FILL else index
        first, second = (self.texts[row] for row in self.rows[pair])
        return PairSample((first, second), int(self._targets[pair]), int(index))

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Class of each pair, shape (num_pairs,)."""
        return self._targets

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of the longer text of each pair before any cut, shape (num_pairs,)."""
        return self.text_lengths.max(axis=1).astype(np.int64)

    @property
    def num_cut(self) -> int:
        """Pairs of which a text is cut off."""
        return int((self.lengths > self.texts.max_tokens).sum())


@dataclass(frozen=True)
class PairCollate:
    """Make a batch of pairs; both texts are padded at the end with id 0, to one length.

    Args:
        pad_to: `longest` pads to the longest text of the batch, `max` to `max_seq_len`.
        pad_multiple: The padded length is rounded up to a multiple of this, up to `max_seq_len`.
        max_seq_len: Largest padded length.
    """

    pad_to: Literal["longest", "max"]
    pad_multiple: int
    max_seq_len: int

    def __call__(self, samples: list[PairSample]) -> dict[str, Tensor]:
        """Return `inputs` and `key_mask` (B, 2, N), `target` and `sample_ids` (B,)."""
        lengths = np.array([[len(text) for text in sample.tokens] for sample in samples])
        length = self.max_seq_len
        if self.pad_to == "longest":
            longest = max(1, int(lengths.max()))
            length = min(-(-longest // self.pad_multiple) * self.pad_multiple, length)
        inputs = np.zeros((len(samples), 2, length), dtype=np.int64)
        for row, sample in enumerate(samples):
            for column, text in enumerate(sample.tokens):
                inputs[row, column, : len(text)] = text
        return {
            "inputs": torch.from_numpy(inputs),
            "key_mask": torch.from_numpy(np.arange(length) < lengths[..., None]),
            "target": torch.tensor([sample.target for sample in samples]),
            "sample_ids": torch.tensor([sample.sample_id for sample in samples]),
        }
