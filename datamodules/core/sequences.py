"""Token sequences of different lengths: their arrays in a cache, samples, batches."""

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

__all__ = ["PadCollate", "TokenSample", "TokenSplit", "next_power_of_two", "write_sequences"]


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
