"""The command: predictions, lists, what is refused and why; one real run, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from lit_probattn.compare import predict as prediction
from lit_probattn.compare.cells import parse_settings
from lit_probattn.compare.predict import (
    build_task,
    make_inputs,
    predict,
    set_backends,
    training_step,
)
from lit_probattn.reproduce import __main__ as command
from lit_probattn.reproduce.__main__ import main
from profiling.measure.memory import cpu_peak_bytes
from tests.compare.tiny import tiny_cells, write_tables
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def places(tmp_path):
    tables = write_tables(tmp_path / "tables")
    return ["--tables", str(tables), "--runs", str(tmp_path / "runs"), "--data_dir", str(tmp_path)]


def test_dry_run_predicts_and_names_what_is_missing(places, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "start_seconds", lambda: 5.0)
    assert main(["tiny", *places, "--dry-run", "--commands"]) == 1
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith(("| listops", "| retrieval"))]
    assert len(rows) == 3
    assert all("| 2 of 2 |" in row and "measured: " in row for row in rows)
    assert [row.split("|")[10].strip() for row in rows] == ["present", "present", "missing"]
    assert "missing: retrieval: " in printed
    assert "new_aan_pairs.train.tsv" in printed
    assert printed.count("python -m lit_probattn fit --config configs/tasks/") == 6
    assert not (tmp_path / "runs").exists()


def test_time_by_operations(tmp_path, capsys, places):
    _, cells = tiny_cells(tmp_path, ["listops", "softmax_2"])
    found = predict(cells[0], tflops=1.0)
    per_sample = 6 * found.macs / 1e12
    samples = 16 * 8 + (2 * 40 + 42) / 3  # 16 steps of 8; two validations of 40, a test of 42
    assert found.hours * 3600 == pytest.approx(samples * per_sample)
    assert found.basis == "FLOP model at 1 TFLOP/s"
    assert main(["tiny", *places, "--only", "listops", "--dry-run", "--tflops", "2"]) == 0
    assert "FLOP model; memory on CPU paths" in capsys.readouterr().out


def test_memory_of_a_batch(tmp_path):
    """The line through small batches meets a step of the whole batch."""
    _, cells = tiny_cells(tmp_path, ["listops", "mgk_1"])
    cell = cells[0]
    batch = cell.config["data"]["init_args"]["batch_size"]
    data = cell.data()
    task = build_task(cell, data).train()
    set_backends(task.model, batch, data.max_seq_len)
    weights = sum(p.numel() for p in task.model.parameters())
    whole = cpu_peak_bytes(training_step(task, *make_inputs(task, data, batch))) + 12 * weights
    found = prediction._MeasuredSteps(cell)
    assert found.batch == batch
    assert found.peak_bytes() == pytest.approx(whole, rel=0.05)


def test_time_of_a_cell_is_of_its_own_steps(tmp_path, monkeypatch):
    """A step of the whole batch where that is quick, else of as many samples as are; warmed up."""
    _, cells = tiny_cells(tmp_path, ["listops"])
    took, asked = {"softmax_2": 0.25, "mgk_1": 0.75}, []

    def timed(steps, *, warmup, repeats, **_):
        (batch,) = steps
        asked.append((batch, warmup, repeats))
        noise = [9.0, 1.0, 0.1, 1.0, 1.0, 9.0, 1.0][-repeats:]  # a median sees none of it
        return {batch: [took[row] * (0.5 + batch / 16) * factor for factor in noise]}

    monkeypatch.setattr(prediction, "time_sides", timed)
    monkeypatch.setattr(prediction, "start_seconds", lambda: 5.0)
    monkeypatch.setattr(prediction, "save_seconds", lambda task: 0.25)
    beside = 2 * 5.0 + 4 * 0.25  # `fit` and `test` start; four checkpoints
    evaluated = (2 * 40 + 42) / 3
    for cell in cells[:2]:
        row = cell.row.name
        found = predict(cell)
        seconds = beside + (16 + evaluated / 8) * took[row]
        assert found.hours * 3600 == pytest.approx(seconds)
        assert found.basis == f"measured: {took[row]:.3f} s per step"
    assert asked == [(2, 0, 1), (8, 1, prediction._ROUNDS)] * 2
    monkeypatch.setattr(prediction, "_STEP_SECONDS", 1.0)
    found = predict(cells[1])  # two samples take 0.469 s, so four are quick
    assert found.basis == "measured: 0.562 s per 4 samples of a step"
    per_sample = 0.5625 / 4
    assert found.hours * 3600 == pytest.approx(beside + (16 * 8 + evaluated) * per_sample)
    monkeypatch.setattr(prediction, "_STEP_SECONDS", 0.01)
    assert predict(cells[1]).basis == "measured: 0.469 s per 2 samples of a step"
    assert prediction._ROUNDS >= 5


def test_a_start_is_measured_once(monkeypatch):
    started = []
    monkeypatch.setattr(prediction.subprocess, "run", lambda *_, **__: started.append(1))
    prediction.start_seconds.cache_clear()
    assert 0.0 < prediction.start_seconds() == prediction.start_seconds()
    assert started == [1]
    prediction.start_seconds.cache_clear()


def test_the_start_that_is_measured_imports_what_a_run_does(monkeypatch):
    """Not the program's stored help, which is there at once."""
    given = []
    with monkeypatch.context() as context:
        context.setattr(prediction.subprocess, "run", lambda words, **_: given.append(words))
        prediction.start_seconds.cache_clear()
        prediction.start_seconds()
    prediction.start_seconds.cache_clear()
    program, *words = given[0]
    timed = [program, "-X", "importtime", *words]
    done = subprocess.run(timed, capture_output=True, text=True, check=True)
    assert "lightning.pytorch" in done.stderr


def test_list_names_every_table_with_its_state(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("figure" not in line.split()[0] for line in lines) == 35
    by_name = {line.split()[0]: line for line in lines}
    assert "of 165 cells finished (full protocol)" in by_name["mgk_table1"]
    assert "0 of 25 cells finished (full protocol)" in by_name["fish_table2"]
    assert "0 of 210 cells finished (full protocol)" in by_name["fish_table7"]
    assert "0 of 36 cells finished (full protocol)" in by_name["low_rank_table1"]
    assert "uea_benchmark" in by_name["fish_table6"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["low_rank_table1", "--set", "sqad:a=1"],
            "there is no task 'sqad'; did you mean 'squad'?",
        ),
        (["mgk_table1", "--start_seed", "1"], "--start_seed: no run of mgk_table1 begins with"),
        (["mgk_tabel1"], "expected a table, received 'mgk_tabel1'; did you mean 'mgk_table1'?"),
        (["mgk_table1", "--only", "listop"], "no task or row 'listop'; did you mean 'listops'?"),
        (["mgk_table1", "--shard", "3/3"], "--shard expects 0 <= i < n"),
        (["mgk_table1", "--set", "a"], "--set expects key=value, received 'a'"),
        (["mgk_table1", "--jobs", "0"], "--jobs must be at least 1, received 0"),
        (["mgk_table1", "--steps", "0"], "--steps must be at least 1, received 0"),
        (["mgk_table1", "--attempts", "0"], "--attempts must be at least 1, received 0"),
        (["mgk_table7", "--jobs", "2"], "--jobs does not apply to mgk_table7"),
        (["fish_table6", "--shortened"], "EthanolConcentration has no shortened protocol; use"),
        (["mgk_table7", "--shortened"], "--shortened does not apply to mgk_table7"),
        (["fish_table5", "--max_seq_len", "9"], "imagenet has no length that --max_seq_len"),
    ],
)
def test_wrong_usage_is_one_line(words, message, capsys):
    assert main([*words, "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_missing_parts_are_named(tmp_path, capsys):
    tables = write_tables(tmp_path / "tables")
    text = (tables / "tiny.yaml").read_text().replace("attention/mgk.yaml", "attention/none.yaml")
    (tables / "tiny.yaml").write_text(text)
    words = ["tiny", "--tables", str(tables), "--only", "listops", "--dry-run", "--tflops", "1"]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr()
    assert "missing part: configs/attention/none.yaml: its rows are left out" in printed.err
    assert "| listops | MGK" not in printed.out


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU is there")
def test_a_measured_table_takes_the_sweep_of_its_accelerator(tmp_path, capsys):
    words = ["mgk_table7", "--runs", str(tmp_path)]
    assert main([*words, "--accelerator", "gpu"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: device cuda is not available")
    assert "run mgk_table7_cuda where there is one" in told
    assert main([*words, "--report"]) == 2
    assert f"no results in {tmp_path}/profiling/mgk_table7 " in capsys.readouterr().err


def test_the_uea_table_is_run_as_the_others(monkeypatch, capsys):
    words = ["fish_table6", "--only", "Heartbeat", "gfish_4", "--seeds", "1", "--as_published"]
    made = []
    monkeypatch.setattr(command, "run", lambda table, *_, **given: made.append((table, given)))
    main([*words, "--jobs", "2"])
    ((table, given),) = made
    assert list(table.tasks) == ["Heartbeat"]
    assert table.select(["Heartbeat", "gfish_4"])[0][1].published["Heartbeat"] == {"test": 76.10}
    settings = table.tasks["Heartbeat"].settings
    assert settings["data.init_args.select_on"] == "test"
    assert settings["run.monitor"] == "val/accuracy"
    assert given["protocol"].as_published


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_told_before_any_cell(places, tmp_path, capsys):
    assert main(["tiny", *places, "--only", "listops", "--accelerator", "gpu"]) == 2
    assert "there is no GPU here: use --accelerator cpu" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.log"))


def test_settings():
    assert parse_settings(["a.b=3", "c=x=y", "d=null"]) == {"a.b": 3, "c": "x=y", "d": None}


@pytest.mark.slow
def test_real_runs_killed_and_resumed(places, tmp_path):
    """Two real cells; the command is killed in the second, and goes on."""
    more = ["--only", "listops", "--seeds", "3", "--accelerator", "cpu", "--steps", "400"]
    words = [sys.executable, "-m", "lit_probattn.reproduce", "tiny", *places, *more]
    words += ["--set", "run.checkpoint_every=5", "trainer.val_check_interval=50"]
    words += ["model.init_args.schedule_steps=400"]
    process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    cells = tmp_path / "runs/reproduce/cells"
    end = time.monotonic() + 240
    while time.monotonic() < end and not list(tmp_path.glob("runs/*mgk*/0/checkpoints/step*")):
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (first,) = cells.glob("*.json")
    before = first.read_bytes()
    again = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "[1/2] listops, Softmax, 2 heads, seed 3: finished before, not run again" in again.stdout
    assert "[2/2] listops, MGK, 1 head, seed 3: goes on from step " in again.stdout
    assert first.read_bytes() == before
    results = [json.loads(path.read_text()) for path in cells.glob("*.json")]
    assert sorted(result["num_starts"] for result in results) == [1, 2]
    report = (tmp_path / "runs/reproduce/reports/tiny/report.md").read_text()
    assert "2 of 2 cells are finished." in report
