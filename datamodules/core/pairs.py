"""Pairs of token sequences: a table of texts, pairs of its rows, samples, batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.core.order import FILL

__all__ = ["PairCollate", "PairSample", "PairSplit", "TextTable"]


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
