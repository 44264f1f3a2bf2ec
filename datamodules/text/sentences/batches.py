"""Sentences as token ids, and padded batches of them for a language model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from datamodules.core.cache import Cache, Mapped
from datamodules.core.order import FILL
from datamodules.core.sequences import Ragged, padded, padded_length
from datamodules.core.token_order import Lengths, Place
from datamodules.text.segments import IGNORE

__all__ = ["Sentence", "SentenceCollate", "Sentences", "ends_of"]

_CHUNK = 4 << 20  # tokens that are looked through at a time


class Sentence(NamedTuple):
    """A sentence and what follows each of its tokens.

    Args:
        inputs: The end of the sentence before, then the tokens, (length,) int64.
        target: The tokens, then the end; (length,) int64.
        num_words: Words of a whole sentence, the end among them; 0 for one that is cut off.
        sample_id: Index of the sentence in its split, or FILL.
        global_tokens: Targets of the global batch that it is a part of; 0 in evaluation.
    """

    inputs: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    num_words: int
    sample_id: int
    global_tokens: int


class Sentences(Mapped):
    """The sentences of one split; a map-style data set of places in batches.

    Args:
        stored: Ids of all sentences, each with its end.
        words: Words of each sentence, the end among them; None where they are not counted.
        end: Id that ends a sentence; the next one begins with it too.
        max_length: Most predictions of a sentence; a longer one loses its last ones.
    """

    def __init__(
        self,
        stored: Ragged,
        words: npt.NDArray[np.int32] | None,
        end: int,
        max_length: int,
    ) -> None:
        self._stored, self._words = stored, words
        self._end, self._max_length = end, max_length

    @classmethod
    def from_cache(cls, cache: Cache, name: str, end: int, max_length: int) -> Sentences:
        """Open the arrays of a split."""
        words = None if name == "train" else cache.array(f"{name}_words")
        return cls(Ragged.open(cache, name), words, end, max_length)

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sentences, the ends among them."""
        return len(self._stored.stored)

    def __getitem__(self, place: Place | int) -> Sentence:
        """Return a sentence by its place in a batch, or by its index.

        FILL gives a sentence of which nothing is scored.
        """
        index, global_tokens = place if isinstance(place, tuple) else (place, 0)
        if index == FILL:
            one = np.array([self._end], dtype=np.int64)
            return Sentence(one, np.array([IGNORE], dtype=np.int64), 0, FILL, global_tokens)
        ids = self._stored[index]
        target = ids[: self._max_length].astype(np.int64)
        inputs = np.concatenate([[self._end], target[:-1]])
        whole = self._words is not None and len(ids) <= self._max_length
        words = int(self._words[index]) if whole and self._words is not None else 0
        return Sentence(inputs, target, words, index, global_tokens)

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Sentences have no class: 0 for each, (num_samples,)."""
        return np.zeros(len(self), dtype=np.int64)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Predictions of each sentence before any cut, (num_samples,)."""
        return self._stored.lengths

    @property
    def num_cut(self) -> int:
        """Sentences that are cut off."""
        return int((self.lengths > self._max_length).sum())

    @property
    def num_words(self) -> int:
        """Words of all sentences, the ends among them; 0 where they are not counted."""
        return 0 if self._words is None else int(self._words.sum(dtype=np.int64))

    def batch_lengths(self, pad_multiple: int) -> Lengths:
        """Return the lengths as batches see them."""
        lengths = np.minimum(self.lengths, self._max_length)
        return Lengths(lengths, lengths, pad_multiple, self._max_length)


def ends_of(tokens: npt.NDArray[np.int32], end: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield where sentences end, in pieces: the place after each `end`."""
    for first in range(0, len(tokens), _CHUNK):
        yield np.flatnonzero(tokens[first : first + _CHUNK] == end) + (first + 1)


@dataclass(frozen=True)
class SentenceCollate:
    """Make a batch of sentences, padded on the right.

    Args:
        form: What the batch says of how its tokens are scored.
        pad_multiple: The padded length is rounded up to a multiple of this, up to `max_length`.
    """

    form: str
    pad_multiple: int
    max_length: int

    def __call__(self, samples: list[Sentence]) -> dict[str, Any]:
        """Return `inputs`, `target`, `key_mask` (B, N), `num_words`, `sample_ids` (B,), `form`.

        In training `global_tokens` () too: targets of the global batch.
        """
        longest = max(len(sample.inputs) for sample in samples)
        length = padded_length(longest, self.pad_multiple, self.max_length)
        inputs, mask = padded([sample.inputs for sample in samples], length, 0)
        target, _ = padded([sample.target for sample in samples], length, IGNORE)
        batch = {
            "inputs": inputs,
            "key_mask": mask,
            "target": target,
            "num_words": torch.tensor([sample.num_words for sample in samples]),
            "sample_ids": torch.tensor([sample.sample_id for sample in samples]),
            "form": self.form,
        }
        if samples[0].global_tokens:
            batch["global_tokens"] = torch.tensor(samples[0].global_tokens)
        return batch
