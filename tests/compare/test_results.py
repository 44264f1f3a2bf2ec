"""Result files: of which data, of which run, with which fields; what is wrong is named."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest

from lit_probattn.__main__ import main
from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.report import Report
from lit_probattn.compare.runner import run_all
from tests.compare.test_runner import COUNTED
from tests.compare.tiny import (
    finished,
    measure_nothing,
    program,
    run_here,
    tiny_runs,
    write_result,
)

pytestmark = pytest.mark.usefixtures("sketches")
ROWS = "text,label\n" + "".join(f"word{n % 7} text {n},{'ab'[n % 2]}\n" for n in range(60))


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """A comparison on a CSV file, trained by a stand-in; returns status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    run_here(monkeypatch)
    measure_nothing(monkeypatch)
    monkeypatch.setattr("lit_probattn.compare.command.check_arguments", lambda words: None)
    (tmp_path / "mine.csv").write_text(ROWS)
    launch = shlex.join(program(tmp_path))

    def run(*more, seeds=("0", "1"), data="mine.csv"):
        words = ["compare", "--task", "own_texts", "--attention", "softmax", "--seeds", *seeds]
        words += ["--accelerator", "cpu", "--launch", launch, "--steps", "4"]
        words += ["--cache_dir", str(tmp_path / "cache")]
        settings = [f"data.init_args.path={data}", "model.init_args.embed_dim=16"]
        status = main([*words, "--set", *settings, *more])
        return status, *capsys.readouterr()

    return run


def test_a_run_of_changed_data_is_run_anew_and_the_file_is_named(compare, tmp_path):
    status, out, err = compare()
    assert status == 0, err
    (tmp_path / "mine.csv").touch()  # equal data are the same
    assert compare()[1].count("already finished") == 2
    (tmp_path / "mine.csv").write_text(ROWS.replace("word3", "other"))
    status, out, err = compare("--report")
    assert status != 0
    assert "mine.csv" in err
    status, out, err = compare(seeds=("0",))
    assert status == 0
    assert "finished before" not in out
    assert "mine.csv" in next(line for line in out.splitlines() if line.startswith("[1/1]"))
    status, out, err = compare("--report")  # seed 1 is of the data before
    report = (tmp_path / "runs/reproduce/reports/compare-own_texts/report.md").read_text(
        encoding="utf-8"
    )
    assert status == 1
    assert "1 of 2 runs are finished" in report
    assert "mine.csv" in report
    assert len(list((tmp_path / "runs").glob("own_texts-*seed0*"))) == 2
    # Results of two data are not averaged where the data are gone.
    (tmp_path / "mine.csv").unlink()
    shutil.rmtree(tmp_path / "cache")
    status, out, err = compare("--report")
    assert status == 2
    assert "trained on different data (files: mine.csv)" in err


IMPOSSIBLE = {
    "values.test": [{"values": {"test": text}} for text in (400.0, "40", None, [], -1.0)],
    "values": [{"values": []}],
    "max_steps": [{"max_steps": 9_999_999}, {"max_steps": "16"}],
    "selected_step": [{"selected_step": 17}, {"selected_step": -1}],
    "fit_seconds_of_last_start": [{"fit_seconds_of_last_start": "90"}],
    "num_starts": [{"num_starts": 0}],
    "parameters": [{"parameters": 1.5}],
    "seed": [{"seed": 4}],
    "report.checkpoint": [{"report": {"checkpoint": 3}}],
    "strange": [{"strange": 1}],
}


@pytest.mark.parametrize(
    ("field", "change"), [(field, one) for field, every in IMPOSSIBLE.items() for one in every]
)
def test_an_impossible_field_is_named(field, change, tmp_path):
    run = tiny_runs(tmp_path)[1][0]
    finished(run)
    assert run.result()["values"] == {"test": 50.0}
    finished(run, **change)
    with pytest.raises(ConfigError) as caught:
        run.result()
    assert str(caught.value).startswith(f"{run.result_path}: {field}: ")


@pytest.mark.parametrize("field", ["name", "values", "sources", "seed", "report", "macs"])
def test_a_missing_field_is_named(field, tmp_path):
    run = tiny_runs(tmp_path)[1][0]
    result = finished(run)
    del result[field]
    write_result(run, result)
    with pytest.raises(ConfigError, match=f"{run.result_path}: {field}: "):
        run.result()


def test_the_file_of_another_run_and_one_nested_too_deeply_are_refused(tmp_path):
    first, second, *_ = tiny_runs(tmp_path)[1]
    finished(first)
    shutil.copyfile(first.result_path, second.result_path)
    with pytest.raises(ConfigError, match=f"{second.result_path}: name: "):
        second.result()
    second.result_path.write_text("[" * 100_000 + "\n")
    with pytest.raises(ConfigError, match=rf"{second.result_path}: .*\(line 1"):
        second.result()


def test_a_metric_that_only_the_report_has_is_read_from_there(tmp_path):
    run = tiny_runs(tmp_path)[1][0]
    finished(run, values={}, report={"test/accuracy": 0.25})
    assert run.result()["values"] == {"test": 25.0}
    finished(run, values={}, report={"test/loss": 0.25})
    with pytest.raises(ConfigError, match=r"values\.test: "):
        run.result()


def test_half_a_file_is_none(tmp_path):
    run = tiny_runs(tmp_path)[1][0]
    text = json.dumps(finished(run))
    for broken in ("", text[: len(text) // 2]):
        run.result_path.write_text(broken)
        assert run.result() is None
    run.result_path.write_bytes(b"\xff\xfe")
    assert run.result() is None


def test_a_time_that_nobody_took_is_unknown(tmp_path, monkeypatch):
    """Of a run that was killed between its training and its result."""
    table, runs = tiny_runs(tmp_path, ["listops", "mgk_1"])
    lines = []
    run_here(monkeypatch)
    run_all(runs[:1], lambda run: COUNTED, say=lines.append)
    assert runs[0].result()["fit_seconds_of_last_start"] > 0
    runs[0].result_path.unlink()
    run_all(runs[:1], lambda run: COUNTED, say=lines.append)
    assert runs[0].result()["fit_seconds_of_last_start"] is None
    report = Report(table, runs[:1], "python -m lit_probattn")
    report.write(tmp_path / "out")
    assert report.summary["fit_minutes"].isna().all()
    (row,) = [
        x
        for x in (tmp_path / "out/report.md").read_text(encoding="utf-8").splitlines()
        if "fit --config" in x
    ]
    assert "| unknown |" in row
    assert [line for line in lines if line.endswith("; unknown minutes")]
