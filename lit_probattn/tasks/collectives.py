"""Sums and gathers over the ranks of a run; the identity when there is one process."""

from typing import Any

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


def gather_objects(item: Any) -> list[Any]:
    """Every rank's picklable `item`, in rank order, on every rank."""
    gathered = [item] * num_ranks()
    if num_ranks() > 1:
        dist.all_gather_object(gathered, item)
    return gathered
