"""Sequences to pre-train an encoder on: pieces of documents, or two of which one may follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from datamodules.core.cache import Cache, Mapped
from datamodules.core.order import FILL
from datamodules.core.sequences import Ragged
from datamodules.text.fine_tuning.batches import PairSample, TypedCollate
from datamodules.text.segments import IGNORE
from datamodules.text.tokens import Tokens
from lit_probattn.base.errors import DataError
from lit_probattn.base.files import fingerprint

__all__ = ["DocumentSplit", "MaskedCollate"]


class DocumentSplit(Mapped):
    """Sequences of the documents of one split; a map-style data set.

    A piece is as many sentences of a document, one after the other, as fit into a sequence; pieces
    do not overlap. With `pairs` a sequence has two parts. The first are the first sentences of a
    piece, the second its others (class 0), or as many sentences from a random place of another
    document (class 1); which of them, and where a piece is cut, is a function of `seed` and the
    piece. Pieces of one sentence are left out then. Without `pairs` a piece is a sequence.

    Source: BERT (Devlin et al., 2019), appendix A.2, and RoBERTa's DOC-SENTENCES.
    Departs from the source: sentences that a random second part displaces are not used again; all
    sequences are as long as their sentences allow, none is short on purpose.

    Args:
        sentences: Ids of all sentences, one after the other.
        documents: First sentence of each document, and the end. Shape (num_documents + 1,).
        max_length: Tokens of a sequence, special ones included.
        tokeniser: Puts the special tokens around.

    Raises:
        DataError: There is no piece, or pairs of a single document.
    """

    def __init__(
        self,
        sentences: Ragged,
        documents: npt.NDArray[np.int64],
        max_length: int,
        tokeniser: Tokens,
        pairs: bool,
        seed: int = 0,
    ) -> None:
        self._sentences, self._documents = sentences, documents
        self._tokeniser, self._pairs, self._seed = tokeniser, pairs, seed
        self._room = max_length - tokeniser.num_special(pairs)
        if pairs and len(documents) < 3:
            raise DataError(
                "a second part that does not follow is of another document, but the text has "
                f"{len(documents) - 1}; give more text, another value of documents, or set "
                "next_sentence false"
            )
        self._pieces = self._cut()
        if not len(self._pieces):
            raise DataError(
                f"no document of the text has {'two sentences' if pairs else 'a sentence'} that "
                f"fit into max_length={max_length}"
            )

    @classmethod
    def from_cache(cls, cache: Cache, name: str, **settings: Any) -> DocumentSplit:
        """Open the arrays of a split."""
        documents = np.asarray(cache.array(f"{name}_documents"))
        return cls(Ragged.open(cache, name), documents, **settings)

    def _cut(self) -> npt.NDArray[np.int64]:
        """Return document, first sentence and end of each piece, (num_pieces, 3)."""
        least = 2 if self._pairs else 1
        starts = self._sentences.offsets
        found: list[tuple[int, int, int]] = []
        for document in range(len(self._documents) - 1):
            first, end = int(self._documents[document]), int(self._documents[document + 1])
            while first < end:
                # The last sentence that still fits; one that does not fit alone is cut off.
                stop = int(np.searchsorted(starts, starts[first] + self._room, side="right")) - 1
                stop = min(max(stop, first + least), end)
                if stop - first >= least:
                    found.append((document, first, stop))
                first = stop
        return np.array(found, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> PairSample:
        """Return a sequence; FILL gives the first one under the id FILL."""
        row = 0 if index == FILL else index
        document, first, stop = self._pieces[row].tolist()
        if not self._pairs:
            ids = self._ids(first, stop)[: self._room]
            values, _ = self._tokeniser.join(ids)
            return PairSample(np.array(values), len(values), 0, index)
        draws = self._draws(row)
        cut = first + 1 + draws[0] % (stop - first - 1)
        one, other = self._ids(first, cut), self._ids(cut, stop)
        elsewhere = draws[1] % 2
        if elsewhere:
            other = self._elsewhere(document, len(other), draws[2], draws[3])
        one, other = _fit(one, other, self._room)
        values, _ = self._tokeniser.join(one, other)
        second = len(values) - len(other) - 1
        return PairSample(np.array(values), second, elsewhere, index)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Documents, sentences and tokens."""
        return len(self._documents) - 1, len(self._sentences), len(self._sentences.stored)

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Whether the second part is from elsewhere, (num_pieces,)."""
        rows = range(len(self)) if self._pairs else ()
        found = np.zeros(len(self), dtype=np.int64)
        found[: len(rows)] = [self._draws(row)[1] % 2 for row in rows]
        return found

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Most tokens of each sequence, special ones included, (num_pieces,)."""
        starts = self._sentences.offsets
        size = starts[self._pieces[:, 2]] - starts[self._pieces[:, 1]]
        special = self._tokeniser.num_special(self._pairs)
        return np.minimum(size, self._room) + special

    def _ids(self, first: int, stop: int) -> list[int]:
        starts = self._sentences.offsets
        found: list[int] = self._sentences.stored[starts[first] : starts[stop]].tolist()
        return found

    def _elsewhere(self, document: int, count: int, which: int, where: int) -> list[int]:
        """Return about `count` tokens of whole sentences of another document."""
        number = (document + 1 + which % (len(self._documents) - 2)) % (len(self._documents) - 1)
        first, end = int(self._documents[number]), int(self._documents[number + 1])
        start = first + where % (end - first)
        starts = self._sentences.offsets
        stop = int(np.searchsorted(starts, starts[start] + count, side="left"))
        return self._ids(start, min(max(stop, start + 1), end))

    def _draws(self, row: int) -> list[int]:
        text = f"{self._seed} {row}".encode()
        return np.frombuffer(fingerprint(text, 32), dtype=np.uint64).tolist()


def _fit(one: list[int], other: list[int], room: int) -> tuple[list[int], list[int]]:
    """Cut the ends of two parts off, of the longer one first, until both fit."""
    over = max(0, len(one) + len(other) - room)
    if over:
        longer = max(len(one), len(other))
        equal = min(over, longer - min(len(one), len(other)))
        cut = [equal if len(part) == longer else 0 for part in (one, other)]
        if len(one) == len(other):
            cut = [0, 0]
        rest = over - max(cut)
        cut = [cut[0] + rest // 2, cut[1] + rest - rest // 2]
        one, other = one[: len(one) - cut[0]], other[: len(other) - cut[1]]
    return one, other


@dataclass(frozen=True)
class MaskedCollate(TypedCollate):
    """Make a batch of sequences of which words will be hidden.

    Args:
        special: Ids that are never hidden.
        pairs: Whether sequences have two parts.
    """

    special: Sequence[int] = ()
    pairs: bool = False

    def __call__(self, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return a batch.

        Returns:
            `inputs`, `key_mask`, `token_types`, `target` (B, N), where special tokens and padding
            are -100; `sample_ids` (B,); of pairs `elsewhere` (B,), whether the second part is.
        """
        batch = super().__call__(samples)
        label = batch.pop("target")
        hidden = ~batch["key_mask"] | torch.isin(batch["inputs"], torch.tensor(self.special))
        batch["target"] = torch.where(hidden, IGNORE, batch["inputs"])
        if self.pairs:
            batch["elsewhere"] = label
        return batch
