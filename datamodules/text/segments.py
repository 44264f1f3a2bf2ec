"""Segments of one long token stream: columns, windows, prompts, and batches of them.

A sample has `inputs` (n,) and `target` (n,), the next token at each position; predictions with
target IGNORE are not scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from datamodules.core.cache import Mapped
from datamodules.core.order import FILL
from datamodules.core.sequences import padded
from lit_probattn.base.errors import DataError

IGNORE = -100


class StreamSample(NamedTuple):
    """A segment and the next token at each position."""

    inputs: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    sample_id: int


class _Stream(Mapped):
    """A split that is one stream of tokens."""

    def __init__(self, tokens: npt.NDArray[np.integer]) -> None:
        self.tokens = tokens

    def _sample(self, first: int, length: int, sample_id: int) -> StreamSample:
        piece = self.tokens[first : first + length + 1].astype(np.int64)
        return StreamSample(piece[:-1], piece[1:].copy(), sample_id)


class ColumnSplit(_Stream):
    """The stream divided into equal columns, which are read in parallel.

    Source: MGK's language modelling code. Sample s · columns + c is segment s of column c; a batch
    is one segment of every column. The remainder of the stream after the last column is dropped;
    the last segment of all columns can be shorter.

    Raises:
        DataError: The columns are too short for a prediction.
    """

    def __init__(self, tokens: npt.NDArray[np.integer], num_columns: int, segment_len: int) -> None:
        super().__init__(tokens)
        self.num_columns, self.segment_len = num_columns, segment_len
        self.column_len = len(tokens) // num_columns
        if self.column_len < 2:
            raise DataError(
                f"the training text of {len(tokens)} tokens is too short for "
                f"batch_size={num_columns} columns of at least 2 tokens; lower batch_size"
            )

    def __len__(self) -> int:
        return self.num_columns * -(-(self.column_len - 1) // self.segment_len)

    def __getitem__(self, index: int) -> StreamSample:
        """Return one segment."""
        step, column = divmod(0 if index == FILL else index, self.num_columns)
        skip = step * self.segment_len
        length = min(self.segment_len, self.column_len - 1 - skip)
        return self._sample(column * self.column_len + skip, length, index)


class WindowSplit(_Stream):
    """Windows that start every `stride` tokens and score every prediction of the stream once.

    The first window scores all its predictions, each later one only its last `stride`, which
    therefore have at least window_len - stride tokens of context. With stride = window_len these
    are independent segments; with stride 1 it is the sliding window of the papers.

    `drop_short` drops a shorter last window.

    Raises:
        DataError: There are no windows; or the stride is not from 1 to window_len.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.integer],
        window_len: int,
        stride: int,
        drop_short: bool = False,
    ) -> None:
        super().__init__(tokens)
        if not 1 <= stride <= window_len:
            raise DataError(
                f"a stride must be from 1 to segment_len={window_len}, so that no token is "
                f"skipped; received {stride}"
            )
        self.window_len, self.stride = window_len, stride
        beyond = max(0, len(tokens) - 1 - window_len)
        self._count = 1 + (beyond // stride if drop_short else -(-beyond // stride))
        if len(tokens) < 2 or (drop_short and len(tokens) - 1 < window_len):
            needed = window_len + 1 if drop_short else 2
            raise DataError(
                f"the text has {len(tokens)} tokens, expected at least {needed} for "
                f"segment_len={window_len}"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> StreamSample:
        """Return one window."""
        first = self.stride * (0 if index == FILL else index)
        length = min(self.window_len, len(self.tokens) - 1 - first)
        sample = self._sample(first, length, index)
        if first:
            sample.target[: self.window_len - self.stride] = IGNORE
        return sample


class PromptSplit:
    """Token ids of prompts to continue."""

    def __init__(self, prompts: list[npt.NDArray[np.int64]]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> StreamSample:
        """Return one prompt, without scored predictions."""
        inputs = self.prompts[0 if index == FILL else index]
        return StreamSample(inputs, np.full_like(inputs, IGNORE), index)


@dataclass(frozen=True)
class StreamCollate:
    """Collate segments.

    Args:
        form: Scoring mode: `segments`, `sliding` or `stride<n>`; stored in the batch.
        pad_left: Whether padding comes before the tokens (prompts) instead of after them.
    """

    form: str
    pad_left: bool = False

    def __call__(self, samples: list[StreamSample]) -> dict[str, Any]:
        """Return `inputs`, `target`, `key_mask` (B, N), `sample_ids` (B,) and `form`."""
        length = max(len(sample.inputs) for sample in samples)
        inputs, mask = padded([sample.inputs for sample in samples], length, 0, self.pad_left)
        target, _ = padded([sample.target for sample in samples], length, IGNORE, self.pad_left)
        return {
            "inputs": inputs,
            "key_mask": mask,
            "target": target,
            "sample_ids": torch.tensor([sample.sample_id for sample in samples]),
            "form": self.form,
        }
