"""A figure of costs from nothing: its sweep is run, drawn and judged."""

from __future__ import annotations

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from lit_probattn.reproduce.__main__ import main
from lit_probattn.reproduce.figures.sweeps import Panel
from profiling.measure.rows import row_store
from profiling.report.page import frame_of, load_results
from profiling.sweep.config import load_sweep
from tests.profiling.helpers import count_by_torch_alone, count_once
from tests.support.helpers import error_of
from tests.support.patching import check_figures

SWEEP = {
    "name": "tiny_figure",
    "model": {"kind": "attention", "head_dim": 8},
    "baseline": "softmax",
    "variants": {
        "softmax": {"attention": {"config": "configs/attention/softmax.yaml"}},
        "mgk": {"attention": {"config": "configs/attention/mgk.yaml"}, "heads_divisor": 2},
    },
    "grid": {"embed_dim": [16], "seq_len": [32], "num_heads": [2, 4], "mode": ["eval"]},
    "measure": ["cost"],
}


@pytest.fixture(autouse=True)
def _count_once(monkeypatch):
    count_once(monkeypatch)
    count_by_torch_alone(monkeypatch)


def write(folder, *bounds):
    claim = {"metric": "macs", "scope": "attention"}
    says = [{"says": "It needs fewer.", "holds": [{**claim, "below": bound}]} for bound in bounds]
    report = {"title": "Tiny", "paper": says, "notes": ["A remark."]}
    path = folder / "tiny_figure.yaml"
    path.write_text(yaml.safe_dump({**SWEEP, "report": report}, sort_keys=False))
    panel = {"title": "FLOPs", "metric": "macs", "x": "grid_heads"}
    panels = [{**panel, "scope": "attention"}, {**panel, "scope": "attention", "ratio": False}]
    entry = {"title": "Tiny", "kind": "sweep_figure", "sweeps": [str(path)], "panels": panels}
    tables = folder / "tables"
    tables.mkdir(exist_ok=True)
    (tables / "tiny_figure.yaml").write_text(yaml.safe_dump(entry))
    return ["tiny_figure", "--tables", str(tables), "--runs", str(folder / "runs")]


def test_a_sweep_is_run_drawn_and_judged(tmp_path, monkeypatch, capsys):
    check_figures(monkeypatch)
    words = write(tmp_path, 1, 0.5)
    assert main([*words, "--dry-run"]) == 0
    assert "4 points on cpu" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert main(words) == 0
    out = tmp_path / "runs/reproduce/reports/tiny_figure"
    assert list(pd.read_csv(out / "verdicts.csv")["verdict"]) == ["agrees", "differs"]
    assert (out / "figures/figure.png").is_file()
    text = (out / "report.md").read_text(encoding="utf-8")
    for part in ("Command: ", "It needs fewer.", "A remark.", "Hardware: meta tensors"):
        assert part in text
    elsewhere = tmp_path / "elsewhere"
    assert main([*words, "--report", "--out", str(elsewhere)]) == 0
    assert (elsewhere / "report.md").is_file()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"point_id": "x"}, "has two results (cost, "),  # with other arguments
        ({"point_id": "x", "variant": "old"}, "rows of the variant 'old', which is not in"),
    ],
)
def test_rows_of_another_sweep_are_refused(tmp_path, change, problem):
    words = write(tmp_path, 1)
    assert main(words) == 0
    folder = tmp_path / "runs/profiling/tiny_figure"
    rows = load_results(folder)
    more = [row.model_copy(update=change) for row in rows if row.point_id == rows[0].point_id]
    row_store(folder / "rows.1-of-2.jsonl").add(*more)
    assert problem in error_of([*words, "--report"], main, alone=False)


def test_a_sweep_without_a_sentence_is_refused(tmp_path):
    words = write(tmp_path, 1)
    path = tmp_path / "tiny_figure.yaml"
    sweep = {**SWEEP, "report": {"title": "Tiny", "paper": ["It needs fewer."]}}
    path.write_text(yaml.safe_dump(sweep, sort_keys=False))
    assert "missing claim with `holds` for this figure" in error_of(words, main, alone=False)


def test_variants_of_one_class_have_different_lines(tmp_path):
    """Such as GFiSH from 2, 4 and 6 score maps in FiSH's figure 7."""
    words = write(tmp_path, 1)
    path = tmp_path / "tiny_figure.yaml"
    variants = {
        **SWEEP["variants"],
        "hard": {"attention": {"config": "configs/attention/mgk.yaml"}},
    }
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**content, "variants": variants}, sort_keys=False))
    assert main(words) == 0
    config = load_sweep(str(path))
    frame = frame_of(config, tmp_path / "runs/profiling/tiny_figure")
    axis = Figure().add_subplot()
    Panel("FLOPs", "macs", "grid_heads", scope="attention").draw(axis, config, frame)
    lines = axis.get_legend().get_lines()
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [
        "MGK (mgk)",
        "MGK (hard)",
    ]
    assert len({line.get_color() for line in lines}) == 2
