"""The benchmark of UEA archives: plan, cells that run once, table, flags."""

from __future__ import annotations

import csv
import json
import statistics

import pytest
import yaml

from datamodules.series.archive import ARCHIVES
from lit_probattn.reproduce.uea import cells as cells_module
from lit_probattn.reproduce.uea.__main__ import main, make_parser
from lit_probattn.reproduce.uea.recipes import Table
from tests.support.paths import ROOT

TABLE = "configs/reproduce/fish_table6.yaml"

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
def options(tmp_path, monkeypatch):
    """Flags of a tiny benchmark below tmp_path."""
    monkeypatch.chdir(ROOT)
    table = tmp_path / "table.yaml"
    table.write_text(yaml.safe_dump(TINY))
    places = {"table": table, "out": tmp_path / "out", "runs": tmp_path / "runs"}
    places["data_dir"] = tmp_path
    return [part for name, place in places.items() for part in (f"--{name}", str(place))]


def bundled(options, *more):
    pytest.importorskip("aeon")
    return [*options, "--source", "bundled", *more]


def test_table_file_holds_the_published_table():
    table = Table.read(str(ROOT / TABLE))
    assert len(table.archives) == 10
    rows = [table.recipe(name) for name in table.archives]
    for recipe in rows:
        assert ARCHIVES[recipe.archive] is not None
        assert recipe.model["embed_dim"] == 8 * recipe.model["head_dim"]
        assert recipe.epochs in (100, 400)
    flowformer = {recipe.archive for recipe in rows if recipe.protocol == "flowformer"}
    assert flowformer == {"PEMS-SF", "SelfRegulationSCP2", "UWaveGestureLibrary"}
    for column, printed in table.content["published_average"].items():
        mean = statistics.mean(recipe.published[column] for recipe in rows)
        assert mean == pytest.approx(printed, abs=0.0051)
    assert table.recipe("Cricket").published == {}


def test_dry_run_predicts_and_names_what_is_missing(options, capsys):
    more = ["--dry-run", "--commands", "--epochs", "2000", "--archives", "Libras", "ERing"]
    assert main([*options, *more]) == 1
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if line.startswith("| Libras")]
    columns = [part.strip() for part in row.strip("| ").split("|")]
    assert columns[1:6] == ["softmax_2", "mvts", "45 x 2", "64", "4000"]
    assert float(columns[7]) > 0
    assert float(columns[8].replace(",", "")) > 1  # MiB
    assert columns[9:] == ["2", "missing"]
    for name in ("Libras", "ERing"):
        assert f"missing: {name}: no {name}_TRAIN.ts and {name}_TEST.ts in" in printed
    assert printed.count("python -m lit_probattn fit --config configs/tasks/tiny/uea.yaml") == 2


def test_cells_run_once_and_the_table_has_mean_and_deviation(
    options, tmp_path, capsys, monkeypatch
):
    assert main(bundled(options)) == 0
    printed = capsys.readouterr().out
    files = sorted((tmp_path / "out" / "cells").glob("*.json"))
    found = [json.loads(path.read_text()) for path in files]
    assert [cell["seed"] for cell in found] == [0, 1]
    values = [cell["test_accuracy_percent"] for cell in found]
    spread = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert f"| BasicMotions | softmax_2 | 2 | {spread} |" in printed
    assert "| 12.50 |" in printed
    assert f"| mean of 1 | softmax_2 | | {statistics.mean(values):.2f} | | 13.00 |" in printed
    assert "selected on the test split" not in printed
    with (tmp_path / "out" / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows[0]["sha256 TRAIN"]) == len(rows[0]["sha256 TEST"]) == 64
    assert rows[0]["archive_version"].startswith("aeon ")
    assert rows[0]["command"].startswith("python -m lit_probattn fit --config")

    def never(arguments):
        raise AssertionError("a finished cell was run again")

    with monkeypatch.context() as context:
        context.setattr(cells_module, "run_command", never)
        assert main(bundled(options)) == 0
        assert capsys.readouterr().out.count("finished before, not run again") == 2
        # A result cut short counts as none, and a failing cell does not stop the others.
        files[0].write_text(files[0].read_text()[:50])
        assert main(bundled(options)) == 1
        assert "seed 0: failed: a finished cell was run again" in capsys.readouterr().err
    assert main(bundled(options, "--part", "1/2")) == 0
    assert json.loads(files[0].read_text())["test_accuracy_percent"] == values[0]
    assert "| at least 0." in (tmp_path / "out" / "report.md").read_text()
    assert "at least" not in printed


def test_selection_on_test_is_another_cell_and_flagged(options, tmp_path, capsys):
    more = ["--select_on", "test", "--seeds", "0", "--epochs", "1"]
    assert main(bundled(options, *more)) == 0
    assert "**selected on the test split**" in capsys.readouterr().out
    (path,) = (tmp_path / "out" / "cells").glob("*.json")
    cell = json.loads(path.read_text())
    assert cell["selected_on_test"] is True
    assert cell["selection"] == "best accuracy on the test split"
    assert cell["batch_size"] == 40  # all that train
    assert "selected on the test split" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--variants", "softmax_8"], "unknown variant 'softmax_8'; did you mean 'softmax_2'?"),
        (["--archives", "BasicMotion"], "did you mean BasicMotions?"),
        (["--part", "3/2"], "--part must be I/N"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--table", "none.yaml"], "configuration file not found: none.yaml"),
        (["--variants", "configs/attention/none.yaml"], "configuration file not found"),
    ],
)
def test_wrong_usage_is_one_line(options, more, message, capsys):
    assert main([*options, *more]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("flag", ["--archive", "--seed", "--dry", "--select"])
def test_flags_are_not_matched_by_prefix(flag, capsys):
    with pytest.raises(SystemExit) as stop:
        make_parser().parse_args([flag, "1"])
    assert stop.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
