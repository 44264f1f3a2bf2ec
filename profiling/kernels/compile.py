"""Compile kernels for GPUs without their presence (registers, spills, memory), and tune them.

No driver is needed, since Triton includes the assembler. Kernels that were imported for the
interpreter cannot be compiled.
"""

from __future__ import annotations

import inspect
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.processes import capture
from lit_probattn.base.provenance import device_name, versions
from lit_probattn.base.torch_internals import outside_modes
from lit_probattn.kernels.runtime import (
    Launch,
    Launched,
    Shape,
    forced,
    interpreted,
    recording,
    seen_shapes,
    target_capability,
    write_tuned,
)
from lit_probattn.measure.timing import alone_on, lost_gpu, quantile, replayed, time_once
from profiling.kernels.cases import Case
from profiling.kernels.parity import heads_and_gradients, make_inputs

# Shared memory that one program may use, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
_REGISTERS, _THREADS = 65536, 2048  # of a multiprocessor; a program reserves 1 KiB of shared memory

HEAD_DIMS = (16, 32, 64, 128)
_LENGTH = 1024  # a multiple of every tile, as in the speed tests
_TOKENS, _TUNED_LENGTH, _REPEATS = 16384, 4096, 5
WARPS, STAGES = (4, 8), (2, 3)  # of a program, candidates of tuning


@dataclass(frozen=True)
class CompiledRow:
    """One compiled kernel.

    Args:
        capability: 80 for A100, 90 for H100 and H200.
        tiles: queries x keys of a tile.
        spill_bytes: register spills in bytes per thread.
        programs: number of resident programs per multiprocessor, by registers and shared memory.
        wgmma: whether products use Hopper's warp-group instructions.
        narrowest: columns of the narrowest of these instructions, which run at full rate from 64.
        doubled: whether a product has fewer than 16 rows per warp of its layout, so that several
            warps compute the same rows and everything derived from them.
        compile_s: compile time in seconds; almost 0 if the kernel is in Triton's cache.
    """

    case: str
    kernel: str
    head_dim: int
    dtype: str
    capability: int
    tiles: str
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    programs: int
    wgmma: bool
    narrowest: int
    doubled: bool
    compile_s: float


class _Driver:
    """Driver for Triton's launcher that reports a GPU which need not be present."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # the launcher caches compiled kernels per device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _distinct_functions() -> Iterator[None]:
    """Raise a RuntimeError for functions of kernels that Triton 3.6 confuses.

    Triton specialises a function by the sequence of all tensors in its arguments. Two calls that
    divide the same tensors differently into tuples get one version, compiled for the first call.
    """
    from triton.compiler.code_generator import CodeGenerator

    original = CodeGenerator.call_JitFunction
    seen: dict[Any, str] = {}

    def call(self: Any, fn: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        leaves: list[str] = []
        given = inspect.getcallargs(fn.fn, *args, **kwargs)
        shape = str([_leaves(given[name], name, leaves) for name in fn.arg_names])
        before = seen.setdefault((fn.fn.__qualname__, tuple(leaves)), shape)
        if before != shape:
            raise RuntimeError(
                f"{fn.fn.__qualname__} is called with tuples of {before} and of {shape} entries "
                "with the same tensors: Triton 3.6 compiles one function for both"
            )
        return original(self, fn, args, kwargs, *rest)

    with mock.patch.object(CodeGenerator, "call_JitFunction", call):
        yield


def _leaves(value: Any, path: str, found: list[str]) -> Any:
    """Append types of tensors and values and paths of constants; return the nesting of tuples."""
    from triton.language.core import tuple as triton_tuple

    if isinstance(value, tuple | triton_tuple):
        return [_leaves(x, f"{path}.{i}", found) for i, x in enumerate(value)]
    kind = str(getattr(value, "type", ""))
    constant = not kind or kind.startswith("constexpr")
    found.append(f"{path}={getattr(value, 'value', value)}" if constant else kind)
    return 1


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Let Triton's launcher see a GPU of this capability, which need not be present."""
    from triton.runtime import driver

    driver.set_active(_Driver(capability))
    try:
        yield
    finally:
        if torch.cuda.is_available():  # restoring a driver needs a GPU
            driver.reset_active()


def compile_launch(launched: Launched, capability: int) -> Any:
    """Compile a launch for a GPU capability (80, 90); RuntimeError in the interpreter."""
    import triton

    if not isinstance(launched.kernel, triton.JITFunction):
        raise RuntimeError(
            "kernels were imported for the interpreter; unset TRITON_INTERPRET to compile"
        )
    with compiling_for(capability), _distinct_functions():
        return launched.kernel.warmup(*launched.args, grid=(1,), **launched.options)


def resources(compiled: Any, capability: int) -> dict[str, Any]:
    """Assemble compiled code again with statistics; return the columns of its row."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = compiled.asm["ptx"]
    found = re.search(r"\.target (\w+)", ptx)
    assert found is not None
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={found.group(1)}"]
        done = capture([*command, file.name, "-o", "/dev/null"])
        done.check_returncode()
        log = done.stderr

    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        assert match is not None, log
        return int(match.group(1))

    registers, shared = number(r"Used (\d+) reg"), compiled.metadata.shared
    threads = 32 * compiled.metadata.num_warps
    by_registers = _REGISTERS // (threads * max(24, -(-registers // 8) * 8))
    by_memory = (SHARED_LIMIT[capability] + 1024) // (shared + 1024)
    widths = [int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k", ptx)]
    return {
        "registers": registers,
        "spill_bytes": number(r"(\d+) bytes spill stores"),
        "shared_bytes": shared,
        "programs": min(by_registers, by_memory, _THREADS // threads),
        "num_warps": compiled.metadata.num_warps,
        "wgmma": bool(widths),
        "narrowest": min(widths, default=0),
        "doubled": doubled_products(compiled.asm["ttgir"]) > 0,
    }


def doubled_products(ttgir: str) -> int:
    """Count the products in which several warps compute the same rows or columns.

    A layout with `warpsPerCTA = [w, v]` covers 16 w rows and v times the columns of its
    instruction; a smaller tile is replicated.
    """
    pattern = (
        r"(#\w+) = #ttg\.nvidia_mma<\{.*?warpsPerCTA = \[(\d+), (\d+)\].*?"
        r"instrShape = \[([\d, ]+)\]"
    )
    layouts = {}
    for name, down, across, shape in re.findall(pattern, ttgir):
        height, width = ([int(n) for n in shape.split(",")])[:2]
        layouts[name] = (min(height, 16) * int(down), width * int(across))
    count = 0
    products = r"(?:warp_group_dot|tt\.dot) .*-> tensor<(\d+)x(\d+)xf32, (#\w+)>"
    for rows, cols, name in re.findall(products, ttgir):
        height, width = layouts.get(name, (0, 0))
        count += int(rows) < height or int(cols) < width
    return count


def recorded_launches(
    case: Case, head_dim: int, dtype: torch.dtype, capability: int = 90
) -> list[Launched]:
    """Return the launches of a forward and a backward pass, without running them."""
    torch.manual_seed(0)
    layer = case.layer(head_dim, head_dim=head_dim, **{"num_heads": 2, **case.options})
    inputs = make_inputs(layer, case, _LENGTH, _LENGTH, dtype, seed=0, clear=False)
    with recording(capability) as launches:
        heads_and_gradients(layer, "triton", inputs, dtype)
    return launches


def compile_rows(
    cases: Sequence[Case],
    head_dims: Sequence[int],
    capabilities: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    forward_only: bool = False,
) -> Iterator[CompiledRow]:
    """Compile the kernels that calls would launch, one row each; ConfigError in the interpreter."""
    if interpreted():
        raise ConfigError("kernels cannot be compiled in the interpreter: unset TRITON_INTERPRET")
    for case, head_dim, capability in product(cases, head_dims, capabilities):
        for launched in recorded_launches(case, head_dim, dtype, capability):
            if forward_only and "forward" not in launched.kernel.__name__:
                continue
            yield _row(case, head_dim, dtype, launched, capability)


def _row(
    case: Case, head_dim: int, dtype: torch.dtype, launched: Launched, capability: int
) -> CompiledRow:
    start = time.perf_counter()
    compiled = compile_launch(launched, capability)
    seconds = time.perf_counter() - start
    options = launched.options
    return CompiledRow(
        case=case.name,
        kernel=launched.kernel.__name__,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        capability=capability,
        tiles=f"{options.get('BLOCK_Q', '–')}x{options.get('BLOCK_K', '–')}",
        num_stages=options.get("num_stages", 1),
        compile_s=round(seconds, 1),
        **resources(compiled, capability),
    )


def faults(rows: Sequence[CompiledRow]) -> list[str]:
    """Return the defects: forward kernels that spill, programs that exceed a GPU, repeated rows.

    Chunks of linear attention deliberately have fewer than 16 rows per warp: states fill registers.
    """
    found = []
    for row in rows:
        where = f"{row.kernel} of {row.case}, heads of {row.head_dim}, sm_{row.capability}"
        if row.shared_bytes > SHARED_LIMIT[row.capability]:
            found.append(f"{where}: {row.shared_bytes} bytes of shared memory")
        if "forward" in row.kernel and row.spill_bytes:
            found.append(f"{where}: spills {row.spill_bytes} bytes")
        if row.capability == 90 and row.doubled and "linear" not in row.case:
            found.append(f"{where}: warps compute the same rows")
    return found


def candidates(shape: Shape) -> Iterator[Launch]:
    """Yield the candidate launch configurations of a kernel."""
    tiles = [(128, 64), (128, 32), (64, 64), (64, 32), (128, 128), (64, 128), (32, 64), (32, 32)]
    for (block_q, block_k), warps, stages in product(tiles, WARPS, STAGES):
        if "key" in shape.kernel or "value" in shape.kernel:  # the outer tile is over keys
            block_q, block_k = block_k, block_q
        if block_q * block_k * shape.num_tiles <= 128 * 128 * 2:
            yield Launch(block_q, block_k, warps, stages)


def tuned_call(
    case: Case, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """Return a function that runs forward and backward of a layer at the size used by tuning."""
    heads = max(1, 512 // head_dim // case.options.get("num_components", 1))
    torch.manual_seed(0)
    options = {**case.options, "num_heads": heads}
    layer = case.layer(head_dim, head_dim=head_dim, **options).to(device)
    inputs = make_inputs(layer, case, _TUNED_LENGTH, _TUNED_LENGTH, dtype, seed=0, clear=False)
    return lambda: heads_and_gradients(layer, "triton", inputs, dtype)


def tune(
    head_dims: Sequence[int], dtypes: Sequence[torch.dtype], cases: Sequence[Case]
) -> tuple[str, list[dict[str, object]]]:
    """Time forward and backward with every candidate; store the fastest one per kernel.

    CUDA graphs are replayed, since the time of Python would hide differences. A candidate that does
    not compile or does not fit is skipped; one after which the GPU fails (`lost_gpu`) raises a
    RuntimeError. Kernels are tuned one at a time with the other configurations fixed. Returns the
    file and a row per kernel.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    with alone_on(device):
        best, lines = fastest_launches(head_dims, dtypes, cases, device)
    about = f"{device_name('cuda')}; {versions()}; N = {_TUNED_LENGTH}, causal"
    path = write_tuned(target_capability(device), best, about)
    return str(path), lines


def fastest_launches(
    head_dims: Sequence[int],
    dtypes: Sequence[torch.dtype],
    cases: Sequence[Case],
    device: torch.device,
) -> tuple[dict[str, Launch], list[dict[str, object]]]:
    """Return the fastest candidate and a row per kernel; see `tune`."""
    best: dict[str, Launch] = {}
    lines: list[dict[str, object]] = []
    for case, head_dim, dtype in product(cases, head_dims, dtypes):
        run = tuned_call(case, head_dim, dtype, device)
        with seen_shapes() as shapes:
            run()
        for shape in shapes:
            if shape.key in best:
                continue
            times = {}
            for launch in candidates(shape):
                try:
                    with outside_modes(), forced(launch, shape.key):
                        run()
                        replay = replayed(run, device)
                        seconds = [time_once(replay, device) for _ in range(_REPEATS)]
                except Exception as error:  # a candidate may exceed the GPU's resources
                    if lost_gpu(error):
                        raise
                    continue
                finally:
                    replay = run  # a graph keeps the memory of its call
                times[launch] = quantile(seconds, 0.5)
            if times:
                best[shape.key] = min(times, key=lambda launch: times[launch])
                lines.append(
                    {
                        "kernel": shape.key,
                        "best": str(best[shape.key]),
                        "candidates": len(times),
                        "ms": f"{times[best[shape.key]] * 1e3:.3f}",
                    }
                )
    return best, lines
