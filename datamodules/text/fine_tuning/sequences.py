"""Sequences for pre-training an encoder: pieces of documents, or pairs of pieces."""

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
from datamodules.text.fine_tuning.batches import PairSample, TypedCollate, shortened
from datamodules.text.segments import IGNORE
from datamodules.text.tokens import Tokens
from lit_probattn.base.errors import DataError
from lit_probattn.base.files import fingerprint


class DocumentSplit(Mapped):
    """Sequences of the documents of one split; a map-style data set.

    A piece is the longest run of consecutive sentences of a document that fits into a sequence;
    pieces do not overlap. With `pairs`, a sequence has two parts. The first part is the beginning
    of a piece, the second its remainder (class 0) or a similar number of tokens from a random
    position of another document (class 1); the class and the boundary are a function of `seed` and
    the piece, and pieces of one sentence are skipped. Without `pairs`, a piece is a sequence.

    Source: BERT (Devlin et al., 2019), appendix A.2, and RoBERTa's DOC-SENTENCES.
    Departs from the source: sentences displaced by a random second part are dropped; no sequence
    is shortened on purpose.

    Args:
        name: Name of the split, for errors.
        sentences: Ids of all sentences, stored consecutively.
        documents: Start of each document in sentences, and the end. Shape (num_documents + 1,).
        max_length: Maximum number of tokens per sequence, with special tokens.
        tokeniser: Adds the special tokens.

    Raises:
        DataError: There are no pieces, or `pairs` is set for a single document.
    """

    def __init__(
        self,
        name: str,
        sentences: Ragged,
        documents: npt.NDArray[np.int64],
        max_length: int,
        tokeniser: Tokens,
        pairs: bool,
        seed: int = 0,
    ) -> None:
        self._sentences, self._documents = sentences, documents
        self._tokeniser, self._pairs, self._seed = tokeniser, pairs, seed
        self._limit = max_length - tokeniser.num_special(pairs)
        if pairs and len(documents) < 3:
            raise DataError(
                f"unrelated second parts come from another document, but the {name} split has "
                f"{len(documents) - 1}; provide more text, change documents, or set "
                "next_sentence to false"
            )
        self._pieces = self._cut()
        if not len(self._pieces):
            many = "two consecutive sentences that fit" if pairs else "a sentence that fits"
            remedy = "set next_sentence to false" if pairs else "raise max_length"
            raise DataError(
                f"no document of the {name} split has {many} into max_length={max_length}; "
                f"provide more text, change documents, or {remedy}"
            )

    @classmethod
    def from_cache(cls, cache: Cache, name: str, **settings: Any) -> DocumentSplit:
        """Open the arrays of a split."""
        documents = np.asarray(cache.array(f"{name}_documents"))
        return cls(name, Ragged.open(cache, name), documents, **settings)

    def _cut(self) -> npt.NDArray[np.int64]:
        """Return document, start and end (in sentences) of each piece, (num_pieces, 3)."""
        least = 2 if self._pairs else 1
        starts = self._sentences.offsets
        found: list[tuple[int, int, int]] = []
        for document in range(len(self._documents) - 1):
            first, end = int(self._documents[document]), int(self._documents[document + 1])
            while first < end:
                # The last sentence that fits; a sentence that is too long alone is truncated.
                stop = int(np.searchsorted(starts, starts[first] + self._limit, side="right")) - 1
                stop = min(max(stop, first + least), end)
                if stop - first >= least:
                    found.append((document, first, stop))
                first = stop
        return np.array(found, dtype=np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> PairSample:
        """Return a sequence; FILL returns the first one with the id FILL."""
        row = 0 if index == FILL else index
        document, first, stop = self._pieces[row].tolist()
        if not self._pairs:
            ids = self._ids(first, stop)[: self._limit]
            values = self._tokeniser.join(ids)
            return PairSample(np.array(values), len(values), 0, index)
        draws = self._draws(row)
        cut = first + 1 + draws[0] % (stop - first - 1)
        one, other = self._ids(first, cut), self._ids(cut, stop)
        elsewhere = draws[1] % 2
        if elsewhere:
            other = self._elsewhere(document, len(other), draws[2], draws[3])
        one, other = shortened(one, other, self._limit)
        values = self._tokeniser.join(one, other)
        second = len(values) - len(other) - 1
        return PairSample(np.array(values), second, elsewhere, index)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of documents, sentences and tokens."""
        return len(self._documents) - 1, len(self._sentences), len(self._sentences.stored)

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Whether the second part is from another document, (num_pieces,)."""
        rows = range(len(self)) if self._pairs else ()
        found = np.zeros(len(self), dtype=np.int64)
        found[: len(rows)] = [self._draws(row)[1] % 2 for row in rows]
        return found

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Maximum number of tokens of each sequence, with special tokens, (num_pieces,)."""
        starts = self._sentences.offsets
        size = starts[self._pieces[:, 2]] - starts[self._pieces[:, 1]]
        special = self._tokeniser.num_special(self._pairs)
        return np.minimum(size, self._limit) + special

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


@dataclass(frozen=True)
class MaskedCollate(TypedCollate):
    """Collate sequences for masking.

    Args:
        special: Ids that are never masked.
        pairs: Whether sequences have two parts.
    """

    special: Sequence[int]
    pairs: bool

    def __call__(self, samples: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return a batch.

        Returns:
            `inputs`, `key_mask`, `token_types`, `target` (B, N), where special tokens, padding and
            samples with the id FILL are -100; `sample_ids` (B,); for pairs `elsewhere` (B,), True
            for an unrelated second part.
        """
        batch = super().__call__(samples)
        label = batch.pop("target")
        hidden = ~batch["key_mask"] | torch.isin(batch["inputs"], torch.tensor(self.special))
        hidden |= batch["sample_ids"][:, None] == FILL
        batch["target"] = torch.where(hidden, IGNORE, batch["inputs"])
        if self.pairs:
            batch["elsewhere"] = label
        return batch
