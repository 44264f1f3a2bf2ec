"""Sentence pairs as token ids, and batches of them for encoder-decoder models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.core.cache import Cache, CacheWriter, Mapped
from datamodules.core.order import FILL
from datamodules.core.sequences import Ragged, padded, padded_length, ragged_writer
from datamodules.core.token_order import Lengths, Place
from datamodules.text.translation.dictionary import EOS, PAD, UNK
from lit_probattn.base.errors import DataError

__all__ = ["IGNORE", "PairCollate", "SentencePair", "SentencePairs", "write_sentences"]

IGNORE = -100  # targets that are not scored
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


class SentencePairs(Mapped):
    """The sentence pairs of one split; a map-style data set of batch items.

    Args:
        source: Ids of the source sentences.
        target: Ids of the target sentences.
        max_length: Maximum length of a side, end included; longer sentences are truncated.
    """

    def __init__(self, source: Ragged, target: Ragged, max_length: int) -> None:
        self._source, self._target, self._max_length = source, target, max_length

    @classmethod
    def from_cache(cls, cache: Cache, name: str, max_length: int) -> SentencePairs:
        """Open the pairs that `write_sentences` stored under `name`."""
        source, target = (Ragged.open(cache, f"{name}_{side}") for side in _SIDES)
        return cls(source, target, max_length)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, place: Place | int) -> SentencePair:
        """Return a pair by its batch item or its index.

        FILL returns a pair without scored predictions.
        """
        index, global_tokens = place if isinstance(place, tuple) else (place, 0)
        if index == FILL:
            end = np.array([EOS], dtype=np.int64)
            return SentencePair(end, end, FILL, global_tokens)
        source, target = (self._cut(side[index]) for side in (self._source, self._target))
        return SentencePair(source, target, index, global_tokens)

    def _cut(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        if len(ids) <= self._max_length:
            return ids.astype(np.int64)
        return np.append(ids[: self._max_length - 1].astype(np.int64), EOS)

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Zeros, since sentences have no class, (num_samples,)."""
        return np.zeros(len(self), dtype=np.int64)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of the longer side of each pair before truncation, (num_samples,)."""
        return np.maximum(self._source.lengths, self._target.lengths)

    @property
    def num_cut(self) -> int:
        """Number of pairs with a truncated side."""
        return int((self.lengths > self._max_length).sum())

    def side_lengths(self, pad_multiple: int) -> Lengths:
        """Return the lengths of both sides that determine the batches."""
        source, target = (
            np.minimum(side.lengths, self._max_length) for side in (self._source, self._target)
        )
        return Lengths(source, target, pad_multiple, self._max_length)

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


@dataclass(frozen=True)
class PairCollate:
    """Collate sentence pairs; both sides are padded on the right.

    Args:
        pad_multiple: Padded lengths are rounded up to a multiple of this, up to `max_length`.
        max_length: Maximum length of a side.
    """

    pad_multiple: int
    max_length: int

    def __call__(self, pairs: list[SentencePair]) -> dict[str, Tensor]:
        """Return a batch of B pairs, padded to S and T tokens.

        Returns:
            `source` (B, S) and `source_mask`; `inputs` (B, T), the target shifted by one, starting
            with `</s>`, and `key_mask`; `target` (B, T), IGNORE for predictions that are not
            scored; `sample_ids` (B,); in training `global_tokens` ().
        """
        source, source_mask = self._padded([pair.source for pair in pairs], PAD)
        target, mask = self._padded([pair.target for pair in pairs], IGNORE)
        before = [np.concatenate([pair.target[-1:], pair.target[:-1]]) for pair in pairs]
        inputs, _ = self._padded(before, PAD)
        ids = torch.tensor([pair.sample_id for pair in pairs])
        target[ids == FILL] = IGNORE
        batch = {
            "source": source,
            "source_mask": source_mask,
            "inputs": inputs,
            "key_mask": mask,
            "target": target,
            "sample_ids": ids,
        }
        if pairs[0].global_tokens:
            batch["global_tokens"] = torch.tensor(pairs[0].global_tokens)
        return batch

    def _padded(self, rows: list[npt.NDArray[np.int64]], fill: int) -> tuple[Tensor, Tensor]:
        longest = max(map(len, rows))
        return padded(rows, padded_length(longest, self.pad_multiple, self.max_length), fill)
