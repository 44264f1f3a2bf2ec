"""Packed training batches: whole texts one after another, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from datamodules.core.base import DataModule
from datamodules.core.packed_order import PackedOrder, PackedRows


@dataclass(frozen=True)
class PackedCollate:
    """Collate samples one after another.

    Args:
        padded: Collates the same samples into a padded batch.
    """

    padded: Callable[[list[Any]], dict[str, Any]]

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Return the padded batch without its padding.

        Returns:
            Entries (B, N) become (1, T), the T real tokens in order; `key_mask` is replaced by
            `cu_seqlens`, the bounds of the B samples, (B + 1,) int32. Other entries are unchanged:
            `sample_ids` (B,).
        """
        batch = dict(self.padded(samples))
        real = batch.pop("key_mask")
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.shape == real.shape:
                batch[name] = value[real][None]
        bounds = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
        return {**batch, "cu_seqlens": bounds.to(torch.int32)}


class PackedTraining(DataModule):
    """A data module of separate texts, whose training batches can be packed.

    A subclass implements `row_budget`. Evaluation batches are padded as usual.

    Args:
        pack: Whether training batches contain whole samples one after another, without padding,
            and `cu_seqlens`, their bounds, instead of `key_mask`. Samples are assigned by first fit
            to rows of the longest permitted sample, and a batch consists of rows: `batch_size`
            counts rows, and `max_tokens` is divided into rows. Other settings of padding and of
            sorting by length then have no effect on training.
        **kwargs: Arguments of the parent class.
    """

    def __init__(self, *, pack: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pack = pack

    def row_budget(self) -> tuple[int, int, bool]:
        """Return tokens per row, rows per optimiser step, and `counted` of `PackedOrder`."""
        raise NotImplementedError

    @cached_property
    def packed_rows(self) -> PackedRows:
        """The rows of the training split (after `setup`)."""
        capacity, _, _ = self.row_budget()
        lengths = self.split("train").lengths
        return PackedRows(lengths.clip(max=capacity), capacity, self.seed)

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps of one pass over the training split (after `setup`)."""
        return self._training_order().steps_per_epoch if self.pack else super().steps_per_epoch

    def _training_order(self) -> Any:
        if not self.pack:
            return super()._training_order()
        _, rows_per_step, counted = self.row_budget()
        steps = self._micro_steps()
        return PackedOrder(self.packed_rows, rows_per_step, steps, counted=counted)

    def _loader(self, split: Any, order: Any, collate: Any = None) -> Any:
        if isinstance(order, PackedOrder):
            collate = PackedCollate(self.collate())
        return super()._loader(split, order, collate)
