"""Communication between ranks: sums, gathers, agreement on stop signals, sharding."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lit_probattn.attention import Attention

# SLURM sends SIGUSR1 to requeue the job; it takes precedence over SIGTERM, which takes precedence
# over Ctrl-C. Windows has no SIGUSR1.
_STOP_NAMES = ("SIGUSR1", "SIGTERM", "SIGINT")
STOP_SIGNALS = tuple(signal.Signals[n] for n in _STOP_NAMES if hasattr(signal, n))


def num_ranks() -> int:
    """Return the number of processes of the run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over the ranks, in place, and return it."""
    if num_ranks() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks; the gradient is summed over the ranks too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return sum_over_ranks(values.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return sum_over_ranks(gradients[0].contiguous().clone())


def sum_with_gradients(values: Tensor) -> Tensor:
    """Sum a tensor over the ranks, with gradients to the tensors of all ranks."""
    if num_ranks() == 1:
        return values
    return _SumOverRanks.apply(values)


def gather_objects(item: Any) -> list[Any]:
    """Return every rank's picklable `item`, in rank order, on every rank."""
    gathered = [item] * num_ranks()
    if num_ranks() > 1:
        dist.all_gather_object(gathered, item)
    return gathered


def stop_counts(received: int) -> list[float]:
    """Return a number per stop signal, to be summed over ranks: 1 for the received one."""
    return [float(received == number) for number in STOP_SIGNALS]


def agreed_signal(counts: Sequence[float]) -> int:
    """Return the signal with a non-zero sum of `stop_counts`; 0 if there is none."""
    return next((int(n) for n, count in zip(STOP_SIGNALS, counts, strict=True) if count), 0)


def agree_on_signal(received: int, device: torch.device) -> int:
    """Return the signal that any rank received, the same on every rank; 0 for none."""
    counts: Tensor = sum_over_ranks(torch.tensor(stop_counts(received), device=device))
    return agreed_signal(counts.tolist())


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model's parameters in place over a one-dimensional mesh, as DTensors.

    There is one group per attention block and one for all other parameters.
    """
    from torch.distributed.fsdp import fully_shard

    names = [name for name, module in model.named_modules() if isinstance(module, Attention)]
    blocks = {name.rpartition(".")[0] for name in names} - {""}
    for name in sorted(blocks):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; the tensor itself if it is not sharded."""
    part: Any = getattr(tensor, "to_local", None)
    return tensor if part is None else part()
