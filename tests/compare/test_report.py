"""Reports: arithmetic against the statistics module, protocol differences, flags, the picture."""

from __future__ import annotations

import csv
import io
import shutil
import statistics
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import matplotlib.image
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
import yaml
from matplotlib.collections import PathCollection
from PIL import Image

from lit_probattn.compare.measured import MeasuredReport
from lit_probattn.compare.protocol import Options, default_of, differences, overrides
from lit_probattn.compare.report import SHORTENED, Report
from lit_probattn.compare.scores import claim_of, draw
from lit_probattn.compare.tables import read_table
from lit_probattn.experiments import page as page_module
from lit_probattn.records.html import body_of
from tests.compare.tiny import TABLE, TASKS, finished, measure_nothing, tiny_runs, write_tables
from tests.support.pages import Page

pytestmark = pytest.mark.usefixtures("sketches")
COUNTS = {"softmax_2": (1000, 4000), "mgk_1": (600, 3000), "fish_1": (500, 2000)}


def keep(run, value, **more):
    parameters, macs = COUNTS[run.row.name]
    facts = {"values": {"test": value}, "parameters": parameters, "macs_published_length": macs}
    finished(run, **{**facts, **more})


def report_of(tmp_path, table, runs, value=None):
    """The report, its table and its page; with a value, of runs that all have this result."""
    for run in runs if value is not None else ():
        keep(run, value)
    report = Report(table, runs, "python -m lit_probattn.reproduce tiny")
    return (
        report,
        report.write(tmp_path / "out"),
        (tmp_path / "out/report.md").read_text(encoding="utf-8"),
    )


def test_rows_that_learned_nothing_are_named(tmp_path):
    table, runs = tiny_runs(tmp_path)
    for run in runs:
        above = run.row.name == "mgk_1" or run.seed == 4
        keep(run, 30.0, report={"above_chance": above})
    _, _, written = report_of(tmp_path, table, runs)
    (line,) = [line for line in written.splitlines() if "Not above chance" in line]
    label = table.rows["softmax_2"].label
    assert line.endswith(f" listops, {label} (seed 3).**")


MARKUP = "![x](/etc/hostname) [x](http://x) <img src=x>\n\n# Heading\n\n![y](y)"


def test_what_results_of_others_say_stays_text(tmp_path):
    table, runs = tiny_runs(tmp_path)
    mgk = replace(table.rows["mgk_1"], method=MARKUP)
    runs = [replace(c, row=mgk) if c.row.name == "mgk_1" else c for c in runs]
    table = replace(table, rows={**table.rows, "mgk_1": mgk})
    facts = {
        "hardware": {"processor": MARKUP, "num_cores": 2, "gpus": []},
        "packages": {"torch": MARKUP},
        "python": MARKUP,
        "git": {"revision": "![x](y)", "dirty": False},
        "report": {"above_chance": False},
        "command": MARKUP,
    }
    for number, run in enumerate(runs[:3]):
        backends = {"softmax (cpu, float32)": MARKUP if number else "sdpa"}
        keep(run, 30.0, **facts, backends=backends)
    _, _, written = report_of(tmp_path, table, runs)
    page = Page(body_of(written))
    assert page.attributes("img", "src") == ["figures/results.svg"]
    assert not page.attributes("a", "href")
    assert "Heading" not in page.texts["h1"]


def test_numbers(tmp_path):
    table, runs = tiny_runs(tmp_path)
    values = {"softmax_2": [36.0, 37.5], "mgk_1": [30.0, 30.4]}
    for run in runs:
        keep(run, values[run.row.name][run.seed - 3])
    report, text, written = report_of(tmp_path, table, runs)
    for name, numbers in values.items():
        spread = f"{statistics.mean(numbers):.2f} ± {statistics.stdev(numbers):.2f}"
        (line,) = [row for row in text.splitlines() if spread in row]
        assert f"| {TABLE['rows'][name]['published']['listops']:.2f} |" in line
        assert f"| {COUNTS[name][0]:,} | {COUNTS[name][1] / 4000:.3f} |" in line
    assert "| baseline |" in text
    assert not report.shortened
    assert SHORTENED not in written
    assert "4 of 4 runs are finished." in written
    assert "- Hardware: a processor, 2 cores\n" in written
    assert "- Versions: python 3.11, torch 2.15.0; revision abcdef1\n" in written
    with (tmp_path / "out/rows.csv").open() as file:
        assert [float(row["value test"]) for row in csv.DictReader(file)] == [36, 30, 37.5, 30.4]
    with (tmp_path / "out/ratios.csv").open() as file:
        assert [float(row["flop_ratio"]) for row in csv.DictReader(file)] == [1.0, 0.75]
    picture = tmp_path / "out/figures/results.png"
    assert picture.stat().st_size < 300_000
    assert matplotlib.image.imread(picture).ndim == 3


def test_a_task_may_have_a_baseline_of_its_own(tmp_path):
    table, runs = tiny_runs(tmp_path)
    table = replace(table, baselines={"listops": "mgk_1"})
    values = {"softmax_2": [36.0, 37.5], "mgk_1": [30.0, 30.4]}
    for run in runs:
        keep(run, values[run.row.name][run.seed - 3])
    report, text, _ = report_of(tmp_path, table, runs)
    lines = {
        name: next(line for line in text.splitlines() if f"| {label} |" in line)
        for name, label in ((n, table.rows[n].label) for n in values)
    }
    assert "| baseline |" in lines["mgk_1"]
    assert "| +6.55 [" in lines["softmax_2"]
    ratios = report.summary.set_index("row")["flop_ratio"]
    assert ratios["softmax_2"] == pytest.approx(4000 / 3000)


def test_one_seed_claims_no_spread_and_missing_runs_are_named(tmp_path):
    table, runs = tiny_runs(tmp_path)
    keep(runs[0], 36.0)
    _, text, written = report_of(tmp_path, table, runs)
    assert (
        "| 1 | 36.00 | 37.00 | -1.00: one seed, no interval; sampling error of the test set" in text
    )
    assert "1 of 4 runs are finished; missing: listops, MGK, 1 head, seed 3" in written


def test_a_percentage_of_tokens_has_no_error_of_a_number_of_sequences(tmp_path):
    table, runs = tiny_runs(tmp_path)
    (metric,) = runs[0].task.metrics.values()
    tokens = replace(runs[0].task, metrics={"test": replace(metric, key="test/mlm_error")})
    run = replace(runs[0], task=tokens)
    keep(run, 36.0)
    _, text, _ = report_of(tmp_path, replace(table, tasks={tokens.name: tokens}), [run])
    assert "| 1 | 36.00 | 37.00 | -1.00: one seed, no interval |" in text


@pytest.mark.parametrize(("means", "range_"), [((38.9,), "38.9"), ((18.75, 38.25), "18.8 to 38.2")])
def test_rows_of_one_seed_have_their_range_as_claim(means, range_):
    given = {"task": "t", "metric": "test", "unit": "%", "num_seeds": 1}
    rows = [{**given, "mean": mean, "difference_from_baseline": ""} for mean in means]
    assert claim_of(pd.DataFrame(rows)) == f"t, test, %: {range_}, 1 seed per row"


def test_rows_of_several_seeds_without_intervals_have_their_range_as_claim():
    """The baseline has two seeds, the other row one of others: their difference is unknown."""
    given = {"task": "t", "metric": "test", "unit": "%", "method": "m"}
    rows = [
        {**given, "row": "a", "mean": 30.0, "num_seeds": 2, "difference_from_baseline": "baseline"},
        {**given, "row": "b", "mean": 31.0, "num_seeds": 1}
        | {"difference_from_baseline": "+1.00 (no interval)"},
    ]
    assert claim_of(pd.DataFrame(rows)) == "t, test, %: 30.0 to 31.0, 1 to 2 seeds per row"


def test_losses_have_four_decimals(tmp_path):
    """Squared errors of actions differ by less than a hundredth."""
    table, runs = tiny_runs(tmp_path, ["softmax_2", "mgk_1"])
    (task,) = (one for one in table.tasks.values() if one.name == "listops")
    loss = replace(task, metrics={"test": replace(task.metrics["test"], unit="squared error")})
    runs = [replace(run, task=loss) for run in runs if run.task.name == "listops"]
    for run in runs:
        keep(run, (0.0312 if run.row.name == "mgk_1" else 0.0345) + 1e-4 * run.seed)
    report, text, _ = report_of(tmp_path, replace(table, tasks={"listops": loss}), runs)
    assert "| 0.0349 ± 0.0001 |" in text
    assert "| -0.0033 [-0.0033, -0.0033] paired * |" in text
    assert "0.0349;" in report.finding()


def test_average_needs_all_tasks(tmp_path):
    table, runs = tiny_runs(tmp_path, [])
    for run in runs:
        if run.task.name == "listops":
            keep(run, 40.0)
    assert "| average |" not in report_of(tmp_path, table, runs)[1]
    for run in runs:
        keep(run, 40.0 if run.task.name == "listops" else 75.0)
    text = report_of(tmp_path, table, runs)[1]
    (line,) = [row for row in text.splitlines() if row.startswith("| average")]
    assert "| 57.50 | 58.50 | -1.00: no interval |" in line


def test_average_is_of_the_published_metric_and_over_tasks_whatever_their_seeds(tmp_path):
    """Two seeds of one task, one of the other: (40 + 75) / 2, not (40 + 40 + 75) / 3.

    A second number of every task, which nobody printed, is not averaged.
    """
    table, runs = tiny_runs(tmp_path, ["softmax_2"])
    tasks = {}
    for name, task in table.tasks.items():
        low = replace(task.metrics["test"], name="low")
        tasks[name] = replace(task, metrics={**task.metrics, "low": low})
    for run in runs:
        value = 38.0 + 4 * (run.seed - 3) if run.task.name == "listops" else 75.0
        if run.task.name == "listops" or run.seed == 3:
            keep(run, value, values={"test": value, "low": 1.0})
    runs = [replace(run, task=tasks[run.task.name]) for run in runs]
    text = report_of(tmp_path, replace(table, tasks=tasks), runs)[1]
    (line,) = [row for row in text.splitlines() if row.startswith("| average")]
    assert "| 57.50 | 58.50 | -1.00: no interval |" in line


def test_average_has_no_size_and_is_not_drawn(tmp_path):
    """The models of the tasks differ in size; two tasks of three seeds and one are two tasks."""
    table, runs = tiny_runs(tmp_path, ["softmax_2"])
    mgk = replace(table.rows["softmax_2"], name="mgk_1")
    runs += [replace(run, row=mgk) for run in runs]
    table = replace(table, rows={**table.rows, "mgk_1": mgk})
    for run in runs:
        listops = run.task.name == "listops"
        if listops or run.seed == 3:
            keep(run, 40.0 + run.seed, **({} if listops else {"parameters": 20_000_003}))
    report, text, _ = report_of(tmp_path, table, runs)
    lines = [row for row in text.splitlines() if row.startswith("| average")]
    assert all("| average | Softmax, 2 heads | test, % | 1 | 43.25 |" in line for line in lines)
    assert all(line.endswith("| – | – | – |") for line in lines)
    with (tmp_path / "out/ratios.csv").open() as file:
        found = [row["num_parameters"] for row in csv.DictReader(file)]
    assert found[2:] == ["20000003", "20000003", "", ""]
    assert "(2 tasks)" in report.page().figures["results"].claim


@pytest.mark.parametrize("count", [1, 4, 5, 7])
def test_the_finding_names_four_rows_and_counts_the_others(count):
    rows = [f"row{number}" for number in range(count)]
    summary = pd.DataFrame({"method": rows, "mean": 9.0, "task": "a", "metric": "b", "unit": "%"})
    found = Report.finding(cast(Any, SimpleNamespace(summary=summary)))
    assert [row in found for row in rows] == [number < 4 for number in range(count)]
    assert ("more" in found) == (count > 4)
    assert f"; and {count - 4} more." in found or count <= 4


def test_nothing_finished_is_no_report(tmp_path):
    table, runs = tiny_runs(tmp_path)
    with pytest.raises(ValueError, match="nothing to report"):
        Report(table, runs, "").write(tmp_path / "out")


@pytest.mark.parametrize(
    "options",
    [
        Options(shortened=True),
        Options(steps=10),
        Options(max_seq_len=24),
        Options(settings={"trainer.max_steps": 4}),
    ],
)
def test_shortened_runs_are_flagged_and_not_compared(tmp_path, options):
    table, runs = tiny_runs(tmp_path, options=options)
    for run in runs:
        keep(run, 30.0 + run.seed)
    report, text, written = report_of(tmp_path, table, runs)
    assert report.shortened
    assert written.splitlines()[0] == f"# A tiny table ({SHORTENED})"
    assert text.count("not compared: different protocol") == 2
    assert ", but not with the published values" in written


def test_where_nothing_is_published_nothing_is_said_of_it(tmp_path):
    table, runs = tiny_runs(tmp_path, options=Options(steps=10))
    _, _, written = report_of(tmp_path, replace(table, published_runs=0), runs, 30.0)
    (line,) = [line for line in written.splitlines() if line.startswith(f"**{SHORTENED}")]
    assert "shorter than those of the task file" in line
    assert "published" not in line


def test_differences_are_computed_from_the_configurations(tmp_path):
    more = Options(steps=8, max_seq_len=24, settings={"data.init_args.batch_size": 4})
    table, runs = tiny_runs(tmp_path, options=more)
    task, row = runs[0].task, runs[0].row
    found = {d.key: (d.published, d.here) for d in differences(task, row, more)}
    assert found == {
        "data.init_args.batch_size": (8, 4),
        "data.init_args.max_length": (32, 24),
        "data.init_args.max_length_tokens": (32, 24),
        "model.init_args.schedule_steps": (16, 8),
        "model.init_args.warmup_steps": (4, 2),
        "trainer.max_steps": (16, 8),
        "trainer.precision": ("16-mixed", "32-true"),
    }
    (plain,) = differences(task, row, Options())
    assert str(plain) == '`trainer.precision`: published "16-mixed", here "32-true"'
    assert differences(task, row, Options(as_published=True)) == []
    written = report_of(tmp_path, table, runs, 30.0)[2]
    assert written.count("`trainer.max_steps`: published 16, here 8") == 1
    assert "- seeds: published 5 runs, here 3, 4" in written
    assert "- published: another evaluation" in written


def test_what_is_known_of_a_published_row_is_listed_for_its_rows(tmp_path):
    note = "published: another variance"
    rows = {**TABLE["rows"], "mgk_1": {**TABLE["rows"]["mgk_1"], "not_in_config": [note]}}
    table, runs = tiny_runs(tmp_path, [], table={**TABLE, "rows": rows}, seeds=[3])
    assert report_of(tmp_path, table, runs, 30.0)[2].count(f"- {note} (mgk_1)") == 1


def test_what_as_published_has_switched_is_listed(tmp_path):
    table, runs = tiny_runs(tmp_path, options=Options(as_published=True))
    written = report_of(tmp_path, table, runs, 30.0)[2]
    line = '- as published (`--as_published`): `trainer.precision` "16-mixed", otherwise "32-true"'
    assert written.count(line) == 1
    table, runs = tiny_runs(tmp_path, options=Options())
    assert "--as_published" not in report_of(tmp_path, table, runs, 30.0)[2]


@pytest.mark.parametrize(
    ("facts", "warning"),
    [
        ({"selected_on_test": True}, "**Checkpoints were selected on the test split.**"),
        (
            {"report": {"test_during_training": "all"}},
            "**The test split was evaluated during training, for curves",
        ),
    ],
)
def test_use_of_the_test_split_by_one_row_is_told(facts, warning, tmp_path):
    table, runs = tiny_runs(tmp_path)
    assert warning not in report_of(tmp_path, table, runs, 30.0)[2]
    for run in runs:
        keep(run, 36.0, **(facts if run.row.name == "mgk_1" else {}))
    assert warning in report_of(tmp_path, table, runs)[2]


class Flushed(io.StringIO):
    """A terminal that knows what it has shown."""

    shown = ""

    def flush(self):
        """Show what was written."""
        self.shown = self.getvalue()


@pytest.mark.parametrize(
    ("rows", "base"), [(["softmax_2", "mgk_1"], "mgk_1"), (["softmax_2"], "softmax_2")]
)
def test_costs_of_a_step_are_ratios_to_the_baseline_or_else_to_the_first_row(
    rows, base, tmp_path, monkeypatch
):
    table, runs = tiny_runs(tmp_path)
    times = {"softmax_2": [2.0, 4.0, 6.0], "mgk_1": [1.0, 4.0, 2.0]}
    terminal = Flushed()

    def timed(steps, **options):
        assert "measuring one training step" in terminal.shown  # before it takes a minute
        return {name: times[name] for name in steps}

    counted = {name: dict(zip(("parameters", "macs"), COUNTS[name], strict=True)) for name in rows}
    measured = "lit_probattn.compare.measured"
    monkeypatch.setattr(f"{measured}.time_sides", timed)
    monkeypatch.setattr(f"{measured}.counts", lambda run: counted[run.row.name])
    monkeypatch.setattr(f"{measured}.peak_bytes", lambda *_: 4096)
    monkeypatch.setattr(sys, "stdout", terminal)
    for run in runs:
        if run.row.name in rows and run.task.name == "listops":
            keep(run, 10.0)
    found = MeasuredReport(replace(table, baseline="mgk_1"), runs, "command").measured
    assert list(found) == [("listops", name) for name in rows]
    for name in rows:
        row, pairs = found["listops", name], zip(times[name], times[base], strict=True)
        assert row["step_time_ratio"] == statistics.median(own / other for own, other in pairs)
        assert row["parameters_ratio"] == COUNTS[name][0] / COUNTS[base][0]
        assert row["macs_ratio"] == COUNTS[name][1] / COUNTS[base][1]
        assert row["peak_memory_bytes_ratio"] == 1


def test_ratios_without_a_run_of_the_baseline_name_the_row_that_they_refer_to(
    tmp_path, monkeypatch
):
    table, runs = tiny_runs(tmp_path, [])
    measure_nothing(monkeypatch)
    monkeypatch.setattr(
        "lit_probattn.compare.measured.time_sides",
        lambda steps, **_: {name: [1.0] * (3 if len(steps) == 1 else 9) for name in steps},
    )
    for run in runs:
        if run.task.name == "listops" or run.row.name == "softmax_2":
            keep(run, 10.0)
    text = MeasuredReport(replace(table, baseline="mgk_1"), runs, "command").text()
    mgk, softmax = (table.rows[name].label for name in ("mgk_1", "softmax_2"))
    assert (
        f"**The baseline {mgk} has no finished run on retrieval: ratios of costs are relative to "
        f"{softmax}.**"
    ) in text
    assert any(line.startswith("Cheapest on listops, ratio to the baseline: ") for line in text)
    assert "medians over 3 to 9 rounds" in text[-1]


def test_peak_memory_is_without_what_libraries_allocate_at_first_use(tmp_path, monkeypatch):
    """The first step allocates 400 kB that are never freed; every step allocates 8 kB."""
    table, runs = tiny_runs(tmp_path)
    kept = []

    def step():
        kept.extend([] if kept else [torch.zeros(100_000)])
        torch.zeros(2000)

    counted = {"parameters": 1000, "macs": 7}
    monkeypatch.setattr("lit_probattn.compare.measured.counts", lambda run: counted)
    monkeypatch.setattr("lit_probattn.compare.measured.training_step", lambda *_: step)
    for run in runs:
        keep(run, 10.0)
    rows = MeasuredReport(table, runs, "command").measured
    assert [row["peak_memory_bytes"] for row in rows.values()] == [8000, 8000]


@pytest.mark.parametrize("logged", [True, False])
def test_the_picture_of_curves_has_those_of_the_test_split_dashed(tmp_path, logged):
    _, runs = tiny_runs(tmp_path)
    results = []
    for number, run in enumerate(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        log = {"step": [4, 8], "train/loss": [2.0, 1.0], "val/accuracy": [0.2, 0.3]}
        log |= {"test/accuracy": [0.4, 0.1]} if logged else {}
        pd.DataFrame(log).to_csv(folder / "metrics.csv", index=False)
        results.append((run, {"run_folder": str(folder)}))
    drawn = SimpleNamespace(results=results)
    _, axis = MeasuredReport.learning_curves(cast(Any, drawn)).axes
    dashed = [line for line in axis.lines if line.get_linestyle() == "--"]
    assert len(axis.lines) - len(dashed) == len({run.row.name for run in runs})
    assert [line.get_ydata().tolist() for line in dashed] == [[40.0, 10.0]] * 2 * logged
    assert ("(dashed: test)" in axis.get_ylabel()) == logged


@pytest.mark.parametrize("moved", [True, False])
def test_runs_whose_folders_were_moved_or_removed_are_reported(moved, tmp_path, monkeypatch):
    """The curves of a moved folder are drawn; a run without one has its numbers, and is named."""
    measure_nothing(monkeypatch)
    table, runs = tiny_runs(tmp_path)
    log = {"step": [4, 8], "train/loss": [2.0, 1.0], "val/accuracy": [0.2, 0.3]}
    for run in runs:
        folder = run.place.runs / run.run_name / "0"
        folder.mkdir(parents=True)
        pd.DataFrame(log).to_csv(folder / "metrics.csv", index=False)
        keep(run, 30.0, run_folder=str(folder))
    if moved:
        place = replace(runs[0].place, runs=runs[0].place.runs.rename(tmp_path / "moved"))
        runs = [replace(run, place=place) for run in runs]
    else:
        shutil.rmtree(runs[0].place.runs / runs[0].run_name)
    report = MeasuredReport(table, runs, "command")
    report.write(tmp_path / "out")
    assert (tmp_path / "out/figures/learning_curves.png").is_file()
    written = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert "(n = 2)" in written
    named = [line for line in written.splitlines() if "metrics.csv" in line]
    assert [runs[0].label in line for line in named] == [True] * (not moved)
    for run in runs:
        shutil.rmtree(run.place.runs / run.run_name, ignore_errors=True)
    assert not report.figures()


def test_curves_of_more_variants_than_colours_have_several_rows_of_panels(tmp_path):
    _, runs = tiny_runs(tmp_path)
    log = {"step": [4, 8], "train/loss": [2.0, 1.0], "val/accuracy": [0.2, 0.3]}
    pd.DataFrame(log).to_csv(tmp_path / "metrics.csv", index=False)
    rows = [replace(runs[0].row, name=f"mine{n}", method=f"mine{n}") for n in range(17)]
    results = [(replace(runs[0], row=row), {"run_folder": str(tmp_path)}) for row in rows]
    drawn = SimpleNamespace(results=results)
    panes = MeasuredReport.learning_curves(cast(Any, drawn)).axes
    assert [len(axis.lines) for axis in panes] == [16, 16, 1, 1]
    assert len({line.get_color() for line in panes[0].lines}) == 16


def test_defaults_stand_for_what_a_configuration_leaves_out(tmp_path):
    _, runs = tiny_runs(tmp_path)
    options = Options(settings={"data.init_args.generator_seed": 7, "model.init_args.lr": 1e-3})
    found = {d.key: (d.published, d.here) for d in differences(runs[0].task, runs[0].row, options)}
    assert found["data.init_args.generator_seed"] == (0, 7)
    assert "model.init_args.lr" not in found
    assert default_of(runs[0].config, "model.init_args.weight_decay") == 0.0
    assert default_of(runs[0].config, "run.nothing") is None


def test_attention_of_the_released_code_is_a_difference(tmp_path):
    table = yaml.safe_load(yaml.safe_dump(TABLE))
    table["rows"]["mgk_1"]["as_released"] = "configs/attention/as_released/lra/mgk.yaml"
    released = {"model.init_args.lr": 0.5}
    listops = {**TASKS["listops"], "as_released": released}
    write_tables(tmp_path, table, {**TASKS, "listops": listops})
    tiny = read_table("tiny", tmp_path)
    task, options = tiny.tasks["listops"], Options(as_released=True)
    keys = {d.key for d in differences(task, tiny.rows["mgk_1"], options)}
    assert "model.init_args.attention.init_args.prior_share" in keys
    heads = "model.init_args.attention.init_args.num_heads"
    assert overrides(task, tiny.rows["mgk_1"], options) == {heads: 1, **released}
    assert overrides(task, tiny.rows["mgk_1"], Options()) == {heads: 1}
    assert overrides(task, tiny.rows["softmax_2"], options) == {heads: 2}  # has none


def with_fish(tmp_path, **arguments):
    """The tiny table with a noisy row, and its runs of one seed with results."""
    table = yaml.safe_load(yaml.safe_dump(TABLE))
    set_ = {"num_heads": 2, "num_global_heads": 1, **arguments}
    row = {"method": "FiSH", "heads": "", "attention": "configs/attention/fish.yaml", "set": set_}
    table["rows"]["fish_1"] = {**row, "published": {"listops": 35.0}}
    return tiny_runs(tmp_path, table=table, seeds=[3])


@pytest.mark.parametrize(
    ("at_eval", "sentence"),
    [
        (True, "Noise at evaluation is on, as a function of seed and sample: FiSH."),
        (False, "Noise at evaluation is off, so these are evaluated as their Hard variants: FiSH."),
    ],
)
def test_the_report_says_whether_noise_is_drawn_at_evaluation(tmp_path, at_eval, sentence):
    table, runs = with_fish(tmp_path, noise_at_eval=at_eval)
    assert sentence in report_of(tmp_path, table, runs, 30.0)[2]


def test_unequal_sides_are_flagged_before_the_table(tmp_path):
    table, runs = with_fish(tmp_path, dropout=0.0)
    for run in runs:
        is_fish = run.row.name == "fish_1"
        chosen = {"fish (cpu, float32)": "blockwise"} if is_fish else {"softmax (cpu)": "sdpa"}
        keep(run, 30.0, backends=chosen)
    written = report_of(tmp_path, table, runs)[2]
    above = written.partition("| task |")[0]
    assert (
        "**Unequal settings: attention dropout is 0.0 (fish_1) and 0.1 (baseline softmax_2):"
        in above
    )
    assert (
        "**Unequal settings: backend is blockwise (fish_1) and sdpa (baseline softmax_2): this "
        "affects time, and scores only by rounding.**" in above
    )
    assert "(mgk_1)" not in above
    assert "precision" not in above


def test_unequal_sides_are_those_of_every_task(tmp_path):
    """Backends differ only on the second one."""
    table = yaml.safe_load(yaml.safe_dump(TABLE))
    table["rows"]["mgk_1"]["published"]["retrieval"] = 79.0
    tiny, runs = tiny_runs(tmp_path, [], table=table, seeds=[3])
    for run in runs:
        second = (run.task.name, run.row.name) == ("retrieval", "mgk_1")
        keep(run, 30.0, backends={"attention (cpu)": "blockwise" if second else "sdpa"})
    written = report_of(tmp_path, tiny, runs)[2]
    (line,) = [line for line in written.splitlines() if "Unequal settings" in line]
    assert line.startswith(
        "retrieval: **Unequal settings: backend is blockwise (mgk_1) and sdpa (baseline softmax_2)"
    )


def drawn(values, monkeypatch, tmp_path, options=None):
    """The panel of the results, with values by row and seed."""
    figures = []
    tmp_path.mkdir(exist_ok=True)

    def keep_figure(figure, *_):
        figures.append(figure)
        return []

    monkeypatch.setattr(page_module, "save_figure", keep_figure)
    table, runs = tiny_runs(tmp_path, options=options)
    for run in runs:
        found = values.get(run.row.name, [])
        if run.seed - 3 < len(found):
            keep(run, found[run.seed - 3])
    report_of(tmp_path, table, runs)
    return figures[0]


def test_spread_is_drawn_where_the_caption_says_so(tmp_path, monkeypatch):
    several = drawn({"softmax_2": [36.0, 37.5], "mgk_1": [30.0]}, monkeypatch, tmp_path / "2")
    one = drawn({"softmax_2": [36.0], "mgk_1": [30.0]}, monkeypatch, tmp_path / "1")
    texts = [(tmp_path / name / "out/report.md").read_text(encoding="utf-8") for name in "21"]
    assert "mean ± standard deviation over seeds (n − 1)" in texts[0]
    assert "one seed, without error estimate" in texts[1]
    (bars,), nothing = ([c for c in f.axes[0].containers if c.has_xerr] for f in (several, one))
    assert nothing == []
    # A row with one seed has no bar.
    (ends,) = [end for end in bars.lines[2][0].get_segments() if len(end)]
    assert ends[1][0] - ends[0][0] == pytest.approx(2 * statistics.stdev([36.0, 37.5]))


def test_noise_does_not_fill_the_axis(tmp_path, monkeypatch):
    values = {"softmax_2": [36.9, 37.1], "mgk_1": [36.8, 37.0]}
    figure = drawn(values, monkeypatch, tmp_path)
    low, high = figure.axes[0].get_xlim()
    assert high - low >= 10 * statistics.stdev(values["softmax_2"])
    assert low < 36.0  # the published value of mgk_1


@pytest.mark.parametrize(
    ("shortened", "values", "is_drawn"),
    [(True, 90.0, False), (True, 38.0, True), (False, 90.0, True)],
)
def test_numbers_of_another_protocol_do_not_squeeze_ours(
    shortened, values, is_drawn, monkeypatch, tmp_path
):
    found = {"softmax_2": [values, values + 0.5], "mgk_1": [values - 0.5, values]}
    axis = drawn(found, monkeypatch, tmp_path, Options(shortened=shortened)).axes[0]
    low, high = axis.get_xlim()
    printed = [row["published"]["listops"] for row in TABLE["rows"].values()]
    assert (low < min(printed)) == is_drawn
    assert low < values - 0.5 < values + 0.5 < high
    told = f"\npublished: {min(printed):g} to {max(printed):g}, off this axis"
    assert axis.get_xlabel().endswith(told) != is_drawn
    marks = [part for part in axis.collections if isinstance(part, PathCollection)]
    diamonds = [part for part in marks if len(part.get_facecolor()) == 0]
    assert [part.get_edgecolor()[:, 3].tolist() for part in diamonds] == [[1.0]] * is_drawn
    protocol = "with a different, longer protocol" if shortened else "with the same protocol"
    assert f"published values, {protocol};" in (tmp_path / "out/report.md").read_text(
        encoding="utf-8"
    )


def test_one_seed_does_not_push_published_numbers_off_the_axis(monkeypatch, tmp_path):
    axis = drawn({"softmax_2": [36.0]}, monkeypatch, tmp_path, Options(shortened=True)).axes[0]
    assert "off this axis" not in axis.get_xlabel()
    low, high = axis.get_xlim()
    assert low < min(row["published"]["listops"] for row in TABLE["rows"].values()) < high


def test_pictures_say_where_they_come_from(tmp_path):
    table, runs = tiny_runs(tmp_path)
    keep(runs[0], 36.0)
    report_of(tmp_path, table, runs)
    told = Image.open(tmp_path / "out/figures/results.png").text["Description"]
    assert told.startswith("A tiny table | Small dots: one seed each")
    assert "| a proc" in told
    assert told.endswith("| abcdef1 | python -m lit_probattn.reproduce tiny")


def test_long_names_of_rows_stay_inside_the_picture():
    names = ["softmax, 4 heads", "softmax run.init_from=runs/pretrained/0/last, 4 heads, annealed"]
    metrics = ("exact_match", "f1")
    summary = pd.DataFrame(
        {"task": "squad", "metric": metric, "row": row, "method": row, "mean": 9.0, "std": 1.0}
        | {"unit": "as logged", "published": None}
        for metric in metrics
        for row in names
    )
    rows = pd.DataFrame({"task": "squad", "row": names} | {f"value {m}": 9.0 for m in metrics})
    figure = draw(summary, rows, lambda _: names[0], compared=True)
    figure.canvas.draw()
    left, right = figure.axes
    shown = [label.get_text() for label in left.get_yticklabels()]
    assert [text.replace("\n", " ").replace(" ", "") for text in shown] == [
        name.replace(" ", "") for name in names
    ]
    assert not any(label.get_visible() for label in right.get_yticklabels())
    for text in [axis.xaxis.label for axis in (left, right)] + left.get_yticklabels():
        place = text.get_window_extent()
        assert figure.bbox.x0 <= place.x0 < place.x1 <= figure.bbox.x1, text.get_text()
    assert min(axis.get_window_extent().width for axis in (left, right)) > 0.25 * figure.bbox.width
    plt.close(figure)


@pytest.mark.parametrize(("mgk", "verdict"), [(30.0, "same direction"), (40.0, "differs")])
def test_a_printed_number_has_a_verdict_whose_order_is_that_of_the_baseline(mgk, verdict, tmp_path):
    """Printed are 37 for softmax and 36 for MGK, which is then below it."""
    table, runs = tiny_runs(tmp_path)
    for run in runs:
        keep(run, (mgk if run.row.name == "mgk_1" else 37.0) + 0.02 * (run.seed - 3.5))
    report, _, written = report_of(tmp_path, table, runs)
    found = report.summary[report.summary["task"] == "listops"].set_index("row")["verdict"]
    assert found.to_dict() == {"softmax_2": "agrees", "mgk_1": verdict}
    assert f"| {verdict} |" in written
    assert written.count("Verdicts: *agrees*") == 1
