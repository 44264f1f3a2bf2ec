"""Where a result was made: revision, command, versions, hardware; files that are written whole."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "triton", "fvcore", "lit-probattn")


@cache
def versions() -> str:
    """Return versions of Python and the packages that decide a result, in one line."""
    found = [f"python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


@cache
def git_revision() -> str:
    """Return the short revision of this package's checkout, `+` if changed, or `unknown`."""
    given = os.environ.get("PROFILING_REVISION")  # a worker reports the sweep's own
    if given:
        return given
    root = Path(__file__).parents[1]
    try:
        revision = _git_output(root, "rev-parse", "--short", "HEAD")
        paths = ("lit_probattn", "profiling")
        status = _git_output(
            root.parent, "status", "--porcelain", "--untracked-files=no", "--", *paths
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("+" if status else "")


def _git_output(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


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
    return f"{_processor()}, {os.cpu_count()} logical cores, {torch.get_num_threads()} threads"


@cache
def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def command_line() -> str:
    """Return the command as one would type it, without machine paths."""
    given = os.environ.get("PROFILING_COMMAND")  # a worker reports the sweep's own
    if given:
        return given
    arguments = [a if not os.path.isabs(a) else Path(a).name for a in sys.argv[1:]]
    return " ".join(["python -m profiling", *arguments])


def replace_text(path: Path, text: str) -> None:
    """Write a file so that its name never shows half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def git_state() -> dict[str, Any] | None:
    """Revision of the code that runs, and whether tracked files were changed.

    None if the package does not lie in a git checkout that tracks it.
    """
    package = Path(__file__).parent
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    revision = _git(package, "rev-parse", "HEAD")
    status = _git(package, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if status is None else bool(status)}


def hardware() -> dict[str, Any]:
    """Processor, memory and GPUs of this machine."""
    return {
        "machine": platform.machine(),
        "processor": _processor_name(),
        "num_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
    }


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if sys.platform == "linux" and cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
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
