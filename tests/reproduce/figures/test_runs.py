"""Figures of trained models: verdicts from curves and studies, and two real runs."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import yaml

from lit_probattn.compare.command import make_runs
from lit_probattn.compare.flags import Place
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.tables import Part
from lit_probattn.reproduce.__main__ import main
from lit_probattn.reproduce.figures.runs import RunFigure, StudyFigure
from lit_probattn.reproduce.figures.tables import rows_of_tables
from tests.compare.tiny import finished, write_tables

STEPS = np.arange(10, 210, 10)
FIGURE = {
    "title": "A tiny figure",
    "kind": "figure",
    "runs": {"tiny": ["listops"]},
    "says": {"one": {"says": "It is so.", "holds": []}},
    "panels": [
        {"draw": "curves", "metric": "train/loss", "log": "xy"},
        {"draw": "curves", "metric": "val/accuracy", "rows": ["mgk_1"]},
    ],
}
STUDIED = {
    "studies": {"rank": {"num_samples": 2}, "attention_maps": {"num_samples": 2}},
    "values": {
        "rank": {
            "study": "rank",
            "file": "rank.csv",
            "column": "rank",
            "where": {"layer": 1},
            "reduce": "mean",
        }
    },
}
RANK_PANELS = [
    {"draw": "histogram", "study": "rank", "file": "rank.csv", "x": "rank", "where": {"layer": 1}},
    {"draw": "figures", "study": "attention_maps", "file": "attention_maps.png"},
]


def claim(**words):
    return {"rows": ["mgk_1"], "is": "lower", "than": "softmax_2", **words}


def figure(folder, claims, *, seeds=(3, 4, 5), shift=0.0, studied=False, noise=0.05, options=None):
    """A figure whose runs are finished: MGK is `shift` above softmax, with noise between seeds.

    On the test split it is as much below.
    """
    part = {**FIGURE, "says": {"one": {"says": "It is so.", "holds": claims}}}
    made = RunFigure
    if studied:
        part, made = {**part, **STUDIED}, StudyFigure
    folder.mkdir(exist_ok=True)
    tables = write_tables(folder / "tables")
    table = rows_of_tables(Part("tiny_figure", tables, part), Place(), False)
    runs = make_runs(table, [], seeds, options or Options(), Place(runs=folder / "runs"))
    for number, run in enumerate(runs):
        logs = folder / "runs" / run.name / "0"
        logs.mkdir(parents=True)
        own = (shift if run.row.name == "mgk_1" else 0.0) + noise * np.sin(7.0 * number)
        loss = 1.0 + np.exp(-STEPS / 40) + own
        metrics = {"step": STEPS, "train/loss": loss, "val/accuracy": 1.0 - 0.2 * loss}
        metrics["test/accuracy"] = 0.2 * loss
        pd.DataFrame(metrics).to_csv(logs / "metrics.csv", index=False)
        values = {"test": 50.0 + float(own), "parameters": 1.0}
        finished(run, values=values, run_folder=str(logs))
    return made(table, runs, "command", part=part)


@pytest.mark.parametrize(
    ("words", "good", "bad"),
    [
        ({"curve": "train/loss", "at": "throughout"}, -0.3, 0.3),
        ({"curve": "train/loss", "at": "best"}, -0.3, 0.3),
        ({"curve": "val/accuracy", "at": "best", "is": "higher"}, -0.3, 0.3),
        ({"curve": "val/accuracy", "at": "reach"}, -0.3, None),
        ({"value": "test"}, -0.3, 0.3),
    ],
)
def test_verdicts_of_curves_and_values(words, good, bad, tmp_path):
    found = figure(tmp_path / "good", [claim(**words)], shift=good).findings
    assert list(found["verdict"]) == ["agrees"]
    if bad is not None:
        found = figure(tmp_path / "bad", [claim(**words)], shift=bad).findings
        assert list(found["verdict"]) == ["differs"]
    one = figure(tmp_path / "one", [claim(**words)], shift=good, seeds=(3,)).findings
    assert list(one["verdict"]) == ["same direction"]


@pytest.mark.parametrize("scored", [None, "all"])
def test_curves_of_the_test_split_stand_in_where_all_runs_have_logged_them(scored, tmp_path):
    words = claim(curve="val/accuracy", at="throughout", **{"is": "higher"})
    options = Options(settings={"run.test_during_training": scored} if scored else {})
    made = figure(tmp_path, [words], shift=0.3, options=options)
    part = {**made.part, "test_curves": {"val/accuracy": "test/accuracy"}, "note": "Of validation."}
    made = RunFigure(made.table, made.runs, "command", part=part)
    assert list(made.findings["verdict"]) == ["agrees" if scored else "differs"]
    name = "test/accuracy" if scored else "val/accuracy"
    assert name in made.findings["result"][0]
    assert [axis.get_ylabel() for axis in made.drawn()["figure"]().axes[:2]] == [
        "train/loss",
        name,
    ]
    note = made.text()[-1]
    assert note.startswith(
        "As in the paper, curves show the test split" if scored else "Of validation."
    )


def test_a_curve_that_crosses_is_not_always_better(tmp_path):
    made = figure(tmp_path, [claim(curve="train/loss", at="throughout")], shift=-0.3)
    assert "at 20 of 20 logged steps" in made.findings["result"][0]
    for run, result in made.runs_of("mgk_1"):
        path = tmp_path / "runs" / run.name / "0/metrics.csv"
        assert result["run_folder"] in str(path)
        table = pd.read_csv(path)
        table.loc[0, "train/loss"] = 3.0
        table.to_csv(path, index=False)
    again = RunFigure(made.table, made.runs, "command", part=made.part).findings
    assert list(again["verdict"]) == ["same direction"]
    assert "at 19 of 20 logged steps" in again["result"][0]


def test_settled_curves(tmp_path):
    claims = [{"rows": ["mgk_1"], "is": "lower", "than": 0.05, "curve": "train/loss"}]
    words = {**claims[0], "at": "settled"}
    made = figure(tmp_path, [words])
    assert made.findings["verdict"].iloc[0] in ("agrees", "same direction")
    assert "share of the change of train/loss" in made.findings["result"][0]
    strict = {**made.part, "says": {"one": {"says": "so", "holds": [{**words, "than": 1e-4}]}}}
    again = RunFigure(made.table, made.runs, "command", part=strict).findings
    assert again["verdict"].iloc[0] in ("differs", "inconclusive")


@pytest.mark.parametrize(("margin", "verdict"), [(0.0, "differs"), (0.5, "agrees")])
def test_comparable_is_within_a_margin(margin, verdict, tmp_path):
    words = claim(curve="train/loss", at="best", margin=margin)
    assert list(figure(tmp_path, [words], shift=0.2).findings["verdict"]) == [verdict]


@pytest.mark.parametrize(("printed", "verdict"), [(50.0, "agrees"), (55.0, "differs")])
def test_a_printed_value_lies_in_the_interval_or_not(printed, verdict, tmp_path):
    words = {"rows": ["softmax_2"], "is": "near", "than": printed, "value": "test"}
    assert list(figure(tmp_path, [words], noise=0.1).findings["verdict"]) == [verdict]
    one = figure(tmp_path / "one", [words], seeds=(3,)).findings
    assert list(one["verdict"]) == ["inconclusive"]


def test_a_sentence_is_no_better_than_its_weakest_part(tmp_path):
    parts = [claim(value="test"), claim(value="test", **{"is": "higher"})]
    found = figure(tmp_path, parts, shift=-0.5).findings
    assert list(found["verdict"]) == ["differs"]
    assert "(agrees); " in found["result"][0]
    assert found["result"][0].endswith("(differs)")


def studied(made, rank):
    """Write what the studies of every run would: ranks by row."""
    for run, _ in made.results:
        for study in made.studies.values():
            folder = study.folder(run)
            folder.mkdir(parents=True)
            (folder / "report.json").write_text("done")
        table = {"layer": [1, 1, 2], "rank": [rank[run.row.name] + run.seed, 8, 99]}
        pd.DataFrame(table).to_csv(made.studies["rank"].folder(run) / "rank.csv", index=False)


def test_verdicts_of_studies(tmp_path):
    words = claim(value="rank", **{"is": "higher"})
    made = figure(tmp_path, [words], studied=True)
    assert list(made.findings["verdict"]) == ["inconclusive"]  # nothing is studied
    part = {**made.part, "panels": RANK_PANELS}
    studied(made, {"mgk_1": 40, "softmax_2": 20})
    made = StudyFigure(made.table, made.runs, "command", part=part)
    assert list(made.findings["verdict"]) == ["agrees"]
    assert "difference: +10.00 [" in made.findings["result"][0]
    sample = made.sample("mgk_1", "rank")
    assert sample is not None
    assert sample.values == (25.5, 26.0, 26.5)
    axis = made.drawn()["figure"]().axes[0]
    assert sum(len(patch.get_xy()) > 2 for patch in axis.patches) == 2  # two rows, pooled seeds


@pytest.mark.slow
def test_two_real_runs_are_trained_studied_drawn_and_judged(tmp_path, capsys):
    tables = write_tables(tmp_path / "tables")
    holds = [claim(value="rank", **{"is": "higher"}), claim(curve="train/loss", at="throughout")]
    panels = [*FIGURE["panels"][:1], *RANK_PANELS]
    says = {"one": {"says": "It is so.", "holds": holds}}
    entry = {**FIGURE, **STUDIED, "panels": panels, "says": says}
    (tables / "tiny_figure.yaml").write_text(yaml.safe_dump(entry))
    words = ["tiny_figure", "--tables", str(tables), "--runs", str(tmp_path / "runs")]
    assert main([*words, "--seeds", "3", "--accelerator", "cpu"]) == 0
    out = tmp_path / "runs/reproduce/reports/tiny_figure"
    verdicts = pd.read_csv(out / "verdicts.csv")
    assert len(verdicts) == 1
    assert verdicts["verdict"][0] in ("same direction", "inconclusive")
    for name in ("figure", "studies1"):
        assert (out / f"figures/{name}.png").stat().st_size > 10_000
    rows = pd.read_csv(out / "rows.csv")
    assert rows["rank"].notna().all()
    results = [
        json.loads(p.read_text(encoding="utf-8"))
        for p in tmp_path.glob("runs/reproduce/results/*.jsonl")
    ]
    assert len(results) == 2
