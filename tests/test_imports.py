"""Who may import whom, and that the package imports without optional parts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("lit_probattn", "datamodules", "profiling")
# Commands of lit_probattn that bring the three packages together.
COMMANDS = (
    *("quickstart.py", "doctor/", "convert.py", "reproduce.py", "reproduce/"),
    *("uea_benchmark/", "out_of_memory.py"),
)
# Single-device code: knows no rank, no strategy.
SINGLE_DEVICE = ("attention/", "kernels/", "transformer.py", "embeddings.py", "heads.py")


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports anywhere, by full name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def breaches(package: str, forbidden: tuple[str, ...], skip: tuple[str, ...] = ()) -> list[str]:
    result = []
    for path in files(package):
        relative = str(path.relative_to(ROOT / package))
        if relative.startswith(skip) if skip else False:
            continue
        bad = {m for m in imported(path) if m.split(".")[0] in forbidden}
        result += [f"{package}/{relative} imports {m}" for m in sorted(bad)]
    return result


def test_model_code_imports_neither_data_nor_profiling():
    assert breaches("lit_probattn", ("datamodules", "profiling"), COMMANDS) == []


def test_data_code_knows_no_model():
    assert breaches("datamodules", ("lit_probattn", "profiling")) == []


def test_attention_and_layers_are_single_device_code():
    bad = []
    for path in files("lit_probattn"):
        relative = str(path.relative_to(ROOT / "lit_probattn"))
        if relative.startswith(SINGLE_DEVICE):
            modules = imported(path)
            bad += [
                f"{relative} imports {m}"
                for m in modules
                if m.startswith(("torch.distributed", "lightning", "lit_probattn.tasks"))
            ]
    assert bad == []


@pytest.mark.parametrize("blocked", ["triton", "aeon", "entmax", "tokenizers", "fvcore"])
def test_package_imports_and_attends_without(blocked):
    """A fresh interpreter in which the optional package cannot be found."""
    code = f"""
import sys
sys.modules[{blocked!r}] = None
import torch, datamodules
from lit_probattn.attention import MGKAttention
layer = MGKAttention(8, 4, 2)
print(tuple(layer(torch.zeros(1, 3, 8)).shape))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "(1, 3, 8)", done.stderr


def test_kernels_are_imported_lazily():
    code = "import sys, lit_probattn.attention as a; print('triton' in sys.modules)"
    code += "; print([m for m in sys.modules if m.startswith('lit_probattn.kernels')])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[1] == "[]"


def test_every_file_is_short_or_says_why():
    """Over 300 lines needs a reason in the first lines."""
    long = []
    for package in (*PACKAGES, "tests"):
        for path in files(package):
            lines = path.read_text(encoding="utf-8").splitlines()
            if len(lines) > 300 and not any("Over 300 lines" in line for line in lines[:4]):
                long.append(f"{path.relative_to(ROOT)}: {len(lines)}")
    assert long == []
