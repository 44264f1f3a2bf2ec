"""Compile recorded launches for a GPU that is not there, and read registers, spills and memory.

Needs no driver: the assembler comes with Triton. Needs compiled mode: kernels that were imported
for the interpreter cannot be compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from lit_probattn.kernels.runtime import Launched

# Shared memory that one program may use, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel takes.

    Args:
        registers: per thread.
        spill_bytes: stored to memory for want of registers, per thread.
        shared_bytes: shared memory.
        num_warps: warps.
        uses_wgmma: whether products use Hopper's warp-group instructions.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    uses_wgmma: bool


def _argument(value: Any) -> tuple[str, Any, bool]:
    """Return the type of an argument, its value if it is compiled in, and whether 16 divides it."""
    if value is None:
        return "constexpr", None, False
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype], None, True
    if isinstance(value, float):
        return "fp32", None, False
    if value == 1:
        return "constexpr", 1, False
    return ("i32" if abs(value) < 2**31 else "i64"), None, value % 16 == 0


def compile_launch(launched: Launched, capability: int) -> Any:
    """Compile a launch as the launcher would on a GPU of this capability (80, 90).

    Raises:
        RuntimeError: the kernel was imported for the interpreter.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = launched.kernel
    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError(
            "kernels were imported for the interpreter; unset TRITON_INTERPRET to compile"
        )
    options = {k: v for k, v in launched.options.items() if k in _OPTIONS}
    constexprs = {k: v for k, v in launched.options.items() if k not in _OPTIONS}
    signature: dict[str, str] = {}
    attributes = {}
    for index, (name, value) in enumerate(zip(kernel.arg_names, launched.args, strict=False)):
        kind, fixed, divisible = _argument(value)
        signature[name] = kind
        if kind == "constexpr":
            constexprs[name] = fixed
        if divisible:
            attributes[(index,)] = [["tt.divisibility", 16]]
    for name in kernel.arg_names[len(launched.args) :]:
        signature[name] = "constexpr"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(compiled: Any, capability: int) -> Resources:
    """Assemble compiled code once more, verbosely, and return what it takes."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = compiled.asm["ptx"]
    found = re.search(r"\.target (\w+)", ptx)
    assert found is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={found.group(1)}"]
        log = subprocess.run(
            [*command, file.name, "-o", "/dev/null"], capture_output=True, text=True, check=True
        ).stderr

    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        assert match is not None, log
        return int(match.group(1))

    return Resources(
        registers=number(r"Used (\d+) reg"),
        spill_bytes=number(r"(\d+) bytes spill stores"),
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        uses_wgmma="wgmma" in ptx,
    )
