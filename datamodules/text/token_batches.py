"""Bases of data whose batches are counted in tokens: splits, batches, data modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.core.base import DataModule
from datamodules.core.cache import Mapped
from datamodules.core.sequences import Ragged, padded, padded_length
from datamodules.core.token_order import (
    Lengths,
    Place,
    TokenBatchOrder,
    TokenEvaluationOrder,
    evaluation_tokens,
)
from lit_probattn.base.arguments import Count
from lit_probattn.base.errors import DataError


class SentenceSplit(Mapped):
    """The sentences of one split on one or two sides; a map-style data set of batch items.

    Args:
        sides: Ids of the sentences of each side.
        max_length: Maximum number of tokens per side; longer sentences are truncated.
    """

    def __init__(self, sides: Sequence[Ragged], max_length: int) -> None:
        self._sides, self._max_length = sides, max_length

    def __len__(self) -> int:
        return len(self._sides[0])

    def __getitem__(self, place: Place | int) -> Any:
        """Return a sample by its batch item or its index."""
        return self.sample(*(place if isinstance(place, tuple) else (place, 0)))

    def sample(self, index: int, global_tokens: int) -> Any:
        """Return a sample; for FILL, one without scored predictions.

        Args:
            global_tokens: Number of targets of its global batch; 0 in evaluation.
        """
        raise NotImplementedError

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Zeros, since sentences have no class, (num_samples,)."""
        return np.zeros(len(self), dtype=np.int64)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of the longest side of each sample before truncation, (num_samples,)."""
        return reduce(np.maximum, (side.lengths for side in self._sides))

    @property
    def num_cut(self) -> int:
        """Number of truncated samples."""
        return int((self.lengths > self._max_length).sum())

    def batch_lengths(self, pad_multiple: int) -> Lengths:
        """Return the lengths of the first and the last side, which determine the batches."""
        lengths = [np.minimum(side.lengths, self._max_length) for side in self._sides]
        return Lengths(lengths[0], lengths[-1], pad_multiple, self._max_length)


@dataclass(frozen=True)
class TokenCollate:
    """Base of functions that collate sentences, padded on the right.

    Args:
        pad_multiple: Padded lengths are rounded up to a multiple of this, up to `max_length`.
        max_length: Maximum number of tokens per side.
    """

    pad_multiple: int
    max_length: int

    def padded(self, rows: list[npt.NDArray[np.int64]], fill: int) -> tuple[Tensor, Tensor]:
        """Return ids padded with `fill`, and a mask of the real ones; both (B, length)."""
        longest = max(map(len, rows))
        return padded(rows, padded_length(longest, self.pad_multiple, self.max_length), fill)

    def numbers(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return `sample_ids` (B,); in training also `global_tokens` ()."""
        found = {"sample_ids": torch.tensor([sample.sample_id for sample in samples])}
        if samples[0].global_tokens:
            found["global_tokens"] = torch.tensor(samples[0].global_tokens)
        return found


class TokenBatches(DataModule):
    """A data module whose batches contain at most `max_tokens` tokens, padding included.

    Its splits are `SentenceSplit`s. Padded lengths are rounded up to multiples of `pad_multiple`.

    Args:
        max_tokens: Maximum number of tokens per optimiser step, over all ranks and accumulation
            steps, padding included.
        eval_max_tokens: Maximum number of tokens per evaluation batch of one rank. Default:
            max_tokens divided by the number of micro-batches per step. Does not affect results.
        pad_multiple: Padded lengths are rounded up to a multiple of this.
        **kwargs: Arguments of the parent class.
    """

    sets: tuple[str, ...] = ("batch_size", "eval_batch_size")

    def __init__(
        self,
        *,
        max_tokens: Count = 4096,
        eval_max_tokens: Count | None = None,
        pad_multiple: Count = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size=1, eval_batch_size=None, **kwargs)
        self.max_tokens, self.eval_max_tokens = max_tokens, eval_max_tokens
        self.pad_multiple = pad_multiple

    def batch_lengths(self, name: str) -> Lengths:
        """Return the lengths of a split that determine its batches."""
        lengths: Lengths = self.split(name).batch_lengths(self.pad_multiple)
        return lengths

    @property
    def batch_setting(self) -> tuple[str, int]:
        """Name and value of the setting that determines the size of an optimiser step."""
        return "max_tokens", self.max_tokens

    @property
    def eval_batch_setting(self) -> tuple[str, int]:
        """Name and value of the setting that determines the size of an evaluation batch."""
        return "eval_max_tokens", self.eval_max_tokens or self.max_tokens

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one pass over the training split (after `setup`)."""
        return self._training_order().steps_per_epoch

    def require_tokens(self, lengths: Lengths, what: str, remedy: str) -> None:
        """Raise a DataError if the longest sample exceeds a batch."""
        if lengths.longest > self.max_tokens:
            raise DataError(
                f"max_tokens={self.max_tokens} is below the longest training {what} of "
                f"{lengths.longest} tokens; raise it, or {remedy}"
            )

    def _training_order(self) -> TokenBatchOrder:
        settings = self.max_tokens, self.seed, self._micro_steps()
        return TokenBatchOrder(self.batch_lengths("train"), *settings)

    def _evaluation_order(self, name: str) -> TokenEvaluationOrder:
        rank, world_size = self._layout()
        lengths = self.batch_lengths(name)
        share = self.max_tokens // (world_size * self._accumulation())
        most = evaluation_tokens(lengths, self.eval_max_tokens, share, name)
        return TokenEvaluationOrder(lengths, most, rank, world_size)
