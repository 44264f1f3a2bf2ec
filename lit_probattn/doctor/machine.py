"""Versions, devices, free space."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from lit_probattn.doctor.data import folders
from lit_probattn.doctor.findings import Finding, size
from lit_probattn.records.provenance import hardware
from lit_probattn.training.memory import available_bytes

PACKAGE = "lit-probattn"
# Below so much free space, checkpoints and caches of the papers' tasks do not fit.
LEAST_FREE_BYTES = 1 << 30


def check_versions() -> Iterator[Finding]:
    """Python and every package against what is required."""
    where = "Versions"
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] < (3, 15)
    wanted = "" if good else "; Python 3.11 to 3.14 is needed"
    yield Finding(where, "python", "ok" if good else "problem", f"{version}{wanted}")
    try:
        requirements = [Requirement(text) for text in metadata.requires(PACKAGE) or []]
    except metadata.PackageNotFoundError:
        yield Finding(where, PACKAGE, "problem", "not installed: pip install -e .")
        return
    for need in requirements:
        try:
            found = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            text = f"not installed; {need.specifier} is needed"
            yield Finding(where, need.name, "note" if need.marker else "problem", text)
            continue
        fits = need.specifier.contains(found, prereleases=True)
        text = found if fits else f"{found} does not fit {need.specifier}"
        yield Finding(where, need.name, "ok" if fits else "problem", text)


def check_devices() -> Iterator[Finding]:
    """Processor, memory, GPUs; a product on each GPU."""
    where = "Devices"
    facts = hardware()
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    text = f"{facts['processor']}, {facts['num_cores']} cores, OMP_NUM_THREADS {threads}"
    yield Finding(where, "cpu", "ok", text)
    free = available_bytes(torch.device("cpu"))
    total = facts["memory_bytes"]
    if free is not None and total is not None:
        yield Finding(where, "memory", "ok", f"{size(free)} free of {size(total)}")
    if not torch.cuda.is_available():
        seen = len(facts["gpus"])
        if seen:
            what = f"{seen} GPUs are there, but PyTorch {torch.__version__} cannot use them: check "
            yield Finding(where, "gpu", "problem", f"{what}the driver and CUDA_VISIBLE_DEVICES")
        else:
            yield Finding(where, "gpu", "note", "none: runs go to the CPU")
        return
    for index in range(torch.cuda.device_count()):
        yield _try_gpu(index)


def _try_gpu(index: int) -> Finding:
    device = torch.device("cuda", index)
    facts = torch.cuda.get_device_properties(device)
    name = f"cuda:{index}"
    try:
        ones = torch.ones(64, 64, device=device)
        right = bool((ones @ ones == 64).all())
        free = torch.cuda.mem_get_info(device)[0]
    except RuntimeError as error:
        return Finding("Devices", name, "problem", f"{facts.name}: {str(error).splitlines()[0]}")
    text = f"{facts.name}, {size(free)} free of {size(facts.total_memory)}, CUDA "
    text += f"{torch.version.cuda}, capability {facts.major}.{facts.minor}"
    return Finding("Devices", name, "ok" if right else "problem", text)


def check_space(data_dir: str | None, cache_dir: str | None, root: str) -> Iterator[Finding]:
    """Folders that a run writes to: may it, and how much fits."""
    places = {"runs": Path(root), "caches": folders(data_dir, cache_dir)[1]}
    for name, folder in {**places, "temporary files": Path(tempfile.gettempdir())}.items():
        yield _try_folder(name, folder)


def _try_folder(name: str, folder: Path) -> Finding:
    above = folder.absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        what = "is not a folder" if not above.is_dir() else "cannot be written to"
        return Finding("Space", name, "problem", f"{folder}: {above} {what}; choose another one")
    free = shutil.disk_usage(above).free
    text = f"{size(free)} free at {folder}"
    if free < LEAST_FREE_BYTES:
        return Finding("Space", name, "problem", f"{text}: free some, or choose another folder")
    return Finding("Space", name, "ok", text)
