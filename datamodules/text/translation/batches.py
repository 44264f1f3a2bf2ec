"""Sentence pairs as token ids, and batches of them for encoder-decoder models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.order import FILL
from datamodules.core.sequences import Ragged, ragged_writer
from datamodules.text.segments import IGNORE
from datamodules.text.token_batches import SentenceSplit, TokenCollate
from datamodules.text.translation.dictionary import EOS, PAD, UNK
from lit_probattn.base.errors import DataError

_SIDES = ("source", "target")


class SentencePair(NamedTuple):
    """A sentence and its translation as ids with the end token; (length,) int64.

    Args:
        sample_id: Index of the pair in its split, or FILL.
        global_tokens: Number of target tokens of its global batch; 0 in evaluation.
    """

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    sample_id: int
    global_tokens: int


class SentencePairs(SentenceSplit):
    """The sentence pairs of one split: source and target, each with its end token."""

    @classmethod
    def from_cache(cls, cache: Cache, name: str, max_length: int) -> SentencePairs:
        """Open the pairs that `write_sentences` stored under `name`."""
        return cls([Ragged.open(cache, f"{name}_{side}") for side in _SIDES], max_length)

    def sample(self, index: int, global_tokens: int) -> SentencePair:
        """Return a pair; for FILL, one without scored predictions."""
        if index == FILL:
            end = np.array([EOS], dtype=np.int64)
            return SentencePair(end, end, FILL, global_tokens)
        source, target = (self._cut(side[index]) for side in self._sides)
        return SentencePair(source, target, index, global_tokens)

    def _cut(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        if len(ids) <= self._max_length:
            return ids.astype(np.int64)
        return np.append(ids[: self._max_length - 1].astype(np.int64), EOS)

    def reject_longer(self, name: str) -> None:
        """Raise a DataError that names the longest pair if it exceeds `max_length`."""
        lengths = self.lengths
        longest = int(lengths.argmax())
        if lengths[longest] > self._max_length:
            raise DataError(
                f"{name} has {self.num_cut} sentence pairs of more than max_length="
                f"{self._max_length} tokens, </s> included: pair {longest + 1} has "
                f"{lengths[longest]}; raise max_length, or set too_long to cut"
            )


def write_sentences(
    writer: CacheWriter, name: str, sentences: Iterable[npt.NDArray[np.int32]]
) -> tuple[int, int]:
    """Write the sentences of one side of a split to a cache.

    Returns:
        The number of unknown tokens, and the number of all tokens.
    """
    unknown = count = 0
    with ragged_writer(writer, name) as append:
        for ids in sentences:
            append(ids)
            count += len(ids)
            unknown += int((ids == UNK).sum())
    return unknown, count


class PairCollate(TokenCollate):
    """Collate sentence pairs; both sides are padded on the right."""

    def __call__(self, pairs: list[SentencePair]) -> dict[str, Tensor]:
        """Return a batch of B pairs, padded to S and T tokens.

        Returns:
            `source` (B, S) and `source_mask`; `inputs` (B, T), the target shifted by one, starting
            with `</s>`, and `key_mask`; `target` (B, T), IGNORE for predictions that are not
            scored; `sample_ids` (B,); in training `global_tokens` ().
        """
        source, source_mask = self.padded([pair.source for pair in pairs], PAD)
        target, mask = self.padded([pair.target for pair in pairs], IGNORE)
        before = [np.concatenate([pair.target[-1:], pair.target[:-1]]) for pair in pairs]
        inputs, _ = self.padded(before, PAD)
        numbers = self.numbers(pairs)
        target[numbers["sample_ids"] == FILL] = IGNORE
        return {
            "source": source,
            "source_mask": source_mask,
            "inputs": inputs,
            "key_mask": mask,
            "target": target,
            **numbers,
        }
