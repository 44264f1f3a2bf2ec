"""Batch loaders that Lightning uses unchanged.

Lightning rebuilds a torch DataLoader to insert its own sampler (distributed runs, prediction),
which would replace the order of `datamodules.core.order`. It leaves any other iterable unchanged,
so the DataLoader is wrapped here.

"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.core.order import EvaluationOrder, TrainingOrder
from datamodules.core.packed_order import PackedOrder
from datamodules.core.token_order import TokenBatchOrder, TokenEvaluationOrder
from lit_probattn.base.errors import DataError

Batch = dict[str, Tensor]
TrainingOrders = TrainingOrder | TokenBatchOrder | PackedOrder
EvaluationOrders = EvaluationOrder | TokenEvaluationOrder


def ignore_stop_signals(_worker: int) -> None:
    """Ignore, in a loader process, the signals with which a training stops after its step.

    A cluster sends them to all processes of a job, and the step may need further batches. The
    training ends its loader processes through their queues, or by a second SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, signal.SIG_DFL))


class _Loader:
    """A torch DataLoader that reports data errors, also from worker processes, in one line."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        _loaders.add(self)

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from self.loader
        except DataError as error:
            self.end_workers()  # otherwise it waits for five seconds
            # A worker process prepends its traceback; the last line is the message.
            kind, text = type(error), str(error.args[0]).strip().splitlines()[-1]
            raise DataError(text.removeprefix(f"{kind.__module__}.{kind.__name__}: ")) from None

    def end_workers(self) -> None:
        """End the loader processes."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()
            self._iterator = None

    # Lightning shuts the workers down through this attribute.
    @property
    def _iterator(self) -> Any:
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator


_loaders: WeakSet[_Loader] = WeakSet()


@atexit.register  # before multiprocessing, which sends one SIGTERM and waits
def _end_workers() -> None:
    for loader in list(_loaders):
        loader.end_workers()


class EvaluationLoader(_Loader):
    """Yields every sample once, in the same number of batches on every rank."""

    def __init__(self, loader: DataLoader[Any], order: EvaluationOrders) -> None:
        super().__init__(loader)
        self.order = order

    def __len__(self) -> int:
        return len(self.order)


class TrainingLoader(_Loader):
    """Endless stream of micro-batches; `processed` returns how many the trainer has processed."""

    def __init__(
        self, loader: DataLoader[Any], order: TrainingOrders, processed: Callable[[], int]
    ) -> None:
        super().__init__(loader)
        self.order = order
        self._processed = processed

    def __iter__(self) -> Iterator[Batch]:
        start = self._processed()
        for position, batch in enumerate(super().__iter__()):
            # The trainer may prefetch one batch, but cannot have processed a batch not yet yielded.
            if position == 1 and self._processed() > start + 1:
                raise RuntimeError(
                    f"the training stream started at micro-batch {start}, but the trainer resumed "
                    f"at {self._processed()}: the loader was created before the checkpoint was "
                    "restored. Do not set trainer.max_epochs and do not read "
                    "trainer.estimated_stepping_batches; use trainer.max_steps"
                )
            yield batch
