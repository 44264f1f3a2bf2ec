"""Sums and gathers over the ranks of a run; the identity when there is one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def num_ranks() -> int:
    """Number of processes that take part in the run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over the ranks, in place, and return it."""
    if num_ranks() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks; every rank's part gets the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return sum_over_ranks(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return sum_over_ranks(gradients[0].contiguous().clone())


def sum_with_gradients(values: Tensor) -> Tensor:
    """Sum a tensor over the ranks; gradients flow back to the parts of all ranks."""
    if num_ranks() == 1:
        return values
    total: Tensor = _SumOverRanks.apply(values)
    return total


def gather_objects(item: Any) -> list[Any]:
    """Every rank's picklable `item`, in rank order, on every rank."""
    gathered = [item] * num_ranks()
    if num_ranks() > 1:
        dist.all_gather_object(gathered, item)
    return gathered
