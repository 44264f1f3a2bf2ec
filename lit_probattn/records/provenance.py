"""Where a result was made: revision, command, versions, hardware; files that are written whole."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# Packages that decide a measured cost, and those that decide a training.
COST_PACKAGES = ("torch", "triton", "fvcore", "lit-probattn")
RUN_PACKAGES = (
    "lit-probattn",
    "torch",
    "lightning",
    "triton",
    "numpy",
    "torchmetrics",
    "jsonargparse",
)

_PACKAGE = Path(__file__).parents[1]


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Return the installed version of each package; None for one that is not there."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def versions() -> str:
    """Return versions of Python and the packages that decide a cost, in one line."""
    found = package_versions(COST_PACKAGES).items()
    known = [f"{name} {number}" for name, number in found if number is not None]
    return ", ".join([f"python {platform.python_version()}", *known])


def git_state() -> dict[str, Any] | None:
    """Revision of the code that runs, and whether tracked files were changed.

    None if the package does not lie in a git checkout that tracks it.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    revision = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if status is None else bool(status)}


@cache
def git_revision() -> str:
    """Return the short revision of this package's checkout, `+` if changed, or `unknown`.

    Changed means the code whose cost is measured: this package and `profiling`.
    """
    given = os.environ.get("PROFILING_REVISION")  # a worker reports the sweep's own
    if given:
        return given
    revision = _git("rev-parse", "--short", "HEAD")
    code = (".", "../profiling")
    status = _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    if revision is None or status is None:
        return "unknown"
    return revision + ("+" if status else "")


def _git(*arguments: str) -> str | None:
    """What git says in the package's folder; None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command_line() -> str:
    """Return the command as one would type it, without machine paths."""
    given = os.environ.get("PROFILING_COMMAND")  # a worker reports the sweep's own
    if given:
        return given
    arguments = [a if not os.path.isabs(a) else Path(a).name for a in sys.argv[1:]]
    return " ".join(["python -m profiling", *arguments])


def device_name(device: str) -> str:
    """Return what a device is: the GPU's name, or processor, cores and threads used.

    Raises:
        RuntimeError: a CUDA device that is not there.
    """
    kind = torch.device(device)
    if kind.type == "cuda":
        return torch.cuda.get_device_name(kind)
    if kind.type == "meta":
        return "meta tensors"
    processor = _processor() or platform.machine()
    return f"{processor}, {os.cpu_count()} logical cores, {torch.get_num_threads()} threads"


def hardware() -> dict[str, Any]:
    """Processor, memory and GPUs of this machine."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
    }


@cache
def _processor() -> str:
    """Name of the processor; may be empty."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gpus() -> list[dict[str, Any]]:
    """Name, memory and driver of the GPUs, without starting CUDA in this process."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver: no GPU
        return []
    driver = pynvml.nvmlSystemGetDriverVersion()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    gpus = [
        {
            "name": pynvml.nvmlDeviceGetName(handle),
            "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
            "driver": driver,
        }
        for handle in handles
    ]
    pynvml.nvmlShutdown()
    return gpus


def rank() -> str:
    """Rank of this process, as whoever started it says."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
    return next((os.environ[name] for name in names if os.environ.get(name)), "0")


def is_first_rank() -> bool:
    """Whether this is rank 0, or a process alone."""
    return rank() == "0"


def replace_text(path: Path, text: str) -> None:
    """Write a text atomically: a temporary file, then a rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
