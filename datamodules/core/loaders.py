"""Loaders of batches that Lightning takes as they are.

Lightning rebuilds a torch DataLoader to put its own sampler in (distributed runs, prediction),
which would undo the order of `datamodules.core.order`. It leaves any other iterable alone, so the
DataLoader is wrapped here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.core.order import EvaluationOrder, TrainingOrder

__all__ = ["Batch", "EvaluationLoader", "TrainingLoader"]

Batch = dict[str, Tensor]


class _Loader:
    """Iterates over a torch DataLoader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)

    # Lightning shuts the workers down through this attribute.
    @property
    def _iterator(self) -> Any:
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator


class EvaluationLoader(_Loader):
    """Every sample once; the same number of batches on every rank.

    Args:
        loader: DataLoader over `order`.
        order: Its batch sampler.
    """

    def __init__(self, loader: DataLoader[Any], order: EvaluationOrder) -> None:
        super().__init__(loader)
        self.order = order

    def __len__(self) -> int:
        return len(self.order)


class TrainingLoader(_Loader):
    """An endless stream of micro-batches, without length.

    Args:
        loader: DataLoader over `order`.
        order: Its batch sampler.
        processed: Returns how many micro-batches the trainer has processed.
    """

    def __init__(
        self, loader: DataLoader[Any], order: TrainingOrder, processed: Callable[[], int]
    ) -> None:
        super().__init__(loader)
        self.order = order
        self._processed = processed

    def __iter__(self) -> Iterator[Batch]:
        start = self._processed()
        for position, batch in enumerate(super().__iter__()):
            # The trainer may fetch one batch ahead, but cannot have processed what it has not got.
            if position == 1 and self._processed() > start + 1:
                raise RuntimeError(
                    f"the training stream began at micro-batch {start}, but the trainer resumed at "
                    f"{self._processed()}: the loader was made before the checkpoint was restored. "
                    f"Do not set trainer.max_epochs and do not read "
                    f"trainer.estimated_stepping_batches; use trainer.max_steps"
                )
            yield batch
