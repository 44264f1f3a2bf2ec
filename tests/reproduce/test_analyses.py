"""Analysis tables: models, studies and comparisons of every printed row; reports; a real run."""

from __future__ import annotations

import csv
import json
import math
import shutil
from unittest.mock import patch

import pandas as pd
import pytest
import torch

from lit_probattn.analysis.__main__ import main as analyse
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import begin_output
from lit_probattn.compare.command import make_runs
from lit_probattn.compare.flags import Place
from lit_probattn.compare.model import build_task
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.runs import Run
from lit_probattn.compare.tables import FOLDER, kinds, read_published
from lit_probattn.reproduce.__main__ import main
from lit_probattn.reproduce.analyses.report import AnalysisReport
from lit_probattn.reproduce.analyses.table import Analysis
from lit_probattn.reproduce.studies import RunStudy, Value
from tests.analysis import made
from tests.compare import test_report
from tests.reproduce.small_tables import two_blocks, write_small
from tests.support.helpers import error_of
from tests.support.paths import ROOT
from tests.support.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("sketches")
TABLES = (
    *("fish_table8", "fish_table9", "fish_table12", "fish_table13", "fish_text"),
    *("mgk_table8", "mgk_text", "value_aware_text"),
)
# Studies as small as the tiny models.
TINY = {
    "spectrum": {"num_samples": 4, "length": 8, "full": None},
    "head_distance": {"num_samples": 4},
    "query_likelihood": {"num_samples": 4},
    "approximate": {"num_samples": 4, "local_samples": 1},
}
MODELS = {
    "wikitext_small": {"task": "text", "cls": "SoftmaxAttention", "num_heads": 2},
    "masked_lm": {"task": "masked", "cls": "SoftmaxAttention", "num_heads": 2},
    "retrieval": {"task": "pair", "cls": "MGKAttention", "num_heads": 1},
}


BUILT: set[str] = set()  # models of all tables: what several have is built once


def read(name):
    return Analysis(kinds()[name])


def test_analysis_tables_are_these():
    assert {name for name, part in kinds().items() if part["kind"] == "analysis"} == {*TABLES}


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory):
    """Folder of models by task, and of what was studied in them by the study's words."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", TABLES)
def test_every_printed_number_stands_in_its_table(name):
    part, analysis = kinds()[name], read(name)
    found = {}
    for row in analysis.table.rows.values():
        for task, values in row.published.items():
            for key, value in values.items():
                printed = analysis.numbers[key].metric.printed
                found[task, *part["rows"][row.name]["printed"], *printed] = value
    found |= {number.printed: float(text) for number, text in analysis.computed}
    keys = ("task", "method", "heads", "metric", "split")
    rows = [row for row in read_published() if row["table"] == name]
    assert found == {tuple(row[k] for k in keys): float(row["value"]) for row in rows}


@pytest.mark.parametrize(
    "name", mostly_slow(TABLES, ["fish_table8", "fish_table9", "value_aware_text"])
)
def test_every_number_is_given_by_a_study_of_its_model(name, tmp_path, tiny_models):
    """Tables that name one study of one model share what it gives."""
    part, analysis = kinds()[name], read(name)
    for task, row in analysis.table.pairs():
        run = Run(task, row, 0)
        key = json.dumps([task.name, run.config["model"]], sort_keys=True)
        if key not in BUILT:
            BUILT.add(key)
            two_blocks(run.config["model"])
            with torch.device("meta"):
                build_task(run, run.data())
    tiny = {**analysis.shortened.flags, **TINY.get(analysis.study.name, {})}
    study = RunStudy(analysis.study.name, {k: v for k, v in tiny.items() if v is not None})
    model = tiny_models / part["task"]
    if not model.exists():
        made.checkpoint(model, **MODELS[part["task"]])
    run = trained(Run(task, row, 0, place=Place(runs=tmp_path)), model / "run")
    studied_before = model / json.dumps(study.words).replace("/", " ")
    if studied_before.exists():
        shutil.copytree(studied_before, study.folder(run))
    else:
        assert analyse(study.arguments(run)) == 0
        shutil.copytree(study.folder(run), studied_before)
    assert study.is_done(run)
    for entry in analysis.table.rows.values():
        for key in entry.published[task.name]:
            found = analysis.value(entry.name, key)
            least = -math.inf if found.column == "difference" else 0.0  # of an untrained model
            assert least < found.of(study, run) < math.inf


def trained(run, folder, seed=0, **values):
    """Keep a result of a run whose folder exists already."""
    report = {"checkpoint": "step-00000007.ckpt", "test/loss": seed}
    with patch.dict(test_report.COUNTS, {run.row.name: (1000, 2000)}):
        scores = {"valid": 30.0, "test": 31.0, **values}
        test_report.keep(run, 1.0, run_folder=str(folder), report=report, values=scores)
    return run


# ---- reports of studies made by hand -------------------------------------------------------------


def studied(study, run, mean, variance):
    """Write the results of a study of distances: two layers whose mean is that."""
    folder = study.folder(run)
    folder.mkdir(parents=True)
    (folder / "figures").mkdir()
    layers = {"layer": [1, 2], "mean": [mean - 0.5, mean + 0.5], "variance": [variance] * 2}
    pd.DataFrame(layers).to_csv(folder / "head_distance_layers.csv", index=False)
    (folder / "figures/head_distance.png").write_bytes(b"a picture")
    (folder / "report.json").write_text("done")


def report_of(tmp_path, means, options=None, name="fish_table8", seeds=(0, 1)):
    """The report of runs whose mean distances are given by row, one per seed."""
    analysis = read(name)
    place = Place(runs=tmp_path / "runs")
    runs = make_runs(analysis.table, [], seeds, options or Options(), place)
    report = AnalysisReport(analysis.table, runs, "python -m lit_probattn.reproduce", analysis)
    for run in runs:
        if run.row.name in means:
            trained(run, tmp_path, run.seed)
            mean = means[run.row.name][runs.index(run) // len(analysis.table.rows)]
            studied(report.study, run, mean, 0.66 + 0.01 * run.seed)
    return report


MEANS = {"softmax_8": [1.6, 1.7], "gfish_2_8": [2.1, 2.3], "linear_8": [1.2, 1.1]}


def test_every_printed_number_stands_beside_ours_with_a_verdict(tmp_path):
    report = report_of(tmp_path, MEANS)
    text = report.write(tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out/ratios.csv").open()))
    assert len(rows) == 10
    by_key = {(row["row"], row["metric"]): row for row in rows}
    softmax, gfish = by_key["softmax_8", "mean"], by_key["gfish_2_8", "mean"]
    assert (float(softmax["mean"]), float(softmax["published"])) == (1.65, 1.62)
    assert softmax["verdict"] == "agrees"
    assert gfish["verdict"] == "agrees"  # two seeds: ± 2.2
    assert by_key["linear_8", "mean"]["verdict"] == "agrees"
    assert by_key["gfish_4_8", "mean"]["verdict"] == "inconclusive"
    assert by_key["gfish_4_8", "mean"]["note"] == "no model has been studied"
    deviation = 0.03, 12.706 * 0.0707107 * 1.5**0.5
    assert float(softmax["deviation"]) == pytest.approx(deviation[0])
    assert float(softmax["deviation_half_width"]) == pytest.approx(deviation[1], rel=1e-3)
    assert "| Softmax, 8 heads | mean, Frobenius | 1.62 | 1.650 ± 0.071 | 2 | +0.030 [" in text
    written = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert "6 of 10 runs are finished; missing: " in written
    assert (tmp_path / "out/figures/gfish_2_8_head_distance.png").read_bytes() == b"a picture"
    assert "(figures/gfish_2_8_head_distance.png)" in written
    assert "(figures/gfish_4_8_head_distance.png)" not in written
    runs = pd.read_csv(tmp_path / "out/rows.csv")
    assert list(runs["value mean"]) == pytest.approx([1.6, 1.2, 2.1, 1.7, 1.1, 2.3])
    assert list(runs["value test"]) == [31.0] * 6


def test_a_number_beyond_the_spread_has_the_direction_of_the_paper_or_differs(tmp_path):
    means = {"softmax_8": [1.62, 1.64, 1.63], "gfish_2_8": [2.1, 2.14, 2.12]}
    means |= {"linear_8": [1.2, 1.24, 1.22]}
    summary = report_of(tmp_path, means, seeds=(0, 1, 2)).summary
    found = summary[summary["metric"] == "mean"].set_index("row")["verdict"]
    assert dict(found.head(3)) == {
        "softmax_8": "agrees",
        "linear_8": "differs",  # printed above softmax
        "gfish_2_8": "same direction",
    }


def test_rows_of_one_model_read_their_own_lines_of_its_study(tmp_path):
    """Printed: 43.5 % with the value-oblivious optimum, 24.2 % with the other, 8 to 20 points."""
    analysis = read("value_aware_text")
    place = Place(runs=tmp_path / "runs")
    runs = make_runs(analysis.table, [], (0, 1, 2), Options(), place)
    report = AnalysisReport(analysis.table, runs, "python -m lit_probattn.reproduce", analysis)
    assert len({run.name for run in runs}) == 3
    for run in runs[::3]:
        trained(run, tmp_path, run.seed)
        folder = report.study.folder(run)
        folder.mkdir(parents=True)
        better, more = 24.0 + run.seed / 10, 12.0 + run.seed**2 / 10
        table = {"method": ["ovo", "ova"], "num_kept": [65, 65], "exact": [better] * 2}
        table |= {"value": [better + more, better], "difference": [more, 0.0]}
        pd.DataFrame(table).to_csv(folder / "approximate.csv", index=False)
        (folder / "report.json").write_text("done")
    summary = report.summary.set_index(["row", "metric"])
    assert summary.loc[("aware", "error"), "mean"] == pytest.approx(24.1)
    assert summary.loc[("oblivious", "error"), "mean"] == pytest.approx(36.3, abs=0.04)
    assert summary.loc[("oblivious", "error"), "difference_from_baseline"].startswith("+12.1")
    increase = summary.loc["increase"]
    assert list(increase["mean"]) == pytest.approx([12.1667, 12.1667], abs=1e-4)
    assert list(increase["published"]) == [8.0, 20.0]
    assert list(increase["bound"]) == ["at least", "at most"]
    printed = [line.split("|")[3].strip() for line in report.lines[2:]]
    assert printed == ["24.2", "43.5", "at least 8", "at most 20"]
    assert summary["verdict"].to_dict() == {
        ("aware", "error"): "agrees",
        ("oblivious", "error"): "same direction",
        ("increase", "least increase"): "agrees",
        ("increase", "greatest increase"): "agrees",
    }


def test_a_shortened_protocol_is_told_and_compares_the_order_alone(tmp_path):
    report = report_of(tmp_path, MEANS, Options(shortened=True))
    report.write(tmp_path / "out")
    written = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert "SHORTENED PROTOCOL" in written
    assert "Study: head_distance with --num_samples 8. **The study is shortened too; the" in written
    summary = report.summary[report.summary["metric"] == "mean"].set_index("row")
    assert set(summary["note"].head(3)) == {"not compared: different protocol"}
    assert summary["deviation"].isna().all()
    assert dict(summary["verdict"].head(3)) == {
        "softmax_8": "inconclusive",
        "linear_8": "inconclusive",
        "gfish_2_8": "same direction",
    }


@pytest.mark.parametrize("name", ["fish_table9", "fish_table13", "fish_text"])
def test_full_spectra_have_1000_sequences(name):
    """The 217,646 tokens of the validation text are only 850 whole segments of the task's 256."""
    words = read(name).study.words
    assert words == ["--full", "--data.segment_len", "128"]
    assert 217_645 // 256 < 1000 <= 217_645 // int(words[-1])
    figure = kinds()["fish_figure2"]["studies"]
    assert RunStudy("spectrum", figure["spectrum"]).words == words


def test_shortened_spectra_have_fewer_and_shorter_sequences():
    analysis = read("fish_table9")
    assert analysis.shortened.words == ["--num_samples", "64", "--length", "64"]


def test_a_run_that_is_trained_anew_is_studied_anew(tmp_path):
    report = report_of(tmp_path, MEANS, seeds=(0,))
    run = report.results[0][0]
    assert report.study.is_done(run)
    trained(run, tmp_path, seed=7)
    assert not report.study.is_done(run)
    assert not RunStudy("head_distance", {"num_samples": 3}).is_done(run)


def test_computed_numbers():
    """Of FiSH a saving at the largest size, and the windows; of MGK the parameters."""
    value = {number.by: number.value(FOLDER) for number, _ in read("fish_text").computed}
    rows = csv.DictReader((ROOT / "reports/fish_figure3/ratios.csv").open())
    (ratio,) = [
        float(row["ratio_measured"])
        for row in rows
        if (row["embed_dim"], row["seq_len"], row["mode"]) == ("4096", "8192", "eval")
        and (row["metric"], row["scope"], row["variant"]) == ("macs", "attention", "gfish2")
    ]
    assert value == {"percent_saved": pytest.approx(100 * (1 - ratio)), "window_tokens": 49.0}
    counted = [number.value(FOLDER) for number, _ in read("mgk_text").computed]
    # As fairseq prints it for the WMT model; then 267,735 words in an adaptive output of 3
    # clusters, and 16 blocks of attention, two norms and an MLP, at width 256.
    block = 4 * 256**2 + 2 * 2 * 256 + 2 * 256 * 2048 + 2048 + 256
    assert [round(1e6 * number) for number in counted] == [
        209_911_808,
        267_735 * 257 + 3 * 257 + 16 * block,
    ]


def test_what_is_computed_is_reported_before_any_run_is_studied(tmp_path):
    words = ["--report", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert main(["mgk_text", *words]) == 1  # runs are missing
    text = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    rows = list(csv.DictReader((tmp_path / "out/ratios.csv").open()))
    computed = [row for row in rows if row["mean"]]
    assert [float(row["published"]) for row in computed] == [
        float(text) for _, text in read("mgk_text").computed
    ]
    assert {row["verdict"] for row in computed} <= {"agrees", "differs"}
    assert {row["note"] for row in rows if not row["mean"]} == {"no model has been studied"}
    assert "0 of " in text
    assert "No run is finished." in text
    assert "- Hardware: " in text
    line = error_of(["fish_table8", *words], main)
    assert "no run of fish_table8 is finished: nothing to report" in line


# ---- what is refused -----------------------------------------------------------------------------


def test_values_that_a_study_does_not_have_are_one_line(tmp_path):
    report = report_of(tmp_path, MEANS, seeds=(0,))
    run, study = report.results[0][0], report.study
    for value, message in (
        (Value("none.csv", "mean"), "unknown table none.csv; has head_distance_layers.csv"),
        (Value("head_distance_layers.csv", "means"), "no column 'means'; did you mean 'mean'?"),
        (Value("head_distance_layers.csv", "mean"), "expected one row, found 2"),
        (
            Value("head_distance_layers.csv", "mean", {"layer": 3}, reduce="mean"),
            "one row, found 0",
        ),
    ):
        with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
            value.of(study, run)
    assert Value("head_distance_layers.csv", "mean", {"layer": 2}).of(study, run) == 2.1


# ---- real runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_table_trains_studies_and_reports_and_does_nothing_twice(tmp_path, capfd):
    flags = write_small(tmp_path, "fish_table8", "fish_table11", "mgk_table3")
    words = ["fish_table8", "--shortened", "--only", "softmax_8", "gfish_2_8", *flags]
    words += ["--seeds", "0"]
    assert main([*words, "--dry-run", "--commands"]) == 0
    planned = capfd.readouterr().out
    assert "then the study head_distance of 2 of 2 runs" in planned
    assert planned.count("python -m lit_probattn.analysis head_distance --checkpoint") == 2
    assert main([*words, "--report"]) == 2
    assert main(words) == 0
    first = capfd.readouterr().out
    assert first.count("head_distance: starts; log") == 2
    out = tmp_path / "runs/reproduce/reports/fish_table8"
    summary = pd.read_csv(out / "ratios.csv").set_index(["row", "metric"])
    layers = list((tmp_path / "runs/reproduce/studies").glob("*softmax*/*/*/*_layers.csv"))
    mean = pd.read_csv(layers[0])["mean"].mean()
    assert summary.loc[("softmax_8", "mean"), "mean"] == pytest.approx(mean, rel=1e-5)
    assert len(list((out / "figures").glob("*_head_distance.png"))) == 2
    assert main(words) == 0
    again = capfd.readouterr().out
    assert "starts" not in again
    assert again.count("already finished") == 2
    begin_output(layers[0].parent / "report.md")  # as after an interruption
    (layers[0].parent / "report.json").unlink()
    assert main(words) == 0
    assert capfd.readouterr().out.count("head_distance: starts; log") == 1


@pytest.mark.slow
def test_a_study_that_fails_is_tried_again_and_told(tmp_path, capfd):
    flags = write_small(tmp_path, "fish_table9", "fish_table11", "mgk_table3")
    words = ["fish_table9", "--shortened", "--only", "softmax_8", "--seeds", "0", *flags]
    assert main(words) == 1  # sequences of 16 positions have no 64
    told = capfd.readouterr()
    (line,) = [line for line in told.err.splitlines() if line.startswith("failed: ")]
    assert line.startswith(
        "failed: wikitext_small, Softmax, 8 heads, seed 0, spectrum: spectrum exited with"
    )
