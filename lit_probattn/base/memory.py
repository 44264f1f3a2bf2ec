"""Peak memory of a step, predicted on tensors that have shapes only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lit_probattn.base.graphs import written
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


# What the meta device stands for in the predictions under way, the innermost last.
_devices: list[str] = []


@contextmanager
def predicting(device: str) -> Iterator[None]:
    """Let tensors on the meta device stand for those of a device, `cpu` or `cuda`, in predictions.

    Blocks have that device's sizes; one block of many is made where all use the same room.
    """
    _devices.append(device)
    try:
        yield
    finally:
        _devices.pop()


def is_predicting() -> bool:
    """Whether memory is being predicted on the meta device."""
    return bool(_devices)


def device_type(device: torch.device) -> str:
    """Return the type of a device; in a prediction of the one that the meta device stands for."""
    return _devices[-1] if _devices and device.type == "meta" else device.type


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind a tensor: fake ones and those on the meta device have none.

    By itself this says nothing: predictions of memory and exports both use tensors without memory.
    """
    return type(tensor) is torch.Tensor and tensor.device.type != "meta"


def only_shapes(tensor: torch.Tensor) -> bool:
    """Whether nothing but shapes is needed, as in a prediction of memory.

    Not where a graph is recorded: numbers go through it later.
    """
    return not has_numbers(tensor) and written() is None


def is_computed(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a tensor are those of this call: no graph, no prediction of memory."""
    return has_numbers(tensor) and written() is None


def outlined_bytes(
    build: Callable[[], tuple[StepFunction, Resident]],
    device: str = "cpu",
    inside: Mapping[str, Callable[..., Any]] | None = None,
) -> tuple[int, int]:
    """Predict the same as `predicted_bytes` on the meta device, in a fifth of its time.

    For steps in which PyTorch chooses nothing by the device, as it does in its fused attention.

    Args:
        build: as there.
        device: `cpu` or `cuda`, whose blocks the step has.
        inside: functions that operators run, by name: what they make inside counts too.
    """
    with predicting(device):
        with torch.device("meta"):
            step, resident = build()
        peak = peak_bytes(resident, step, inside)
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
