"""Sentences as token ids, and padded batches of them for language models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from datamodules.core.cache import Cache
from datamodules.core.order import FILL
from datamodules.core.sequences import Ragged
from datamodules.text.segments import IGNORE
from datamodules.text.token_batches import SentenceSplit, TokenCollate

_CHUNK = 4 << 20  # tokens per search


class Sentence(NamedTuple):
    """A sentence and the next token at each position.

    Args:
        inputs: The preceding end-of-sentence token, then the tokens, (length,) int64.
        target: The tokens, then the end-of-sentence token; (length,) int64.
        num_words: Number of words of a whole sentence, end included; 0 if it is truncated.
        sample_id: Index of the sentence in its split, or FILL.
        global_tokens: Number of targets of its global batch; 0 in evaluation.
    """

    inputs: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    num_words: int
    sample_id: int
    global_tokens: int


class Sentences(SentenceSplit):
    """The sentences of one split.

    Args:
        stored: Ids of all sentences, each with its end.
        words: Number of words of each sentence, end included; None if not counted.
        end: Id that ends a sentence; the next sentence also starts with it.
        max_length: Maximum number of predictions of a sentence; longer ones are truncated.
    """

    def __init__(
        self,
        stored: Ragged,
        words: npt.NDArray[np.int32] | None,
        end: int,
        max_length: int,
    ) -> None:
        super().__init__((stored,), max_length)
        self._stored, self._words, self._end = stored, words, end

    @classmethod
    def from_cache(cls, cache: Cache, name: str, end: int, max_length: int) -> Sentences:
        """Open the arrays of a split."""
        words = None if name == "train" else cache.array(f"{name}_words")
        return cls(Ragged.open(cache, name), words, end, max_length)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sentences, ends included."""
        return len(self._stored.stored)

    def sample(self, index: int, global_tokens: int) -> Sentence:
        """Return a sentence; for FILL, one without scored predictions."""
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
    def num_words(self) -> int:
        """Number of words of all sentences, ends included; 0 if not counted."""
        return 0 if self._words is None else int(self._words.sum(dtype=np.int64))


def ends_of(tokens: npt.NDArray[np.int32], end: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the ends of sentences in chunks: the position after each `end`."""
    for first in range(0, len(tokens), _CHUNK):
        yield np.flatnonzero(tokens[first : first + _CHUNK] == end) + (first + 1)


@dataclass(frozen=True)
class SentenceCollate(TokenCollate):
    """Collate sentences, padded on the right.

    Args:
        form: Scoring mode, stored in the batch.
    """

    form: str

    def __call__(self, samples: list[Sentence]) -> dict[str, Any]:
        """Return `inputs`, `target`, `key_mask` (B, N), `num_words`, `sample_ids` (B,), `form`.

        In training also `global_tokens` (): number of targets of the global batch.
        """
        inputs, mask = self.padded([sample.inputs for sample in samples], 0)
        target, _ = self.padded([sample.target for sample in samples], IGNORE)
        return {
            "inputs": inputs,
            "key_mask": mask,
            "target": target,
            "num_words": torch.tensor([sample.num_words for sample in samples]),
            "form": self.form,
            **self.numbers(samples),
        }
