"""Block sizes, warps and stages of every kernel: defaults, and tables found by tuning.

Defaults need no file. `python -m profiling kernels --tune` measures the candidates on a GPU and
writes `tuned/sm_<capability>.json` beside this file; what is found there wins.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from lit_probattn.kernels.runtime import is_recording

TUNED = Path(__file__).parent / "tuned"


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


_forced: list[Launch] = []
_forced_for: dict[str, Launch] = {}
_watchers: list[dict[Shape, None]] = []


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
