"""Where kernels can run: Triton present or not, interpreted or compiled, and sizes of tiles."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INTERPRET_VARIABLE = "TRITON_INTERPRET"
HEAD_DIMS = range(1, 129)  # wider heads do not fit the registers of a program
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors; read when they are imported."""
    return os.environ.get(INTERPRET_VARIABLE) == "1"


def refusal(device: str, dtype: torch.dtype, *head_dims: int) -> str | None:
    """Say why no kernel can serve tensors of this kind ("cannot …"), or None.

    Args:
        device: device type.
        dtype: dtype of query, key and value.
        head_dims: sizes of the heads involved.
    """
    if importlib.util.find_spec("triton") is None and device != "meta":
        return "cannot run: the package triton is not installed"
    if dtype not in DTYPES:
        return f"cannot compute in {str(dtype).removeprefix('torch.')}"
    if device == "cpu" and not interpreted():
        return (
            "cannot run on the CPU, except in Triton's interpreter (set "
            f"{INTERPRET_VARIABLE}=1 before Python starts; slow, for tests)"
        )
    if device == "cpu" and dtype == torch.bfloat16:
        return "cannot compute in bfloat16 in Triton's interpreter, whose results are wrong there"
    if device not in ("cpu", "cuda", "meta"):
        return f"cannot run on {device} devices"
    for size in head_dims:
        if size not in HEAD_DIMS:
            return f"cannot hold heads of {size} entries: at most {HEAD_DIMS.stop - 1}"
    return None


@dataclass(frozen=True)
class Launched:
    """One launch that was recorded instead of run: the kernel and all that it was given."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


_recorders: list[list[Launched]] = []
_targets: list[int] = []


@contextmanager
def recording(capability: int = 90) -> Iterator[list[Launched]]:
    """Record launches instead of running them, to compile them ahead of time on any machine.

    Outputs stay uninitialised. Configurations are those for a GPU of this capability (80, 90).
    """
    _recorders.append([])
    _targets.append(capability)
    try:
        yield _recorders[-1]
    finally:
        _recorders.pop()
        _targets.pop()


def target_capability(device: torch.device) -> int:
    """Return the capability that kernels are configured for: of the GPU, or of the recording."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    return _targets[-1] if _targets else 90


def is_recording() -> bool:
    """Whether launches are recorded."""
    return bool(_recorders)


def launch(kernel: Any, num_programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch a kernel over a one-dimensional grid on the device of its first argument.

    Args:
        kernel: a function under `triton.jit`.
        num_programs: size of the grid; nothing happens when it is 0.
        args: positional arguments, the first a tensor.
        options: compile-time arguments, `num_warps`, `num_stages`.

    Raises:
        ValueError: the device cannot run kernels.
    """
    if num_programs == 0:
        return
    if _recorders:
        _recorders[-1].append(Launched(kernel, args, options))
        return
    device = args[0].device
    reason = refusal(device.type, args[0].dtype)
    if reason is not None:
        raise ValueError(f"this kernel {reason}; received tensors on {device}, {args[0].dtype}")
    if device.type == "cpu":
        kernel[(num_programs,)](*args, **options)
        return
    with torch.cuda.device(device):
        kernel[(num_programs,)](*args, **options)


def padded(size: int) -> int:
    """Return the tile width of a head: the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if its last dimension is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


@torch.compiler.disable
def draw_tensor(key: tuple[int, int], samples: Tensor) -> Tensor:
    """Return what kernels draw from: [key word, key word, sample words …], int64 on the device.

    Args:
        key: `RandomKey.philox_key(stream)`.
        samples: `RandomKey.samples(batch_size, device)`.
    """
    words = torch.tensor(key, dtype=torch.int64)
    return torch.cat([words.to(samples.device, non_blocking=True), samples])


def like(tensor: Tensor, **options: Any) -> Tensor:
    """Return an uninitialised tensor of the same shape, and strides where they are dense."""
    return torch.empty_like(tensor, **options)
