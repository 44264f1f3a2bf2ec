"""Base of data modules whose batches are counted in tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from datamodules.core.base import DataModule
from datamodules.core.token_order import (
    Lengths,
    TokenBatchOrder,
    TokenEvaluationOrder,
    evaluation_tokens,
)
from lit_probattn.base.arguments import Count, checks_arguments
from lit_probattn.base.errors import DataError

__all__ = ["TokenBatches"]


class TokenBatches(DataModule):
    """A data module whose batches contain at most `max_tokens` tokens, padding included.

    A subclass implements `batch_lengths`. Padded lengths are rounded up to multiples of
    `pad_multiple`.

    Args:
        max_tokens: Maximum number of tokens per optimiser step, over all ranks and accumulation
            steps, padding included.
        eval_max_tokens: Maximum number of tokens per evaluation batch of one rank. Default:
            max_tokens divided by the number of micro-batches per step. Does not affect results.
        pad_multiple: Padded lengths are rounded up to a multiple of this.
        **kwargs: Arguments of the parent class.
    """

    sets: tuple[str, ...] = ("batch_size", "eval_batch_size", "pad_to")

    @checks_arguments
    def __init__(
        self,
        *,
        max_tokens: Count = 4096,
        eval_max_tokens: Count | None = None,
        pad_multiple: Count = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            batch_size=1,
            eval_batch_size=None,
            pad_to="longest",
            pad_multiple=pad_multiple,
            **kwargs,
        )
        self.max_tokens, self.eval_max_tokens = max_tokens, eval_max_tokens

    def batch_lengths(self, name: str) -> Lengths:
        """Return the lengths of a split that determine its batches."""
        raise NotImplementedError

    @property
    def batch_setting(self) -> tuple[str, int]:
        """Name and value of the setting that determines the size of an optimiser step."""
        return "max_tokens", self.max_tokens

    @property
    def eval_batch_setting(self) -> tuple[str, int]:
        """Name and value of the setting that determines the size of an evaluation batch."""
        return "eval_max_tokens", self.eval_max_tokens or self.max_tokens

    @cached_property
    def _steps_per_epoch(self) -> int:
        return self._training_order().steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one pass over the training split (after `setup`)."""
        return self._steps_per_epoch

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
