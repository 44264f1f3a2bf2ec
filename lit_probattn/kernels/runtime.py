"""Support and launch of kernels, and their configurations: tiles, warps, stages.

Defaults need no file. `python -m profiling kernels --tune` measures candidates on a GPU and writes
`tuned/sm_<capability>.json` in this folder, which takes precedence.
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
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from lit_probattn.base.memory import is_predicting
from lit_probattn.base.torch_internals import outside_graphs

INTERPRET_VARIABLE = "TRITON_INTERPRET"

HEAD_DIMS = range(1, 129)  # larger heads do not fit the registers of a program

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TUNED = Path(__file__).parent / "tuned"
_recorders: list[tuple[int, list[Launched]]] = []
_forced: list[tuple[str | None, Launch]] = []
_watchers: list[dict[Shape, None]] = []


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors; read at import."""
    return os.environ.get(INTERPRET_VARIABLE) == "1"


def refusal(device: str, dtype: torch.dtype, *head_dims: int) -> str | None:
    """Return why kernels do not support such query, key and value ("cannot …"), or None."""
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
            return f"supports head_dim <= {HEAD_DIMS.stop - 1}, received {size}"
    return None


@dataclass(frozen=True)
class Launched:
    """One launch that was recorded instead of run: the kernel and its arguments."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def recording(capability: int = 90) -> Iterator[list[Launched]]:
    """Record launches instead of running them, to compile them ahead of time on any machine.

    Outputs stay uninitialised. Configurations are chosen for a GPU of this capability (80, 90),
    from its tuned table if there is one.
    """
    launches: list[Launched] = []
    _recorders.append((capability, launches))
    try:
        yield launches
    finally:
        _recorders.pop()


def target_capability(device: torch.device) -> int:
    """Return the capability for which kernels are configured: the GPU's, or the recorded one."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    return _recorders[-1][0] if _recorders else 90


def is_recording() -> bool:
    """Whether launches are recorded."""
    return bool(_recorders)


def launch(kernel: Any, num_programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch a kernel over a one-dimensional grid on the device of its first tensor.

    Args:
        num_programs: size of the grid; nothing is launched if it is 0.
        args: positional arguments; the first is a tensor, or a tuple that starts with one.

    Raises:
        ValueError: the device cannot run kernels.
    """
    if num_programs == 0 or is_predicting():
        return
    if _recorders:
        _recorders[-1][1].append(Launched(kernel, args, options))
        return
    first = args[0]
    while isinstance(first, tuple):
        first = first[0]
    device = first.device
    reason = refusal(device.type, first.dtype)
    if reason is not None:
        raise ValueError(f"this kernel {reason}; received tensors on {device}, {first.dtype}")
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


@outside_graphs
def draw_tensor(key: tuple[int, int], samples: Tensor) -> Tensor:
    """Return the words from which kernels draw, [key word, key word, sample words …], int64.

    Args:
        key: `RandomKey.philox_key(stream)`.
        samples: `RandomKey.samples(batch_size, device)`.
    """
    # Filled on the device: a copy from host memory, as in `words[0] = number` with torch 2.11,
    # waits for the device and cannot be captured in a CUDA graph.
    words = samples.new_empty(2 + len(samples))
    words[0].fill_(key[0])
    words[1].fill_(key[1])
    words[2:] = samples
    return words


def plain_float(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor as contiguous float32; None stays None."""
    return None if tensor is None else tensor.float().contiguous()


class HeadRows(NamedTuple):
    """A tensor (batch, head[, part], row, column) as pointer and strides; columns have stride 1."""

    base: Tensor
    batch: int
    head: int
    part: int
    row: int


def head_rows(tensor: Tensor) -> HeadRows:
    """Return a tensor with unit column stride as a kernel argument."""
    batch, head, *part, row, _ = tensor.stride()
    return HeadRows(tensor, batch, head, part[0] if part else 0, row)


class PairTensor(NamedTuple):
    """A mask or bias (batch, head, query, key) as pointer and strides, 0 if broadcast."""

    base: Tensor | None
    batch: int = 0
    head: int = 0
    row: int = 0
    col: int = 0


def _pair_tensor(tensor: Tensor | None) -> PairTensor:
    if tensor is None:
        return PairTensor(None)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return PairTensor(tensor, *(0 if size == 1 else stride for size, stride in pairs))


def unseen(count: int) -> int:
    """Return a count as a kernel argument: 2 count + 1, which `tiles.number` halves.

    Triton recompiles for integers that are 1 or divisible by 16, and no argument of `jit` disables
    this within tuples; 16 heads instead of 8, or one sample, would therefore recompile.
    """
    return 2 * count + 1


def half_seen(length: int) -> int:
    """Return a length as a kernel argument: 2 length, which `tiles.number` halves.

    Kernels are compiled twice, for lengths divisible by 8 and for others: unaligned rows of terms
    and sums need up to 30 more registers.
    """
    return 2 * length


class Pairs(NamedTuple):
    """Inputs of kernels per pair, other than scores; None if a call has none.

    Lengths are `half_seen`, and the threshold is `unseen`.

    `end`: Triton 3.6 reads a stride of 1 in a tuple inside this tuple as None unless the last field
    is a constant; the same holds for every named tuple that contains others.
    """

    num_queries: int
    num_keys: int
    key_mask: Tensor | None
    query_mask: Tensor | None
    mask: PairTensor
    bias: PairTensor
    draw: Tensor | None
    threshold: int
    keep_scale: float
    end: None = None


def make_pairs(num_queries: int, num_keys: int, call: Any) -> Pairs:
    """Return masks, bias and dropout of an operator's inputs as kernel arguments."""
    given = (call.key_mask, call.query_mask, call.pair_mask)
    key_mask, query_mask, mask = (None if x is None else x.view(torch.uint8) for x in given)
    return Pairs(
        num_queries=half_seen(num_queries),
        num_keys=half_seen(num_keys),
        key_mask=None if key_mask is None else key_mask.contiguous(),
        query_mask=None if query_mask is None else query_mask.contiguous(),
        mask=_pair_tensor(mask),
        bias=_pair_tensor(call.bias),
        draw=call.draw,
        threshold=unseen(call.threshold),
        keep_scale=65536 / (32768 - call.threshold),
    )


class PairOptions(TypedDict, total=False):
    """Keyword arguments of all attention functions with kernels: masks, bias and dropout.

    Args:
        bias: additive, 4-dimensional, broadcastable to (B, H, N, L).
        key_mask: real keys, (B, L) bool.
        query_mask: queries whose output is needed, (B, N) bool; tiles of others are skipped, and
            their outputs are zero.
        pair_mask: allowed pairs, 4-dimensional bool, broadcastable to (B, H, N, L).
        draw: words of attention dropout, see `draw_tensor`; None means no dropout.
        threshold: `AttentionDropout.threshold`.
        is_causal: bottom-right aligned causal mask.
    """

    bias: Tensor | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    pair_mask: Tensor | None
    draw: Tensor | None
    threshold: int
    is_causal: bool


NO_PAIRS: PairOptions = {
    **{"bias": None, "key_mask": None, "query_mask": None, "pair_mask": None},
    **{"draw": None, "threshold": 0, "is_causal": False},
}


@dataclass(frozen=True)
class Launch:
    """Launch configuration of one kernel: queries and keys per tile, warps, pipeline stages."""

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2

    @property
    def resources(self) -> dict[str, int]:
        """Warps and stages as launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    @property
    def options(self) -> dict[str, int]:
        """All launch options of a kernel with tiles of pairs."""
        return {"BLOCK_Q": self.block_q, "BLOCK_K": self.block_k, **self.resources}


@dataclass(frozen=True)
class Shape:
    """Properties on which a launch configuration depends.

    Args:
        kernel: name of the kernel, which ends in `forward`, `grad_query`, `grad_bias`, or in the
            result of a pass over tiles of keys: `grad_key`, `grad_value` or `grad_key_value`.
        head_dim: padded size of the largest head.
        num_tiles: number of score tiles that are live at once (components).
        itemsize: bytes of an element of query.
        draws: draws per pair: "dropout", "noise", both ("noise_dropout") or an empty string.
    """

    kernel: str
    head_dim: int
    num_tiles: int
    itemsize: int
    draws: str = ""

    @property
    def key(self) -> str:
        """Key in a table of tuned configurations."""
        name = f"{self.kernel}/{self.head_dim}/{self.num_tiles}/{8 * self.itemsize}bit"
        return f"{name}/{self.draws}" if self.draws else name


@contextmanager
def forced(launch: Launch, key: str | None = None) -> Iterator[None]:
    """Use a configuration for the kernels of one `Shape.key`, or for all; for tests and tuning."""
    _forced.append((key, launch))
    try:
        yield
    finally:
        _forced.pop()


@contextmanager
def seen_shapes() -> Iterator[dict[Shape, None]]:
    """Collect the shapes for which configurations are chosen, in order."""
    _watchers.append({})
    try:
        yield _watchers[-1]
    finally:
        _watchers.pop()


def tuned_file(capability: int) -> Path:
    """Return the path of the tuned configurations of a GPU (80, 90); the file may not exist."""
    return TUNED / f"sm_{capability}.json"


@lru_cache
def _tuned(capability: int) -> dict[str, Launch]:
    path = tuned_file(capability)
    if not path.exists():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))["launches"]
    return {name: Launch(**entry) for name, entry in table.items()}


def write_tuned(capability: int, found: dict[str, Launch], about: str) -> Path:
    """Merge configurations into the table of a GPU (80, 90); return its path."""
    TUNED.mkdir(exist_ok=True)
    path = tuned_file(capability)
    launches = {name: asdict(value) for name, value in _tuned(capability).items()}
    launches.update({name: asdict(value) for name, value in found.items()})
    content = {"about": about, "launches": dict(sorted(launches.items()))}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    forget_tuned()
    return path


def forget_tuned() -> None:
    """Clear the cache of tuned configurations, so that the tables are read again."""
    _tuned.cache_clear()


# Fastest on an H200 in bfloat16 without draws, N = 4096 (`python -m profiling kernels --tune`): one
# score per pair, several products, shifted components; with heads of at most 64, and of 128.
_FASTEST: dict[str, tuple[tuple[Launch | None, ...], tuple[Launch | None, ...]]] = {
    "forward": (
        (Launch(128, 64, 4, 3), Launch(64, 64, 4, 3), Launch(64, 64, 4, 3)),
        (Launch(128, 64, 8, 3), Launch(128, 32, 8, 3), Launch(128, 64, 8, 3)),
    ),
    "grad_query": (
        (Launch(128, 32, 8, 3), Launch(128, 64, 8, 3), Launch(64, 64, 4, 2)),
        (Launch(128, 32, 8, 3), Launch(128, 32, 8, 3), Launch(128, 64, 8, 3)),
    ),
    "grad_key_value": (
        (Launch(32, 128, 4, 3), Launch(32, 64, 4, 2), Launch(32, 64, 4, 2)),
        (Launch(64, 128, 8, 3), None, None),
    ),
    "grad_key": ((None, None, None), (None, Launch(32, 64, 4, 2), Launch(32, 64, 4, 2))),
    "grad_value": ((None, None, None), (None, Launch(64, 128, 8, 3), Launch(64, 128, 8, 3))),
}


def default_launch(shape: Shape, capability: int = 90) -> Launch:
    """Return a configuration of dense kernels for a GPU of this capability (80, 90).

    On Hopper, what was measured to be the fastest. Otherwise one that compiles without spills in
    16 bits. A tile has at least 16 rows per warp: with fewer, two warps compute the same scores.
    Key tiles of 64 use the tensor cores at full rate, of 32 at two thirds; dropout needs registers.
    """
    if shape.itemsize == 4:  # IEEE float32 products do not use tensor cores: small tiles
        return Launch(32, 32, num_warps=4, num_stages=1 if shape.head_dim > 64 else 2)
    wide, several, drops = shape.head_dim > 64, shape.num_tiles > 1, bool(shape.draws)
    # Several score tiles at once, or both forms of the sum for shifted keys.
    shifted = shape.kernel.startswith("smgk_")
    if capability >= 90 and not drops and shape.num_tiles <= 2:
        for name, choices in _FASTEST.items():
            found = choices[wide][several + shifted]
            if shape.kernel.endswith(name) and found is not None:
                return found
    crowded = shape.num_tiles > 2 or shifted or (wide and several)
    if shape.kernel.endswith("forward"):
        narrow = shape.num_tiles > 2 or (drops if shifted else wide and several)
        stages = 2 if several and drops and not wide else 3
        return Launch(128, 32 if narrow else 64, 8 if wide or several or drops else 4, stages)
    if shape.kernel.endswith("grad_query"):
        if several:
            return Launch(128, 32 if crowded or drops else 64, 8, 2)
        return Launch(64, 32 if wide else 64, 4, 2)
    if shape.kernel.endswith("grad_bias"):
        return Launch(64, 32 if wide or several else 64, 4, 2)
    if several or wide:
        narrow = drops or (several and wide and shape.kernel.endswith("grad_key"))
        if shape.kernel.endswith("grad_value"):
            narrow = drops and shifted
        return Launch(16 if narrow else 32, 128, 8, 2)
    return Launch(32, 64, 4, 2)


def choose_launch(
    shape: Shape, device: torch.device, default: Callable[[Shape], Launch] | None = None
) -> Launch:
    """Return the configuration of a kernel on a device: forced, tuned or the family's default."""
    if _watchers:
        _watchers[-1][shape] = None
    for key, choice in reversed(_forced):
        if key in (None, shape.key):
            return choice
    if device.type != "cuda" and not is_recording():  # interpreter: fewer, larger operations
        return Launch(32, 32)
    capability = target_capability(device)
    found = _tuned(capability).get(shape.key)
    if found is not None:
        return found
    return default_launch(shape, capability) if default is None else default(shape)
