"""Question windows, texts and text pairs: cached arrays, samples, padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.core.cache import Cache, Mapped
from datamodules.core.order import FILL
from datamodules.core.sequences import PadCollate, Ragged, TokenSplit, batch_of, padded


class PairSample(NamedTuple):
    """A text, or two texts in one sequence.

    Args:
        values: Token ids with special tokens. (length,) int64.
        second: Start of the second text; the length if there is none.
        target: Class.
        sample_id: Index in the split, or FILL.
    """

    values: npt.NDArray[np.int64]
    second: int
    target: int
    sample_id: int


class WindowSample(NamedTuple):
    """A question and a piece of its text.

    Args:
        values: Token ids with special tokens. (length,) int64.
        second: Start of the piece.
        size: Number of tokens of the piece.
        target: Positions of the answer's first and last token; 0 if it is not in the piece.
        sample_id: Index in the split, or FILL.
    """

    values: npt.NDArray[np.int64]
    second: int
    size: int
    target: tuple[int, int]
    sample_id: int


def shortened(first: list[int], second: list[int], limit: int) -> tuple[list[int], list[int]]:
    """Remove tokens at the end of the longer text, or of the second, down to `limit` in all."""
    kept = min(len(second), max(limit // 2, limit - len(first)))
    return first[: limit - kept], second[:kept]


class TextPairSplit(TokenSplit):
    """Texts or pairs of one split, with special tokens, truncated when they were stored.

    Args:
        *arguments: Arguments of TokenSplit.
        seconds: Start of the second text of each sample. Shape (num_samples,).
        num_cut: Number of truncated samples.
    """

    def __init__(self, *arguments: Any, seconds: npt.NDArray[np.int32], num_cut: int) -> None:
        super().__init__(*arguments)
        self._seconds, self._num_cut = seconds, num_cut

    def __getitem__(self, index: int) -> Any:
        """Return a PairSample; FILL returns the first one with the id FILL."""
        values, target, sample_id = super().__getitem__(index)
        second = int(self._seconds[0 if index == FILL else index])
        return PairSample(values, second, target, sample_id)

    @property
    def num_cut(self) -> int:
        """Number of truncated samples."""
        return self._num_cut


class WindowSplit(Mapped):
    """Windows of the questions of one split; a map-style data set.

    Args:
        tokens: Ids of each window, with special tokens.
        windows: For each window the question index, the start of its piece in the sequence, the
            start of its piece in the text, and the number of tokens. Shape (num_windows, 4).
        spans: Positions of the answer's first and last token. Shape (num_windows, 2).
        texts: Start of each question's text in `characters`. (num_questions,).
        characters: Half-open character range of each token of all texts. Shape (num_tokens, 2).
    """

    def __init__(
        self,
        tokens: Ragged,
        windows: npt.NDArray[np.int32],
        spans: npt.NDArray[np.int32],
        texts: npt.NDArray[np.int64],
        characters: npt.NDArray[np.int32],
    ) -> None:
        self._tokens, self._windows, self._spans = tokens, windows, spans
        self._texts, self._characters = texts, characters

    @classmethod
    def from_cache(cls, cache: Cache, name: str) -> WindowSplit:
        """Open the arrays of a split."""
        names = ("windows", "spans", "texts", "characters")
        return cls(Ragged.open(cache, name), *(cache.array(f"{name}_{x}") for x in names))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> WindowSample:
        """Return a window; FILL returns the first one with the id FILL."""
        row = 0 if index == FILL else index
        _, second, _, size = self._windows[row].tolist()
        first, last = self._spans[row].tolist()
        values = self._tokens[row].astype(np.int64)
        return WindowSample(values, second, size, (first, last), index)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each window, with special tokens, (num_windows,)."""
        return self._tokens.lengths

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Whether each window contains the answer, (num_windows,)."""
        return (np.asarray(self._spans)[:, 0] > 0).astype(np.int64)

    @property
    def num_questions(self) -> int:
        """Number of questions with a window."""
        return len(self._texts)

    def question_of(self, window: int) -> int:
        """Return the index of a window's question."""
        return int(self._windows[window, 0])

    def characters_of(self, window: int, first: int, last: int) -> tuple[int, int]:
        """Return the half-open character range of a span of positions."""
        question, second, begin, _ = self._windows[window].tolist()
        start = self._texts[question] + begin - second
        return int(self._characters[start + first, 0]), int(self._characters[start + last, 1])


@dataclass(frozen=True)
class TypedCollate(PadCollate):
    """Collate windows or pairs, padded at the end.

    Args:
        padding: Id of the padding.
        typed: Whether tokens from the second text on have type 1.
    """

    padding: int
    typed: bool

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return a batch.

        Returns:
            `inputs`, `key_mask`, `token_types` (B, N); `target` (B,), or (B, 2) for windows;
            `sample_ids` (B,); for windows `answerable` (B, N), True on tokens of the text.
        """
        rows = [sample.values for sample in samples]
        inputs, mask = padded(rows, self.length(max(map(len, rows))), self.padding)
        places = np.arange(inputs.shape[1])
        seconds = np.array([sample.second for sample in samples])[:, None]
        types = (places >= seconds) & mask.numpy() & self.typed
        batch = batch_of(samples, inputs, mask)
        batch["token_types"] = torch.from_numpy(types.astype(np.int64))
        if isinstance(samples[0], WindowSample):
            ends = seconds + np.array([sample.size for sample in samples])[:, None]
            batch["answerable"] = torch.from_numpy((places >= seconds) & (places < ends))
        return batch
