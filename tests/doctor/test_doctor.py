"""The doctor's report: what is there, what is missing, what will stop a run."""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata

import pytest
import torch

from datamodules.own_data import KINDS
from lit_probattn import attention
from lit_probattn.doctor import data, machine, reach
from lit_probattn.doctor.__main__ import main
from lit_probattn.kernels.cpu.selftest import failure
from tests.datamodules.lra.files import write_pathfinder
from tests.datamodules.text import made as made_text
from tests.support.helpers import LOOPBACK, listening_on


def findings(capsys, *more, expected=0):
    """The JSON form, by section and name; without contact between processes."""
    assert main(["--json", "--timeout", "0", *more]) == expected
    rows = json.loads(capsys.readouterr().out)
    assert all(set(row) == {"section", "name", "status", "text"} for row in rows)
    return {(row["section"], row["name"]): (row["status"], row["text"]) for row in rows}


def test_report_names_what_is_there(tmp_path, capsys):
    made_text.write(tmp_path / "wikitext-103")
    write_pathfinder(tmp_path)
    found = findings(capsys, "--data_dir", str(tmp_path), "--root", str(tmp_path / "runs"))
    assert found["Versions", "torch"] == ("ok", metadata.version("torch"))
    assert found["Data", "wikitext103"] == ("ok", "found wikitext-103")
    assert found["Data", "pathfinder"] == ("ok", "found 32 hard")
    assert found["Data", "listops"][0] == "ok"
    status, text = found["Data", "text"]
    assert status == "note"
    assert f"expected the folder {tmp_path}/aclImdb" in text
    assert "GiB free" in found["Space", "runs"][1]
    why_not = failure()
    library = why_not is None
    variants = [name for name in attention.__all__ if name.endswith("Attention")]
    for name in variants:
        if name != "Attention":
            status, text = found["Backends that `auto` chooses", f"{name} on cpu"]
            assert status == "ok"
            cls = attention.variants()[name]
            served = cls(8, 2).core.backends
            wanted = ["native", "blockwise"] if library else ["blockwise"]
            blocks = next(backend for backend in wanted if backend in served)
            assert f"training, 4096 tokens, dropout: {blocks}" in text
    softmax = found["Backends that `auto` chooses", "SoftmaxAttention on cpu"][1]
    assert "evaluation, 4096 tokens: sdpa" in softmax
    short = "native" if library else "reference"
    assert f"training, 128 tokens, dropout: {short}" in softmax
    status, text = found["Kernels", "C library of the CPU"]
    assert (status, text) == (("ok", "passes its self-test") if library else ("note", why_not))


def test_what_is_missing_names_its_extra(monkeypatch):
    """Of a wheel: what only developers need is not missed, and nothing is told twice."""
    wanted = ["torch>=2.11", 'wandb>=0.19; extra == "wandb"', 'ruff>=0.8; extra == "dev"']
    wanted += ['numpy>=9; extra == "dev"', 'numpy>=9; extra == "text"', "none>=1"]
    wanted += ['lit-probattn[text]; extra == "subwords"', 'shtab>=1.7; extra == "dev"']
    wanted += ['shtab>=1.7; extra == "completion"']
    here = {"torch": "2.15.0", "numpy": "2.3.5", "lit-probattn": "0.1.0"}

    def version(name):
        if name not in here:
            raise metadata.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(machine.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(machine.metadata, "version", version)
    _, *found = [(f.name, f.status, f.text) for f in machine.check_versions()]
    assert found == [
        ("torch", "ok", "2.15.0"),
        ("wandb", "note", "not installed; if you need it: pip install 'lit-probattn[wandb]'"),
        ("numpy", "problem", "2.3.5 does not fit >=9"),
        ("none", "problem", "not installed; >=1 is needed"),
        ("shtab", "note", "not installed; if you need it: pip install 'lit-probattn[completion]'"),
    ]


def test_caches_are_found(tmp_path, capsys):
    sizes = ["--min_length", "5", "--max_length", "20", "--num_train", "9", "--num_val", "1"]
    from datamodules.__main__ import main as prepare

    place = ["--data_dir", str(tmp_path), "--cache_dir", str(tmp_path / "c"), "--num_test", "1"]
    assert prepare(["prepare", "listops", *sizes, *place]) == 0
    capsys.readouterr()
    folders = ("--data_dir", str(tmp_path), "--cache_dir", str(tmp_path / "c"))
    found = findings(capsys, *folders, "--root", str(tmp_path))
    assert "1 caches" in found["Data", "listops"][1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu(capsys):
    found = findings(capsys)
    assert found["Devices", "gpu"] == ("note", "none: runs go to the CPU")
    assert found["Kernels", "softmax"][0] == "note"
    assert "cannot run on the CPU" in found["Kernels", "softmax"][1]


def test_problems_set_the_exit_status(tmp_path, capsys, monkeypatch):
    (tmp_path / "runs").touch()
    version = metadata.version
    monkeypatch.setattr(
        machine.metadata, "version", lambda n: "0.1" if n == "lightning" else version(n)
    )
    found = findings(capsys, "--root", str(tmp_path / "runs" / "deeper"), expected=1)
    assert found["Versions", "lightning"] == ("problem", "0.1 does not fit >=2.6.6")
    status, text = found["Space", "runs"]
    assert status == "problem"
    assert "is not a folder" in text


def test_a_full_disk_is_a_problem(tmp_path, monkeypatch):
    usage = machine.shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    (first, *_) = machine.check_space(None, None, str(tmp_path))
    assert first.status == "problem"
    assert "free some" in first.text


@pytest.mark.slow
def test_processes_reach_each_other():
    gloo, nccl = reach.check_contact(100)
    assert gloo.status == "ok", gloo.text
    assert gloo.text.startswith("2 processes agree")
    assert nccl.status == ("ok" if torch.cuda.is_available() else "note")


def test_the_processes_meet_on_loopback(monkeypatch):
    seen, port = [], reach.find_free_network_port()
    add = reach.dist.all_reduce
    monkeypatch.setattr(
        reach.dist, "all_reduce", lambda x: (seen.extend(listening_on(port)), add(x))
    )
    assert reach.main(["gloo", "0", "1", str(port), "20"]) == 0
    assert seen == [LOOPBACK]


def test_contact_that_never_comes_is_bounded_in_time(tmp_path, monkeypatch):
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 100\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    start = time.monotonic()
    gloo, _ = reach.check_contact(0.5)
    assert time.monotonic() - start < 10
    assert gloo.status == "problem"
    assert gloo.text.startswith("no answer within")
    assert "GLOO_SOCKET_IFNAME" in gloo.text


def test_readable_form(tmp_path, capsys):
    main(["--timeout", "0", "--data_dir", str(tmp_path), "--root", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert "Versions" in lines
    assert lines[-1] == "0 problems"
    assert any(line.startswith("  note    text: ") for line in lines)


def test_every_data_set_with_files_is_looked_for():
    own = {*KINDS.values()}  # lie where their user says
    made = {"synthetic", "toy_trajectories", "toy_translation", "masked_text", "pretraining_text"}
    assert set(data._LOOK) == set(data.REGISTRY) - made - own
