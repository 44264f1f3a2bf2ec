"""Where kernels can run, and how they are launched: tiles, warps, stages, found or by default.

Defaults need no file. `python -m profiling kernels --tune` measures the candidates on a GPU and
writes `tuned/sm_<capability>.json` beside this file; what is found there wins.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INTERPRET_VARIABLE = "TRITON_INTERPRET"

HEAD_DIMS = range(1, 129)  # wider heads do not fit the registers of a program

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_recorders: list[list[Launched]] = []
_targets: list[int] = []
TUNED = Path(__file__).parent / "tuned"
_forced: list[Launch] = []
_forced_for: dict[str, Launch] = {}
_watchers: list[dict[Shape, None]] = []


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


@dataclass(frozen=True)
class Launch:
    """Launch configuration of one kernel.

    Args:
        block_q: queries per tile.
        block_k: keys per tile.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
    """

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Shape:
    """What a launch configuration depends on.

    Args:
        kernel: name of the kernel, which ends in `forward`, `grad_query` or `grad_key`.
        head_dim: padded width of the widest head.
        num_tiles: score tiles that are alive at once (components).
        itemsize: bytes of an entry of query.
    """

    kernel: str
    head_dim: int
    num_tiles: int
    itemsize: int

    @property
    def key(self) -> str:
        """Name in a table of tuned configurations."""
        return f"{self.kernel}/{self.head_dim}/{self.num_tiles}/{8 * self.itemsize}bit"


@contextmanager
def forced(launch: Launch) -> Iterator[None]:
    """Use one configuration for every kernel, for tests and tuning."""
    _forced.append(launch)
    try:
        yield
    finally:
        _forced.pop()


@contextmanager
def forced_for(key: str, launch: Launch) -> Iterator[None]:
    """Use a configuration for the kernels of one `Shape.key`, for tuning."""
    _forced_for[key] = launch
    try:
        yield
    finally:
        del _forced_for[key]


@contextmanager
def seen_shapes() -> Iterator[dict[Shape, None]]:
    """Collect the shapes that configurations are chosen for, in order."""
    _watchers.append({})
    try:
        yield _watchers[-1]
    finally:
        _watchers.pop()


@lru_cache
def _tuned(capability: tuple[int, int]) -> dict[str, Launch]:
    path = TUNED / f"sm_{capability[0]}{capability[1]}.json"
    if not path.exists():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))["launches"]
    return {name: Launch(**entry) for name, entry in table.items()}


def write_tuned(capability: tuple[int, int], found: dict[str, Launch], about: str) -> Path:
    """Merge configurations into the table of a GPU; return the file."""
    TUNED.mkdir(exist_ok=True)
    path = TUNED / f"sm_{capability[0]}{capability[1]}.json"
    launches = {name: asdict(value) for name, value in _tuned(capability).items()}
    launches.update({name: asdict(value) for name, value in found.items()})
    content = {"about": about, "launches": dict(sorted(launches.items()))}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _tuned.cache_clear()
    return path


def default_launch(shape: Shape) -> Launch:
    """Return a configuration that compiles without spills in 16 bit on sm_80 and sm_90."""
    if shape.itemsize == 4:  # IEEE float32 products run on the ordinary units: small tiles
        return Launch(32, 32, num_warps=4, num_stages=1 if shape.head_dim > 64 else 2)
    # More score tiles, wider heads, and the two forms of the sum of shifted keys: smaller tiles.
    small = shape.head_dim > 64 or shape.num_tiles > 2 or shape.kernel.startswith("smgk_")
    if shape.kernel.endswith("forward"):
        return Launch(128, 32 if small else 64, 8 if small or shape.num_tiles > 1 else 4, 3)
    if shape.kernel.endswith("grad_query"):
        return Launch(64, 32 if small else 64, 4, 2)
    return Launch(32, 64, 8 if shape.head_dim > 64 and shape.num_tiles > 1 else 4, 2)


def choose_launch(
    shape: Shape, device: torch.device, default: Callable[[Shape], Launch] = default_launch
) -> Launch:
    """Return the configuration of a kernel on a device: forced, tuned or its family's default."""
    if _watchers:
        _watchers[-1][shape] = None
    if _forced:
        return _forced[-1]
    if shape.key in _forced_for:
        return _forced_for[shape.key]
    if is_recording():
        return default(shape)
    if device.type != "cuda":  # the interpreter: fewer, larger operations
        return Launch(32, 32)
    found = _tuned(torch.cuda.get_device_capability(device)).get(shape.key)
    return default(shape) if found is None else found
