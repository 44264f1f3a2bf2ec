"""Every figure of the five papers has a command, something to measure, and a judged sentence."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from lit_probattn.compare.command import make_runs
from lit_probattn.compare.flags import Place
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.tables import kinds
from lit_probattn.reproduce.__main__ import main
from lit_probattn.reproduce.figures.panels import Panel
from lit_probattn.reproduce.figures.registry import entry_of, figure_class
from lit_probattn.reproduce.figures.runs import RunFigure
from lit_probattn.reproduce.figures.sweeps import Panel as CostPanel
from lit_probattn.reproduce.figures.sweeps import SweepFigure
from tests.support.helpers import error_of

DRAWINGS = ["fish_figure1"]
FIGURES = [
    *(f"mgk_figure{number}" for number in range(1, 17)),
    *(f"fish_figure{number}" for number in range(2, 9)),
    *(f"low_rank_figure{number}" for number in ("1", "2", "3a", "3b", "4")),
    *(f"value_aware_figure{number}" for number in range(1, 4)),
]


def test_the_list_knows_every_figure():
    known = {name for name, part in kinds().items() if "figure" in name}
    assert set(FIGURES) | set(DRAWINGS) <= known
    assert all(kinds()[name]["kind"] == "drawing" for name in DRAWINGS)


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_something_to_measure_and_to_judge(name):
    part = kinds()[name]
    if part["kind"] == "sweep_figure":
        figure = SweepFigure(part, Path("runs"), "")
        sentences = [
            (config, sentence)
            for stem, config in figure.sweeps.items()
            for sentence in config.sentences
            if (sentence.figure or stem) == name
        ]
        assert sentences
        for panel in (CostPanel(**entry) for entry in part["panels"]):
            config = figure.sweeps[panel.sweep or part["sweeps"][0]]
            assert set(panel.variants or ()) <= set(config.variants)
            assert panel.mode in (None, *config.grid.mode)
        return
    made = figure_class(part)
    table = entry_of(part).table(part, Place(), False)
    assert table.pairs()
    assert table.baseline in table.rows
    report = made(table, [], "command", part)
    assert set(part["says"]) <= set(report.judges())
    assert part["says"]
    if not issubclass(made, RunFigure):
        return
    # Without a finished run every verdict is inconclusive; all names are known.
    assert list(report.findings["verdict"]) == ["inconclusive"] * len(part["says"])
    for panel in (Panel(**entry) for entry in part["panels"]):
        assert set(panel.rows or ()) <= set(table.rows)
        assert not panel.study or panel.study in report.studies
        assert panel.metric or panel.study
    assert set(report.values) >= {
        claim[key]
        for sentence in part["says"].values()
        for claim in sentence["holds"]
        for key in ("value", "than_value")
        if key in claim and claim[key] not in next(iter(table.tasks.values())).metrics
    }
    assert [draw() for draw in report.drawn().values()]
    plt.close("all")


@pytest.mark.parametrize("name", ["mgk_figure13", "fish_figure2", "value_aware_figure1"])
def test_shortened_figures_have_a_protocol_and_studies(name):
    part = kinds()[name]
    made = figure_class(part)
    table = entry_of(part).table(part, Place(), False)
    assert all(task.shortened for task in table.tasks.values())
    runs = make_runs(table, [], [0], Options(shortened=True), Place())
    report = made(table, runs, "command", part=part)
    assert set(report.studies) == set(part["studies"])


def test_a_sweep_that_is_not_measured_is_named(tmp_path):
    line = error_of(["mgk_figure4", "--report", "--runs", str(tmp_path)], main)
    assert f"no results in {tmp_path}/profiling/mgk_figure4" in line
    assert not Path(tmp_path / "reproduce").exists()
