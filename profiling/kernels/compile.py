"""Registers, spills and shared memory of every kernel, compiled for GPUs that need not be there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch

from lit_probattn.kernels.runtime import Launched, interpreted, recording
from profiling.builders import ConfigError
from profiling.kernels import aot
from profiling.kernels.cases import Case, compile_cases
from profiling.kernels.parity import heads_and_gradients, make_inputs

CAPABILITIES = (80, 90)
HEAD_DIMS = (16, 32, 64, 128)
_LENGTH = 1024  # a multiple of every tile, as the tests of speed use


@dataclass(frozen=True)
class CompiledRow:
    """One compiled kernel.

    Args:
        case: the layer whose call needs it.
        kernel: its name.
        head_dim: E.
        dtype: precision of query, key and value.
        capability: 80 for A100, 90 for H100 and H200.
        tiles: queries x keys of a tile.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        registers: per thread.
        spill_bytes: stored for want of registers, per thread.
        shared_bytes: shared memory of a program.
        wgmma: whether products use Hopper's warp-group instructions.
        compile_s: seconds; next to nothing where Triton's cache holds the kernel.
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
    wgmma: bool
    compile_s: float


def recorded_launches(
    case: Case, head_dim: int, dtype: torch.dtype, capability: int = 90
) -> list[Launched]:
    """Return the launches of one forward and backward call, without running them."""
    torch.manual_seed(0)
    layer = case.layer(head_dim, head_dim, **{"num_heads": 2, **case.options})
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
    """Compile what calls of the cases would launch, one row per kernel.

    Raises:
        ConfigError: the process runs kernels in the interpreter.
    """
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
    compiled = aot.compile_launch(launched, capability)
    seconds = time.perf_counter() - start
    found = aot.resources(compiled, capability)
    options = launched.options
    tiles = f"{options.get('BLOCK_Q', '–')}x{options.get('BLOCK_K', '–')}"
    return CompiledRow(
        case=case.name,
        kernel=launched.kernel.__name__,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        capability=capability,
        tiles=tiles,
        num_warps=found.num_warps,
        num_stages=options.get("num_stages", 1),
        registers=found.registers,
        spill_bytes=found.spill_bytes,
        shared_bytes=found.shared_bytes,
        wgmma=found.uses_wgmma,
        compile_s=round(seconds, 1),
    )


def as_dicts(rows: Sequence[CompiledRow]) -> list[dict[str, object]]:
    """Return rows for a table."""
    return [asdict(row) for row in rows]


def faults(rows: Sequence[CompiledRow]) -> list[str]:
    """Return what must not be: forward kernels that spill, programs that no GPU can hold."""
    found = []
    for row in rows:
        where = f"{row.kernel} of {row.case}, heads of {row.head_dim}, sm_{row.capability}"
        if row.shared_bytes > aot.SHARED_LIMIT[row.capability]:
            found.append(f"{where}: {row.shared_bytes} bytes of shared memory")
        if "forward" in row.kernel and row.spill_bytes:
            found.append(f"{where}: spills {row.spill_bytes} bytes")
    return found


def selected_cases(names: str | None) -> list[Case]:
    """Return the cases of the table whose name holds one of the comma-separated parts.

    Raises:
        ConfigError: none does.
    """
    cases = compile_cases()
    if names is None:
        return cases
    parts = [part.strip() for part in names.split(",")]
    found = [case for case in cases if any(part in case.name for part in parts)]
    if not found:
        known = ", ".join(case.name for case in cases)
        raise ConfigError(f"no kernel is named like {names!r}; expected a part of one of: {known}")
    return found
