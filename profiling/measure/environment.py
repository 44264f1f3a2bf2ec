"""Where a measurement was made: device, versions, revision, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

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
        revision = _git(root, "rev-parse", "--short", "HEAD")
        paths = ("lit_probattn", "profiling")
        status = _git(root.parent, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("+" if status else "")


def _git(folder: Path, *arguments: str) -> str:
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
