"""Run folders that an earlier layout of the package wrote: every command still serves them.

`old_runs.tar.xz` holds eight runs of four steps with their tiny texts and pictures, made at
revision f5f327e, and `old_runs.json` what that revision made of them. Names of weights and options
and the places of classes have changed since; numbers have not. Sums and losses are of one machine,
so they are compared with a tolerance; weights that are only read are compared by their hash.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import re
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lit_probattn.analysis.__main__ import main as analyse
from lit_probattn.cli.app import main
from lit_probattn.convert.to_mgk import main as convert
from lit_probattn.convert.to_safetensors import main as export
from lit_probattn.training.checkpoints import list_checkpoints, load_checkpoint
from lit_probattn.training.trained import open_trained
from tests.support.paths import CONFIGS
from tests.support.slow import mostly_slow

HERE = Path(__file__).parent
EXPECTED: dict[str, Any] = json.loads((HERE / "old_runs.json").read_text())
# Those of variants that there are.
RUNS: dict[str, Any] = {
    name: row
    for name, row in EXPECTED["runs"].items()
    if (CONFIGS / "attention" / f"{row['attention']}.yaml").is_file()
}
STEPS, MORE = EXPECTED["steps"], EXPECTED["more"]
CPU = ("--trainer.accelerator", "cpu", "--trainer.devices", "1")
QUIET = (*CPU, "--trainer.enable_progress_bar", "false")


@dataclass(frozen=True)
class OldRun:
    """A run folder in the current folder, and what it must give.

    Args:
        folder: of the run.
        expected: what the old revision made of it.
    """

    folder: Path
    expected: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        """The only file, of the last step."""
        return self.folder / "checkpoints" / f"step-{STEPS:08d}.ckpt"

    @property
    def files(self) -> tuple[str, ...]:
        """Flags that name the configuration that the run saved."""
        return ("--config", str(self.folder / "config.yaml"))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(HERE / "old_runs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "old_runs"


@pytest.fixture(params=sorted(RUNS))
def run(request, unpacked, tmp_path, monkeypatch) -> OldRun:
    """A copy of the run's folder; data and their caches are shared, as they are only read."""
    expected = RUNS[request.param]
    shutil.copytree(unpacked / expected["folder"], tmp_path / expected["folder"])
    (tmp_path / "data").symlink_to(unpacked / "data", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return OldRun(Path(expected["folder"]), expected)


def close(value: Any, relative: float = 1e-5) -> Any:
    return pytest.approx(value, rel=relative, abs=1e-7)


def hash_of(tensors: Iterable[Tensor]) -> str:
    """Of the sorted hashes of all tensors, whatever they are called and in whichever order."""
    return hashlib.sha256("\n".join(sorted(map(_hash, tensors))).encode()).hexdigest()[:16]


def _hash(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def abs_sum(tensors: Iterable[Tensor]) -> float:
    return math.fsum(float(tensor.double().abs().sum()) for tensor in tensors)


def metrics(folder: Path) -> dict[str, float]:
    (path,) = folder.glob("test-*.json")
    return {k: v for k, v in json.loads(path.read_text()).items() if k.startswith("test/")}


def losses(folder: Path) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(float(row["step"])) > STEPS]
    return [float(row["train/loss"]) for row in rows if row["train/loss"]]


def test_the_archive_has_the_runs_that_the_table_names(unpacked):
    folders = {str(path.parent.relative_to(unpacked)) for path in unpacked.rglob("config.yaml")}
    assert folders == {row["folder"] for row in EXPECTED["runs"].values()}
    assert len(folders) == 8


def test_weights_are_all_loaded_and_exported(run, tmp_path, capsys):
    """A layer's own names and the order may change; the values may not."""
    expected = run.expected["checkpoint"]
    stored = load_checkpoint(run.checkpoint)["state_dict"]
    options = argparse.Namespace(checkpoint=run.checkpoint, config=None, data=[], device="cpu")
    task = open_trained(options).task
    assert sum(p.numel() for p in task.parameters()) == run.expected["parameters"]
    assert len(task.state_dict()) == expected["tensors"]
    assert hash_of(task.state_dict().values()) == expected["weights"]
    for name, parameter in task.state_dict().items():
        assert torch.equal(parameter, stored[name.replace(".core.", ".")]), name

    assert export([str(run.checkpoint), str(tmp_path / "out.safetensors")]) == 0
    exported = load_file(tmp_path / "out.safetensors")
    assert hash_of(exported.values()) == hash_of(task.model.state_dict().values())
    task.model.load_state_dict(exported)


def test_test_metrics(run):
    assert main(["test", *run.files, "--ckpt_path", "last", *QUIET]) == 0
    assert metrics(run.folder) == close(run.expected["test"])


def test_training_goes_on(run):
    """Moments of another parameter, or none, would change the very next losses."""
    steps = ("--trainer.max_steps", str(STEPS + MORE))
    assert main(["fit", *run.files, "--ckpt_path", "last", *QUIET, *steps]) == 0
    assert losses(run.folder) == close(run.expected["losses"])
    after = run.expected["after"]
    newest = load_checkpoint(list_checkpoints(run.folder / "checkpoints", "step")[0])
    assert newest["global_step"] == after["step"] == STEPS + MORE
    assert abs_sum(newest["state_dict"].values()) == close(float(after["weights_abs_sum"]))
    (optimizer,) = newest["optimizer_states"]
    for key, value in after["moments_abs_sum"].items():
        assert abs_sum(state[key] for state in optimizer["state"].values()) == close(float(value))


STUDIED = {"imagenet_hard_gfish", "text_mgk_soft_e", "wikitext_gfish"} & set(RUNS)


@pytest.mark.parametrize("run", mostly_slow(sorted(RUNS), STUDIED), indirect=True)
def test_a_study(run, tmp_path):
    out = tmp_path / "out"
    study, *more = run.expected["study"]["arguments"]
    where = ["--checkpoint", str(run.checkpoint), "--out", str(out), "--device", "cpu"]
    assert analyse([study, *where, *more]) == 0
    found = {}
    for path in out.rglob("*.csv"):
        frame = pd.read_csv(path).drop(columns="seconds", errors="ignore")
        sums = frame.select_dtypes("number").sum().to_dict()
        found[str(path.relative_to(out))] = {"rows": len(frame), "sums": sums}
    tables = run.expected["study"]["tables"]
    assert found.keys() == tables.keys()
    for name, table in tables.items():
        assert found[name]["rows"] == table["rows"]
        assert found[name]["sums"] == close(table["sums"], 1e-4)


def test_convert_with_data(run, tmp_path, capsys):
    """One of the eight can be: the only plain softmax attention, which predicts hidden words."""
    command = [str(run.checkpoint), str(tmp_path / "out.ckpt"), "--num_batches", "1"]
    if run.expected.get("converted") is not None:
        assert convert(command) == 0
        assert "model: loss " in capsys.readouterr().out
        return
    assert convert(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"error: (.* is not plain softmax attention: .*|.*: every head has a bias of its own .*)",
        line,
    )


def test_convert(run, tmp_path, capsys):
    out = tmp_path / "converted.ckpt"
    flags = [str(run.checkpoint), str(out), "--weights_only", "--head_dim", "4"]
    expected = run.expected.get("converted")
    if expected is None:  # only plain softmax attention can be converted
        assert convert(flags) == 2
        assert "is not plain softmax attention" in capsys.readouterr().err
        assert not out.exists()
        return
    assert convert(flags) == 0
    assert out.with_suffix(".yaml").read_text() == expected["attention"]
    state = load_checkpoint(out)["state_dict"]
    assert len(state) == expected["tensors"]
    assert abs_sum(state.values()) == close(float(expected["weights_abs_sum"]))
    files = [*run.files, "--config", str(out.with_suffix(".yaml"))]
    assert main(["test", *files, "--ckpt_path", str(out), *QUIET]) == 0
    assert metrics(tmp_path) == close(expected["test"])
