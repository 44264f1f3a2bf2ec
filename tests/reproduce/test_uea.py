"""The benchmark of UEA archives: recipes, runs trained once, the report, flags."""

from __future__ import annotations

import csv
import dataclasses
import json
import shlex
import statistics
import sys
from pathlib import Path

import pytest
import yaml

from datamodules.series.archive import ARCHIVES
from lit_probattn.compare.flags import Place
from lit_probattn.compare.runs import Run
from lit_probattn.reproduce.uea import TABLE, main, make_parser, make_table
from tests.compare.tiny import program, run_here
from tests.support.helpers import error_of, with_options

TINY = {
    "task": "configs/tasks/tiny/uea.yaml",
    "seeds": [0, 1],
    "variants": {
        "softmax_2": {
            "config": "configs/attention/softmax.yaml",
            "init_args": {"num_heads": 2},
            "published": "softmax",
        }
    },
    "protocols": {"mvts": {"batch_size": 64, "model": {"norm": "batch"}}},
    "archives": {
        "BasicMotions": {
            "protocol": "mvts",
            "epochs": 2,
            "sizes": "tiny",
            "model": {"num_layers": 1, "embed_dim": 8, "head_dim": 4, "mlp_dim": 8},
            "published": {"softmax": 12.5},
        }
    },
    "others": {
        "protocol": "mvts",
        "epochs": 1,
        "sizes": "tiny",
        "model": {"num_layers": 1, "embed_dim": 8, "head_dim": 4, "mlp_dim": 8},
    },
    "published_average": {"softmax": 13.0},
}


@pytest.fixture
def options(tmp_path):
    """Flags of a tiny benchmark below tmp_path."""
    table = tmp_path / "table.yaml"
    table.write_text(yaml.safe_dump(TINY))
    places = {"table": table, "out": tmp_path / "out", "runs": tmp_path / "runs"}
    places["data_dir"] = tmp_path
    return [part for name, place in places.items() for part in (f"--{name}", str(place))]


def bundled(options, *more):
    pytest.importorskip("aeon")
    return [*options, "--source", "bundled", *more]


def test_table_file_holds_the_published_table():
    table, unknown = make_table(TABLE, Place(data_dir="none"))
    content = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    assert len(table.tasks) == 10
    assert unknown == {}
    for name, task in table.tasks.items():
        assert ARCHIVES[name] is not None
        sizes = {key.rpartition(".")[2]: value for key, value in task.settings.items()}
        assert sizes["embed_dim"] == 8 * sizes["head_dim"]
        train = ARCHIVES[name].num_train - round(0.2 * ARCHIVES[name].num_train)
        epochs, rest = divmod(sizes["max_steps"], train // sizes["batch_size"])
        assert (epochs, rest) in ((100, 0), (400, 0))
        assert sizes["val_check_interval"] == 2 * (train // sizes["batch_size"])
    flowformer = {
        name
        for name, task in table.tasks.items()
        if task.settings["model.init_args.norm"] == "layer"
    }
    assert flowformer == {"PEMS-SF", "SelfRegulationSCP2", "UWaveGestureLibrary"}
    for row in table.rows.values():
        printed = row.published["average"]["test"]
        column = content["variants"][row.name]["published"]
        values = [row.published[name]["test"] for name in table.tasks]
        assert printed == content["published_average"][column]
        assert statistics.mean(values) == pytest.approx(printed, abs=0.0051)
    other, _ = make_table(TABLE, Place(data_dir="none"), archives=["Cricket"])
    assert not any(value for row in other.rows.values() for value in row.published.values())
    both, _ = make_table(TABLE, Place(data_dir="none"), archives=["JapaneseVowels", "Cricket"])
    assert {(task.name, row.name) for task, row in both.pairs()} == {
        (task, row) for task in both.tasks for row in content["variants"]
    }, "what has no printed number is run too"
    assert "average" not in both.rows["softmax_8"].published


def test_dry_run_names_what_is_missing(options, capsys):
    more = ["--dry-run", "--commands", "--epochs", "2000", "--archives", "Libras", "ERing"]
    assert main([*options, *more]) == 0
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if line.startswith("| Libras")]
    columns = [part.strip() for part in row.strip("| ").split("|")]
    assert columns[1:4] == ["softmax_2", "4000", "64"]
    assert float(columns[6].replace(",", "")) > 1  # MiB
    assert columns[7:] == ["2 of 2", "missing"]
    for name in ("Libras", "ERing"):
        assert f"missing: {name}: no {name}_TRAIN.ts and {name}_TEST.ts in" in printed
    assert printed.count("python -m lit_probattn fit --config configs/tasks/tiny/uea.yaml") == 2


@pytest.mark.usefixtures("sketches")
def test_runs_run_once_and_the_report_has_mean_and_deviation(
    options, tmp_path, capsys, monkeypatch
):
    """A fake program replaces training; the selection test below trains a run."""
    run_here(monkeypatch)
    launch = ["--launch", shlex.join(program(tmp_path))]
    assert main(bundled(options, "--jobs", "2", *launch)) == 0
    printed = capsys.readouterr().out
    files = sorted((tmp_path / "runs/reproduce/results").glob("*.jsonl"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    assert [run["seed"] for run in found] == [0, 1]
    values = [run["values"]["test"] for run in found]
    spread = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert f"| BasicMotions | softmax_2 | test, % | 2 | {spread} | 12.50 |" in printed
    assert (
        f"| average | softmax_2 | test, % | 2 | {statistics.mean(values):.2f} | 13.00 |" in printed
    )
    assert f"| {min(values):.2f} | held-out |" in printed
    assert "selected on the test split**" not in printed
    with (tmp_path / "out" / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows[0]["sha256 TRAIN"]) == len(rows[0]["sha256 TEST"]) == 64
    assert rows[0]["command"].startswith("python -m lit_probattn fit --config")

    # A finished run is not run again; a result cut short counts as none.
    never = ["--launch", shlex.join([sys.executable, "-c", "pass"]), "--attempts", "1"]
    assert main(bundled(options, *never)) == 0
    assert capsys.readouterr().out.count("already finished") == 2
    files[0].write_text(files[0].read_text(encoding="utf-8")[:50])
    assert main(bundled(options, "--dry-run")) == 0
    assert "| 1 of 2 | present |" in capsys.readouterr().out


def test_other_files_are_other_runs(options, tmp_path):
    pytest.importorskip("aeon")
    table = Path(options[1])
    given = {"archives": ["BasicMotions"], "source": "bundled"}
    place = Place(cache_dir=str(tmp_path / "cache"))
    task = make_table(table, place, **given)[0].tasks["BasicMotions"]
    assert set(task.files) == {"TRAIN", "TEST"}
    assert all(len(sha) == 64 for sha in task.files.values())
    (row,) = make_table(table, place, **given)[0].rows.values()
    changed = dataclasses.replace(task, files={**task.files, "TEST": "0" * 64})
    assert Run(task, row, 0).digest != Run(changed, row, 0).digest
    assert Run(task, row, 0).fit_arguments()[1:5] == [
        *("--config", "configs/tasks/tiny/uea.yaml"),
        *("--config", "configs/attention/softmax.yaml"),
    ]


@pytest.mark.usefixtures("without_processes", "sketches")
def test_selection_on_test_is_another_run_and_flagged(options, tmp_path, capsys):
    more = ["--select_on", "test", "--seeds", "0", "--epochs", "1"]
    assert main(bundled(options, *more)) == 0
    assert "**selected on the test split**" in capsys.readouterr().out
    (path,) = (tmp_path / "runs/reproduce/results").glob("*.jsonl")
    run = json.loads(path.read_text(encoding="utf-8"))
    assert run["selected_on_test"] is True
    assert run["max_steps"] == 1  # an epoch of the 40 series, all of which train
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "selected on the test split" in report
    assert "SHORTENED" in report
    assert "`trainer.max_steps`: published 2, here 1" in report
    with (tmp_path / "out" / "rows.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["batch_size"] == "40"
    assert row["archive_version"].startswith("aeon ")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--variants", "softmax_8"], "unknown variant 'softmax_8'; did you mean 'softmax_2'?"),
        (["--archives", "BasicMotion"], "did you mean 'BasicMotions'?"),
        (["--shard", "2/2"], "--shard: expected 0 <= i < n"),
        (["--epochs", "0"], "--epochs: must be at least 1"),
        (["--table", "none.yaml"], "configuration file not found: none.yaml"),
        (["--variants", "configs/attention/none.yaml"], "configuration file not found"),
    ],
)
def test_wrong_usage_is_one_line(options, more, message):
    assert message in error_of(with_options(options, *more), main)


@pytest.mark.parametrize("flag", ["--archive", "--seed", "--dry", "--select"])
def test_flags_are_not_matched_by_prefix(flag):
    assert "unrecognized arguments" in error_of([flag, "1"], make_parser().parse_args)
