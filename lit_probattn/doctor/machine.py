"""Versions of packages, devices, free space."""

from __future__ import annotations

import os
import platform
import re
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
from profiling.measure.memory import available_bytes

PACKAGE = "lit-probattn"
_EXTRA = re.compile(r"extra == ['\"]([^'\"]+)")
_FOR_DEVELOPERS = ("dev", "docs")
# With less free space, checkpoints and caches of the papers' tasks do not fit.
LEAST_FREE_BYTES = 1 << 30


def check_versions() -> Iterator[Finding]:
    """Yield a line for Python and for every required package."""
    section = "Versions"
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] < (3, 15)
    text = version if good else f"{version}; Python 3.11 to 3.14 is needed"
    yield Finding(section, "python", "ok" if good else "problem", text)
    try:
        requirements = [Requirement(text) for text in metadata.requires(PACKAGE) or []]
    except metadata.PackageNotFoundError:
        yield Finding(section, PACKAGE, "problem", "not installed: pip install -e .")
        return
    told = {PACKAGE}  # an extra may ask for another one, and several for one package
    for need in requirements:
        if need.name in told:
            continue
        try:
            found = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            extra = _EXTRA.search(str(need.marker or ""))
            if extra is None:
                text = f"not installed; {need.specifier} is needed"
                yield Finding(section, need.name, "problem", text)
                told.add(need.name)
            elif extra[1] not in _FOR_DEVELOPERS:
                told.add(need.name)
                text = f"not installed; if you need it: pip install '{PACKAGE}[{extra[1]}]'"
                yield Finding(section, need.name, "note", text)
            continue
        told.add(need.name)
        fits = need.specifier.contains(found, prereleases=True)
        text = found if fits else f"{found} does not fit {need.specifier}"
        yield Finding(section, need.name, "ok" if fits else "problem", text)


def check_devices() -> Iterator[Finding]:
    """Yield a line for the processor, the memory and each GPU, on which a product is computed."""
    section = "Devices"
    facts = hardware()
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    text = f"{facts['processor']}, {facts['num_cores']} cores, OMP_NUM_THREADS {threads}"
    yield Finding(section, "cpu", "ok", text)
    free, total = available_bytes(torch.device("cpu")), facts["memory_bytes"]
    if free is not None and total is not None:
        yield Finding(section, "memory", "ok", f"{size(free)} free of {size(total)}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _try_gpu(section, index)
    elif facts["gpus"]:
        text = f"PyTorch {torch.__version__} cannot use the {len(facts['gpus'])} GPUs of this "
        text += "machine: check the driver and CUDA_VISIBLE_DEVICES"
        yield Finding(section, "gpu", "problem", text)
    else:
        yield Finding(section, "gpu", "note", "none: runs go to the CPU")


def _try_gpu(section: str, index: int) -> Finding:
    device = torch.device("cuda", index)
    facts = torch.cuda.get_device_properties(device)
    try:
        ones = torch.ones(64, 64, device=device)
        right = bool((ones @ ones == 64).all())
        free = torch.cuda.mem_get_info(device)[0]
    except RuntimeError as error:
        text = f"{facts.name}: {str(error).splitlines()[0]}"
        return Finding(section, f"cuda:{index}", "problem", text)
    text = f"{facts.name}, {size(free)} free of {size(facts.total_memory)}, CUDA "
    text += f"{torch.version.cuda}, capability {facts.major}.{facts.minor}"
    text += "" if right else ": a product of matrices is wrong; do not use this GPU"
    return Finding(section, f"cuda:{index}", "ok" if right else "problem", text)


def check_space(data_dir: str | None, cache_dir: str | None, root: str) -> Iterator[Finding]:
    """Yield a line for each folder that a run writes to: is it writable, and how much fits."""
    caches = folders(data_dir, cache_dir)[1]
    temporary = Path(tempfile.gettempdir())
    places = {"runs": Path(root), "caches": caches, "temporary files": temporary}
    for name, folder in places.items():
        above = next(
            path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
        )
        if not above.is_dir() or not os.access(above, os.W_OK):
            what = "is not a folder" if not above.is_dir() else "cannot be written to"
            text, good = f"{folder}: {above} {what}; choose another one", False
        else:
            free = shutil.disk_usage(above).free
            text, good = f"{size(free)} free at {folder}", free >= LEAST_FREE_BYTES
            text += "" if good else ": free some, or choose another folder"
        yield Finding("Space", name, "ok" if good else "problem", text)
