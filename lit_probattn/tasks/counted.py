"""Tasks whose loss is a mean over a variable number of entries per micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_probattn.base.arguments import takes
from lit_probattn.tasks.base import Task
from lit_probattn.tasks.distributed import num_ranks, sum_over_ranks


class CountedTask(Task):
    """Task trained on the mean over the entries of a global batch, such as its masked tokens.

    The loss does not depend on how the batch is distributed over ranks and accumulation steps. A
    mean of the micro-batches' means would give entries of small micro-batches a larger weight.

    The total number of entries is known only at the end of a step. The loss of a micro-batch is
    therefore its sum over the number of possible entries, which is equal for all micro-batches of a
    step, and at the end of the step gradients and loss are scaled to the mean over actual entries.
    Gradient clipping applies to the scaled gradient.

    A subclass implements `loss_sum` and `places`.
    """

    @takes(Task)
    def __init__(self, **training: Any) -> None:
        super().__init__(**training)
        self._counts: list[tuple[int, Tensor]] = []  # possible, actual entries since the last step

    def on_train_start(self) -> None:
        """Call the base method; also discard the counts of an interrupted step."""
        super().on_train_start()
        self._counts.clear()

    def loss_sum(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of a micro-batch's entries, and their number; both ()."""
        raise NotImplementedError(f"{type(self).__name__} must implement loss_sum")

    def places(self, batch: Any) -> int:
        """Return the largest possible number of entries, equal for all micro-batches of a step."""
        raise NotImplementedError(f"{type(self).__name__} must implement places")

    def batch_loss(self, batch: Any) -> Tensor:
        """Return the mean loss over the entries of this micro-batch, 0 if empty. Shape ()."""
        total, count = self.loss_sum(batch)
        return total / count.clamp(min=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the sum of losses divided by the number of possible entries. Shape ()."""
        total, count = self.loss_sum(batch)
        places = self.places(batch)
        loss = total / places
        self._window.append((self._micro_step, batch, loss.detach()))
        self._counts.append((places, count.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Scale the gradients and the loss to the mean over entries, then call the base method."""
        places = sum(number for number, _ in self._counts)
        entries = torch.stack([count for _, count in self._counts]).sum().to(torch.float64)
        total = float(sum_over_ranks(entries[None])[0].clamp(min=1.0))
        factor = places * num_ranks() / total
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self._window = [(i, batch, loss * factor) for i, batch, loss in self._window]
        self._counts.clear()
        super().on_before_optimizer_step(optimizer)
