"""Provenance of a result: revision, command, versions, hardware."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from lit_probattn.base.processes import capture

# Packages that affect a measured cost, and those that affect training.
COST_PACKAGES = ("torch", "triton", "fvcore", "lit-probattn")
RUN_PACKAGES = (
    *("lit-probattn", "torch", "lightning", "triton", "numpy"),
    *("torchmetrics", "jsonargparse"),
)

_PACKAGE = Path(__file__).parents[1]


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Return the installed version of each package; None if it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in found:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@cache
def versions(packages: tuple[str, ...] = COST_PACKAGES) -> str:
    """Return the versions of Python and of packages in one line."""
    found = {"python": platform.python_version(), **package_versions(packages)}
    return ", ".join(f"{name} {number}" for name, number in found.items() if number is not None)


def git_state(*paths: str) -> dict[str, Any] | None:
    """Return the revision of the running code, and whether tracked files have changed.

    None if the package is not tracked by a git checkout. Only changes in `paths`, relative to the
    package, count; by default all.
    """
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    revision = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    return {"revision": revision, "dirty": None if status is None else bool(status)}


@cache
def git_revision() -> str:
    """Return the short revision of this package's checkout, `+` if changed, or `unknown`.

    Only changes of this package and `profiling` count, whose cost is measured.
    """
    given = os.environ.get("PROFILING_REVISION")  # set for workers of a sweep
    if given:
        return given
    state = git_state(".", "../profiling")
    if state is None or None in state.values():
        return "unknown"
    return state["revision"][:7] + ("+" if state["dirty"] else "")


def _git(*arguments: str) -> str | None:
    """Return the output of git in the package's folder; None if it fails."""
    try:
        done = capture(["git", "-C", str(_PACKAGE), *arguments], timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def command_line() -> str:
    """Return the command as typed in this folder, without absolute paths."""
    given = os.environ.get("PROFILING_COMMAND")  # set for workers of a sweep
    if given:
        return given
    return shown_command(["python", "-m", "profiling", *sys.argv[1:]])


@contextmanager
def as_command(command: str) -> Iterator[None]:
    """Set the result of `command_line`, also in child processes; "" means no command."""
    before = os.environ.get("PROFILING_COMMAND")
    if command:
        os.environ["PROFILING_COMMAND"] = command
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PROFILING_COMMAND", None)
        else:
            os.environ["PROFILING_COMMAND"] = before


def shown_command(words: Iterable[str]) -> str:
    """Return a command as typed in this folder, without absolute paths."""
    return shlex.join(map(_as_typed, words))


def _as_typed(word: str) -> str:
    """Return a path below this folder as relative, any other absolute path as its name."""
    path = Path(word)
    if path.is_absolute():
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
    label, equals, value = word.partition("=")  # LABEL=/absolute/path
    return f"{label}={_as_typed(value)}" if equals else word


def facts(command: str, device: str) -> dict[str, str]:
    """Return the provenance columns of a row: device, versions, git_revision, command."""
    made = {"device": device_name(device), "versions": versions(), "git_revision": git_revision()}
    return {**made, "command": command}


def machine() -> str:
    """Return hardware, versions and revision in one sentence."""
    return f"Machine: {place()}; {versions()}; revision {git_revision()}."


def place() -> str:
    """Return the names of the GPUs of this machine, or of its processor."""
    return ", ".join(gpu["name"] for gpu in _gpus()) or device_name("cpu")


def device_name(device: str) -> str:
    """Return the description of a device: name of the GPU, or processor, cores and threads.

    Raises:
        RuntimeError: the CUDA device is not available.
    """
    import torch

    kind = torch.device(device)
    if kind.type == "cuda":
        return torch.cuda.get_device_name(kind)
    if kind.type == "meta":
        return "meta tensors"
    processor = _processor() or platform.machine()
    return f"{processor}, {os.cpu_count()} logical cores, {torch.get_num_threads()} threads"


def hardware() -> dict[str, Any]:
    """Return the processor, memory and GPUs of this machine."""
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
    """Return the name of the processor; may be empty."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _gpus() -> list[dict[str, Any]]:
    """Return name, memory and driver of the GPUs without initialising CUDA in this process."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # library or driver is missing
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
    """Return the rank that the launcher assigned to this process."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
    return next((os.environ[name] for name in names if os.environ.get(name)), "0")


def is_first_rank() -> bool:
    """Return whether this is rank 0 or a single process."""
    return rank() == "0"
