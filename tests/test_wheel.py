"""The wheel alone, in an environment without the checkout: commands find their configurations."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import CONFIGS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SOURCES = ("lit_probattn", "datamodules", "profiling", "configs")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
NAMES = ("--task", "tiny/lra_listops", "--attention", "smgk", "--trainer", "cpu_debug")
QUIET = ("--trainer.enable_progress_bar", "false")
RUN = "runs/lra_listops_tiny-smgk/0/config.yaml"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources, without a network."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy2(ROOT / name, folder / name)
    build = ("wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist", ".")
    subprocess.run([sys.executable, "-m", "pip", *build], cwd=folder, env=clean(), check=True)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def shell(wheel, tmp_path_factory):
    """Runs a program of an environment that has the wheel, in an empty folder; returns its text."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    install = ("install", "-q", "--no-deps", "--no-index", str(wheel))
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    subprocess.run([*pip, *install], env=clean(), check=True)
    # The other packages are ours; what installed them (an editable checkout, too) is not read.
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = folder / "empty"
    work.mkdir()

    def run(program: str, *words: str, status: int = 0) -> str:
        given = {"LIT_PROBATTN_CACHE": str(folder / "cache"), "COLUMNS": "200"}
        done = subprocess.run(
            [str(folder / "venv/bin" / program), *words],
            **{"cwd": work, "env": {**clean(), **given}, "capture_output": True, "text": True},
            check=False,
        )
        assert done.returncode == status, (words, done.stdout[-2000:], done.stderr[-4000:])
        return done.stdout + done.stderr

    return run


def clean() -> dict[str, str]:
    """The environment without what leads to the checkout."""
    dropped = ("PYTHONPATH", "LIT_PROBATTN_", "PYTEST_")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def test_the_wheel_holds_every_configuration_once(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        packed = {n: archive.read(n) for n in names if n.startswith("lit_probattn/_configs/")}
    assert len(names) == len(set(names))
    assert not [name for name in names if name.startswith("configs/")]
    shipped = [path for path in CONFIGS.rglob("*") if path.is_file()]
    assert "lit_probattn/_configs/tasks/tiny.bundle.yaml" in packed
    assert packed == {
        f"lit_probattn/_configs/{path.relative_to(CONFIGS).as_posix()}": path.read_bytes()
        for path in shipped
    }


def test_the_package_is_that_of_the_wheel(shell):
    code = "import lit_probattn, profiling; print(lit_probattn.__file__, profiling.__file__)"
    found = shell("python", "-c", code).split()
    assert len(found) == 2
    assert all("/venv/lib/" in place for place in found)
    assert str(ROOT) not in " ".join(found)


def test_fit_test_and_predict(shell):
    assert "run folder: runs/lra_listops_tiny-smgk/0" in shell(
        "lit-probattn", "fit", *NAMES, *QUIET
    )
    evaluate = ("--config", RUN, "--ckpt_path", "best", *QUIET)
    assert "results: " in shell("lit-probattn", "test", *evaluate)
    assert "predictions: " in shell("lit-probattn", "predict", *evaluate)
    text = shell("lit-probattn", "fit", "--task", "lra_listop", "--attention", "smgk", status=2)
    assert "did you mean 'lra_listops'" in text


PATHS = ("--config", "configs/tasks/tiny/lra_listops.yaml", "--config=configs/attention/fish.yaml")
ARCHIVE = ("--archives", "BasicMotions", "--source", "bundled")
UEA = ("python", "-m", "lit_probattn.reproduce.uea", *ARCHIVE)
COMMANDS = [
    ("lit-probattn", "fit", *PATHS, "--print_config"),
    ("python", "-m", "lit_probattn.reproduce", "--list"),
    (
        "python",
        "-m",
        "lit_probattn.reproduce",
        "mgk_table1",
        "--only",
        "listops",
        "smgk_4",
        "--dry-run",
    ),
    ("python", "-m", "lit_probattn.reproduce", "mgk_table7", "--dry-run"),
    (*UEA, "--variants", "smgk", "--dry-run"),
    ("python", "-m", "profiling", "sweep", "--config", "quick", "--dry-run"),
    (
        "python",
        "-m",
        "profiling",
        "sweep",
        "--config",
        "configs/profiling/lm_cuda.yaml",
        "--dry-run",
    ),
    ("python", "-m", "lit_probattn.analysis"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_find_their_configurations(words, shell):
    assert shell(*words).strip()
