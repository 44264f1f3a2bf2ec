"""Peak memory of a step, predicted on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lit_probattn.base.torch_internals import FakeTensorMode, peak_bytes, storage_key

StepFunction = Callable[[], object]

# Modules and tensors that exist before a step and after it.
Resident = Sequence[torch.nn.Module | torch.Tensor]


def predicted_bytes(build: Callable[[], tuple[StepFunction, Resident]]) -> tuple[int, int]:
    """Predict (peak above resident, resident) in bytes with fake tensors; nothing is allocated.

    Args:
        build: makes the model and its inputs on the CPU and returns a function that runs one step,
            and what is resident: modules and tensors.

    Equal to the byte to `measured_cpu_bytes`. CUDA rounds blocks to 512 bytes and adds workspaces.
    """
    with FakeTensorMode():
        step, resident = build()
        peak = peak_bytes(resident, step)
        held = resident_bytes(resident)
    return peak - held, held


def resident_bytes(resident: Resident) -> int:
    """Return the bytes of parameters, buffers and tensors, shared storage counted once."""
    storages: dict[int, int] = {}
    for item in resident:
        tensors = (
            [item] if isinstance(item, torch.Tensor) else [*item.parameters(), *item.buffers()]
        )
        for tensor in tensors:
            storages[storage_key(tensor)] = tensor.untyped_storage().nbytes()
    return sum(storages.values())
