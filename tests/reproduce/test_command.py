"""The command: predictions, lists, what is refused and why."""

from __future__ import annotations

import pytest
import torch
import yaml

from lit_probattn.compare.command import make_runs
from lit_probattn.compare.flags import Place
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.runs import Run
from lit_probattn.compare.tables import FOLDER, kinds
from lit_probattn.configs import parse_settings, read_yaml
from lit_probattn.reproduce import making
from lit_probattn.reproduce.__main__ import main
from lit_probattn.reproduce.commands import finished, trained_table
from lit_probattn.reproduce.head_size.grid import Grid
from tests.compare.tiny import finished as finished_run
from tests.compare.tiny import tiny_runs, write_tables
from tests.support.helpers import error_of


@pytest.fixture
def places(tmp_path):
    tables = write_tables(tmp_path / "tables")
    return ["--tables", str(tables), "--runs", str(tmp_path / "runs"), "--data_dir", str(tmp_path)]


def test_dry_run_says_what_would_run_and_what_is_missing(places, capsys, tmp_path):
    """Missing data are no fault of a dry run; times are said at a given rate only."""
    assert main(["tiny", *places, "--dry-run", "--commands"]) == 0
    printed = capsys.readouterr().out
    head, *rows = [line for line in printed.splitlines() if line.startswith("| ")]
    names = [part.strip() for part in head.split("|")]
    found = [dict(zip(names, row.split("|"), strict=True)) for row in rows[1:]]
    assert len(found) == 3
    assert [row["runs left"].strip() for row in found] == ["2 of 2"] * 3
    assert [row["data"].strip() for row in found] == ["present", "present", "missing"]
    assert all(int(row["memory of a step, MiB"].replace(",", "")) >= 1 for row in found)
    assert "training time" not in names
    assert "missing: retrieval: " in printed
    assert "new_aan_pairs.train.tsv" in printed
    assert printed.count("python -m lit_probattn fit --config configs/tasks/") == 6
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_a_rate_that_is_none_is_refused(rate, places):
    line = error_of(["tiny", *places, "--dry-run", "--tflops", rate], main)
    assert "error: --tflops must be above 0" in line


def test_list_names_every_table_with_its_state(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("figure" not in line.split()[0] for line in lines) == 38
    by_name = {line.split()[0]: line for line in lines}
    assert "of 165 runs finished (full protocol)" in by_name["mgk_table1"]
    assert "0 of 25 runs finished (full protocol)" in by_name["fish_table2"]
    assert "0 of 210 runs finished (full protocol)" in by_name["fish_table7"]
    assert "0 of 36 runs finished (full protocol)" in by_name["low_rank_table1"]
    assert "reproduce.uea" in by_name["fish_table6"]


def test_an_own_grid_needs_no_title(places, tmp_path, capsys):
    grid = read_yaml(FOLDER / "head_size_reduced.yaml")
    del grid["title"]
    path = tmp_path / "tables" / "own.yaml"
    path.write_text(yaml.safe_dump(grid))
    assert main(["--list", *places]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("own ")]
    assert "  own: " in line
    assert Grid.read(path).table("own", Place()).title == "own"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["low_rank_table1", "--set", "sqad:a=1"],
            "unknown task 'sqad'; did you mean 'squad'?",
        ),
        (["mgk_tabel1"], "expected a table, received 'mgk_tabel1'; did you mean 'mgk_table1'?"),
        (["mgk_table1", "--only", "listop"], "no task or row 'listop'; did you mean 'listops'?"),
        (["mgk_table1", "--shard", "3/3"], "--shard: expected 0 <= i < n"),
        (["mgk_table1", "--set", "a"], "--set: expected KEY=VALUE, received 'a'"),
        (
            ["mgk_table1", "--set", "trainer.accumulate_grad_batches=4"],
            "listops: trainer.val_check_interval counts micro-batches",
        ),
        (["mgk_table1", "--jobs", "0"], "--jobs: must be at least 1, received 0"),
        (["mgk_table1", "--steps", "0"], "--steps: must be at least 1, received 0"),
        (["mgk_table1", "--attempts", "0"], "--attempts: must be at least 1, received 0"),
        (["mgk_table7", "--jobs", "2"], "--jobs does not apply to mgk_table7"),
        (["fish_table6", "--shortened"], "EthanolConcentration has no reduced protocol; use"),
        (["mgk_table7", "--shortened"], "--shortened does not apply to mgk_table7"),
        (["fish_table5", "--max_seq_len", "9"], "imagenet does not support --max_seq_len"),
        (["mgk_figure3", "--shortened"], "--shortened does not apply to mgk_figure3"),
        (["mgk_figure3", "--only", "mgk4"], "--only does not apply to mgk_figure3"),
        *(
            (["low_rank_figure1", *flag], f"{flag[0]} does not apply to low_rank_figure1")
            for flag in (["--as_published"], ["--as_released"], ["--max_seq_len", "9"])
        ),
        (["fish_figure1", "--steps", "3"], "--steps does not apply to fish_figure1"),
    ],
)
def test_wrong_usage_is_one_line(words, message):
    assert message in error_of([*words, "--dry-run"], main)


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--report"]])
def test_a_drawing_is_said_to_be_one(more, tmp_path, capsys):
    assert main(["fish_figure1", *more, "--runs", str(tmp_path / "runs")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("fish_figure1: ")
    assert "drawing" in line
    assert not list(tmp_path.iterdir())


def test_missing_parts_are_named(tmp_path, capsys):
    tables = write_tables(tmp_path / "tables")
    text = (
        (tables / "tiny.yaml")
        .read_text(encoding="utf-8")
        .replace("attention/mgk.yaml", "attention/none.yaml")
    )
    (tables / "tiny.yaml").write_text(text)
    words = ["tiny", "--tables", str(tables), "--only", "listops", "--dry-run"]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr()
    assert "missing part: configs/attention/none.yaml: its rows are skipped" in printed.err
    assert "| listops | MGK" not in printed.out


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU is there")
def test_a_measured_table_takes_the_sweep_of_its_accelerator(tmp_path):
    words = ["mgk_table7", "--runs", str(tmp_path)]
    told = error_of([*words, "--accelerator", "gpu"], main)
    assert told.startswith("error: device cuda is not available")
    assert "run mgk_table7_cuda on another machine" in told
    assert f"no results in {tmp_path}/profiling/mgk_table7 " in error_of([*words, "--report"], main)


def test_the_uea_table_is_run_as_the_others(monkeypatch):
    words = ["fish_table6", "--only", "Heartbeat", "gfish_4", "--seeds", "1", "--as_published"]
    made = []
    monkeypatch.setattr(making, "run", lambda table, *_, **given: made.append((table, given)))
    main([*words, "--jobs", "2"])
    ((table, given),) = made
    assert list(table.tasks) == ["Heartbeat"]
    assert table.select(["Heartbeat", "gfish_4"])[0][1].published["Heartbeat"] == {"test": 76.10}
    settings = table.tasks["Heartbeat"].settings
    assert settings["data.init_args.select_on"] == "test"
    assert settings["run.monitor"] == "val/accuracy"
    assert given["protocol"].as_published


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_told_before_any_run(places, tmp_path):
    line = error_of(["tiny", *places, "--only", "listops", "--accelerator", "gpu"], main)
    assert "no GPU is available; use --accelerator cpu" in line
    assert not list(tmp_path.rglob("*.log"))


def test_settings():
    assert parse_settings(["a.b=3", "c=x=y", "d=null"]) == {"a.b": 3, "c": "x=y", "d": None}


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("data.path", "data.init_args.path"),
        ("bert_*:data.path", "bert_*:data.init_args.path"),
        ("model.lr", "model.init_args.lr"),
        ("model.attention.backend", "model.init_args.attention.init_args.backend"),
        ("model.attention.class_path", "model.init_args.attention.class_path"),
        ("model.class_path", "model.class_path"),
        ("model.attention", "model.init_args.attention"),
        ("trainer.max_steps", "trainer.max_steps"),
    ],
)
def test_short_keys_are_completed_once(short, full):
    assert parse_settings([f"{short}=1"]) == parse_settings([f"{full}=1"]) == {full: 1}


def test_a_dry_run_of_a_grid_asks_for_no_metric_by_name(capsys, tmp_path):
    """A grid's perplexity is read from the whole result, whose names depend on the data."""
    words = ["low_rank_figure1", "--shortened", "--dry-run", "--only", "fixed-h2-*"]
    words += ["--runs", str(tmp_path), "--data_dir", str(tmp_path), "--cache_dir", str(tmp_path)]
    assert main(words) == 0, capsys.readouterr().err


def test_runs_are_composed_only_where_a_task_has_results(tmp_path, monkeypatch):
    table, runs = tiny_runs(tmp_path)
    place = runs[0].place
    finished_run(runs[0])
    assert finished(table, place) == runs[:1]
    composed = []
    monkeypatch.setattr(Run, "result", lambda run: composed.append(run.task.name))
    assert finished(table, place) == []
    assert set(composed) == {runs[0].task.name}
    runs[0].result_path.unlink()
    composed.clear()
    assert finished(table, place) == composed == []


def test_a_table_counts_the_runs_that_its_runs_are():
    """`--list` counts without composing; the runs themselves are the reference."""
    place, counted = Place(), {}
    for name, part in kinds().items():
        if part["kind"] not in ("fits", "figure", "analysis"):
            continue
        table = trained_table(part, place)
        runs = make_runs(table, [], table.seeds, Options(), place)
        counted[name] = table.num_runs, len(runs)
    assert len(counted) > 40
    assert {name: pair for name, pair in counted.items() if pair[0] != pair[1]} == {}
