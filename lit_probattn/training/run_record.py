"""`versions.json` and `config.yaml` of a run folder: what is needed to run it again."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("lit-probattn", "torch", "lightning", "triton", "numpy", "torchmetrics", "jsonargparse")
FILE_NAME = "versions.json"


def write_record(
    folder: Path,
    *,
    config_text: str,
    seed: int,
    arguments: list[str],
    checkpoint: Path | None,
    job: str | None = None,
) -> None:
    """Write `config.yaml`, and add one start to `versions.json`.

    Args:
        folder: the run folder.
        config_text: the resolved configuration.
        seed: the run's seed.
        arguments: command line after `python -m lit_probattn`.
        checkpoint: what this start continues from.
        job: what a cluster calls the job, the same when it starts it again.
    """
    start = {
        "started": datetime.now(UTC).isoformat(timespec="microseconds"),
        "command": shlex.join(["python", "-m", "lit_probattn", *arguments]),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "job": job,
        "seed": seed,
        "python": platform.python_version(),
        "packages": {name: _package_version(name) for name in PACKAGES},
        "git": git_state(),
        "hardware": hardware(),
    }
    starts = [*read_starts(folder), start]
    replace_text(folder / FILE_NAME, json.dumps({"starts": starts}, indent=2) + "\n")
    replace_text(folder / "config.yaml", config_text)


def add_to_last_start(folder: Path, **values: Any) -> None:
    """Add facts that are known only while the run goes on."""
    starts = read_starts(folder)
    if starts:
        starts[-1].update(values)
        replace_text(folder / FILE_NAME, json.dumps({"starts": starts}, indent=2) + "\n")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The recorded starts of a run, oldest first."""
    path = folder / FILE_NAME
    if not path.is_file():
        return []
    starts: list[dict[str, Any]] = json.loads(path.read_text())["starts"]
    return starts


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
