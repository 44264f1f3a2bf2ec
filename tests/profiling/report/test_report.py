"""Reports: what they say, and what they refuse."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.provenance import command_line
from lit_probattn.experiments.page import write_front_page
from profiling.cost.exact import layer_of_row
from profiling.measure.rows import read_rows, to_frame
from profiling.report.efficiency import efficiency_lines
from profiling.report.page import (
    agreement,
    frame_of,
    load_results,
    page_of,
    require_baselines,
    unequal_lines,
    write_report,
)
from profiling.report.ratios import METRICS, crossovers, ratio_table, relative_errors
from profiling.sweep.config import Figure
from profiling.sweep.run import run_sweep
from tests.profiling.helpers import MGK, append_rows, attention, fork_workers, sweep
from tests.support.pages import Page
from tests.support.patching import check_figures, spare_drawing
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A small sweep with a crossover: MGK with as many heads costs more."""
    folder = tmp_path_factory.mktemp("results")
    config = sweep(
        variants={
            "softmax": attention(),
            "mgk": attention(MGK, num_heads=1),
            "mgk_full": attention(MGK),
        },
        grid={"embed_dim": [8, 16], "seq_len": [8, 32]},
    )
    run_sweep(config, folder, ROOT, stream=lambda _: None)
    return config, folder


@pytest.fixture
def rows(results):
    return read_rows(results[1] / "rows.jsonl")


@pytest.mark.parametrize("drawn", ["checked", pytest.param("drawn", marks=pytest.mark.slow)])
def test_report_has_all_its_parts(drawn, results, tmp_path, monkeypatch):
    if drawn == "checked":
        check_figures(monkeypatch)
        monkeypatch.setattr("seaborn.matrix._draw_figure", lambda figure: None)
    config, folder = results
    figure = Figure(title="A figure", paper=["it is less."])
    config = config.model_copy(update={"report": figure})
    files = write_report(config, folder, tmp_path, html=True)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for part in ("Command:", "Data:", "Convention:", "Hardware:", "Versions:", "2 FLOP"):
        assert part in "\n".join(text.splitlines()[:20])
    assert "| multiply-adds | attention layer | mgk_full / softmax | eval | counted |" in text
    told = [line for line in text.splitlines() if not line.startswith("- Command: ")]
    assert "measure" not in "\n".join(told).replace("counted or measured, ", "")
    assert "closed form" in text
    assert "operations as the paper prints them" in text
    assert "No point failed or was skipped." in text
    for path in files:
        assert path.stat().st_size < (2_000_000 if path.suffix == ".html" else 300_000)
    assert {p.suffix for p in files} == {".md", ".json", ".csv", ".png", ".svg", ".html"}
    ratios = pd.read_csv(tmp_path / "ratios.csv")
    assert ratios["relative_gap"].abs().max() == 0.0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml;base64,") == text.count("](figures/") > 0
    assert page.count("<table>") == text.count("\n| --- |") > 0
    assert "http" not in page.replace("http://www.w3.org", "")


MARKUP = "![x](/etc/hostname) [x](http://x) <img src=x>\n\n# Heading\n\n![y](y)"


@pytest.fixture(scope="module")
def of_others(results, tmp_path_factory):
    """The files of a report of rows and names of others, made by their own commands."""
    config, folder = results
    place = tmp_path_factory.mktemp("others")
    columns = ("device_name", "versions", "git_revision", "backend", "backend_note", "dtype")
    said = {column: f"{column} {MARKUP}" for column in columns}
    said["command"] = "python -m profiling sweep --config my/own.yaml"
    rows = [
        row.model_copy(
            update={**said, **({"variant": MARKUP} if row.variant == "mgk_full" else {})}
        )
        for row in read_rows(folder / "rows.jsonl")
    ]
    append_rows(place / "rows.jsonl", rows)
    names = {MARKUP if name == "mgk_full" else name: v for name, v in config.variants.items()}
    given = ["--config", str(Path.cwd() / "my/own.yaml"), "--results", "/elsewhere/results"]
    with pytest.MonkeyPatch.context() as patch:
        spare_drawing(patch)
        patch.setattr("seaborn.matrix._draw_figure", lambda figure: None)
        patch.setattr("sys.argv", ["profiling", "report", *given])
        config = config.model_copy(update={"variants": names})
        files = write_report(config, place, place / "out", html=True, command=command_line())
    return config, place / "out", files


def test_the_commands_are_those_that_were_given(of_others):
    """Not a path made from the sweep's name."""
    config, out, _ = of_others
    text = (out / "report.md").read_text(encoding="utf-8")
    then = "python -m profiling report --config my/own.yaml --results results"
    assert f"`python -m profiling sweep --config my/own.yaml`, then `{then}`" in text
    (image, *_) = sorted((out / "figures").glob("*.png"))
    assert "profiling sweep --config my/own.yaml" in Image.open(image).text["Description"]
    assert f"configs/profiling/{config.name}.yaml" not in text


def test_what_rows_of_others_say_and_names_of_variants_stay_text(of_others):
    """Names also in the lines on what costs more, and on what has no values."""
    _, out, files = of_others
    assert "costs more than" in (out / "report.md").read_text(encoding="utf-8")
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    images = [path for path in files if path.suffix == ".png"]
    assert len(page.attributes("img", "src")) == len(images) > 0
    assert all(a.startswith("data:image/svg+xml") for a in page.attributes("img", "src"))
    assert not page.attributes("a", "href")
    assert "Heading" not in page.texts["h1"]
    assert {path.parent for path in images} == {out / "figures"}


@pytest.mark.usefixtures("sketches")
def test_failed_points_are_listed_and_a_baseline_with_other_dropout_is_flagged_on_top(tmp_path):
    config = sweep(
        variants={"softmax": attention(), "mgk": attention(MGK, num_heads=1, dropout=0.1)},
        model={"kind": "attention", "head_dim_divisor": 8},
        grid={"embed_dim": [12, 16], "seq_len": [8]},
    )
    run_sweep(config, tmp_path, ROOT, stream=lambda _: None)
    write_report(config, tmp_path, tmp_path / "out")
    text = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    begin = "**Unequal settings: attention dropout is 0.1 (mgk) and 0.0 (baseline softmax): "
    assert lines[2].startswith(begin)
    assert [line for line in lines if line.startswith("**Unequal")] == [lines[2]]
    assert "Points without values" in text
    assert "is not divisible by head_dim_divisor" in text


def test_unequal_backends_and_precisions_are_flagged(rows):
    frame = to_frame(rows)
    assert unequal_lines(frame) == []
    is_mgk = frame["variant"] == "mgk"
    frame.loc[is_mgk, "backend_note"] = "blockwise: bmm"
    frame.loc[is_mgk, "dtype"] = "bfloat16"
    (backend, precision) = unequal_lines(frame)
    assert "backend is blockwise (mgk) and reference (baseline softmax):" in backend
    assert "precision is bfloat16 (mgk) and float32 (baseline softmax):" in precision


def test_ratios_join_the_same_place(rows):
    frame = to_frame(rows)
    ratios = ratio_table(frame)
    macs = ratios[(ratios["metric"] == "macs") & (ratios["variant"] == "mgk")]
    assert len(macs) == 4
    for _, row in macs.iterrows():
        place = (frame["embed_dim"] == row["embed_dim"]) & (frame["seq_len"] == row["seq_len"])
        here = frame[place & (frame["source"] == "measured")].set_index("variant")["macs"]
        assert row["ratio_measured"] == here["mgk"] / here["softmax"]
    assert set(ratios["variant"]) == {"mgk", "mgk_full"}
    metrics = list(ratios["metric"].unique())
    assert metrics == [name for name in METRICS if name in metrics], "in the order of reports"
    assert list(ratios["variant"][:8]) == ["mgk"] * 4 + ["mgk_full"] * 4
    assert list(zip(macs["embed_dim"], macs["seq_len"], strict=True)) == [
        *((8, 8), (8, 32), (16, 8), (16, 32)),
    ]


@pytest.mark.parametrize(("column", "other"), [("backend", "blockwise"), ("device_name", "x")])
def test_points_whose_baseline_has_another_backend_or_device_are_noted(
    results, rows, column, other
):
    config, frame = results[0], to_frame(rows)
    assert require_baselines(config, frame) == []
    frame.loc[frame["variant"] == "mgk", column] = other
    (note,) = require_baselines(config, frame)
    assert note.startswith("mgk: no ratios at 4 points, where softmax has values only with another")


def test_ratios_are_those_to_the_baselines_of_the_file(results):
    """All of them: a file may name another baseline after the measurement."""
    config = results[0].model_copy(update={"baseline": "mgk"})
    page = page_of(config, frame_of(config, results[1]))
    ratios = pd.read_csv(io.StringIO(page.tables["ratios"]))
    assert set(zip(ratios["variant"], ratios["baseline"], strict=True)) == {
        *(("softmax", "mgk"), ("mgk_full", "mgk")),
    }
    found = {row["variant"]: row["baseline"] for row in page.about["variants"]}
    assert found == {"softmax": "mgk", "mgk": "", "mgk_full": "mgk"}


def test_crossover_is_interpolated_in_log_length():
    base = {"metric": "time_median_s", "variant": "v", "baseline": "b", "embed_dim": 8}
    base |= {"grid_heads": None, "batch_size": 1, "mode": "eval", "backend": "x", "dtype": "y"}
    base |= {"device_name": "d", "scope": "attention"}

    def cross(*ratios):
        lengths = [64 * 4**i for i in range(len(ratios))]
        rows = [
            {**base, "seq_len": n, "ratio_measured": r}
            for n, r in zip(lengths, ratios, strict=True)
        ]
        return crossovers(pd.DataFrame(rows))["crossover"].tolist()

    assert cross(1.5, 0.5, 0.4) == ["N ≈ 128"]
    assert cross(1.2, 0.4) == ["N ≈ 91"]  # a quarter of the way: 64 · 4^(1/4)
    assert cross(0.8, 1.1, 0.8) == ["N ≈ 406"]  # from the last crossing on: 256 · 4^(1/3)
    assert cross(0.9, 0.5) == ["always within the grid"]
    assert cross(0.9, 1.5) == ["never within the grid"]
    assert cross(0.9) == []


def test_errors_are_relative_to_what_was_measured(rows):
    """A closed form that is a quarter too large at one place of twelve."""
    index = next(
        i for i, row in enumerate(rows) if row.source == "analytic" and row.variant == "mgk"
    )
    rows[index] = rows[index].model_copy(update={"macs": rows[index].macs * 5 // 4})
    errors = relative_errors(to_frame(rows))
    errors = errors[errors["error"] != 0]
    assert errors[["variant", "metric"]].to_numpy().tolist() == [["mgk", "macs"]]
    assert errors["error"].item() == pytest.approx(0.25, rel=1e-3)
    assert "| multiply-adds | counted | closed form | 12 | 11 | 2.50e-01 |" in agreement(
        to_frame(rows)
    )


@pytest.mark.usefixtures("sketches")
def test_a_sweep_of_memory_alone_has_a_report(tmp_path, monkeypatch):
    """A sweep on a GPU counts nothing, so no row has a note of a backend."""
    fork_workers(monkeypatch)
    monkeypatch.setattr("profiling.sweep.predictions.predict", lambda point: (6_000, 2_000))
    config = sweep(measure=["memory"], grid={"embed_dim": [8], "seq_len": [8], "mode": ["eval"]})
    run_sweep(config, tmp_path / "rows", Path.cwd(), stream=str)
    assert all(row.backend_note is None for row in read_rows(tmp_path / "rows" / "rows.jsonl"))
    (page, *_) = write_report(config, tmp_path / "rows", tmp_path / "report")
    assert "## Ratios" in page.read_text(encoding="utf-8")


def test_no_results(tmp_path):
    with pytest.raises(ConfigError, match="no results in"):
        write_report(sweep(), tmp_path, tmp_path / "out")


def of(**change):
    return lambda rows: [row.model_copy(update=change) for row in rows]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (of(sweep="another"), "rows of the sweep 'another', expected 'small'"),
        (of(variant="mgk_ful"), "rows of the variant 'mgk_ful', .*; did you mean 'mgk_full'"),
        (lambda rows: rows[:-2] + of(versions="torch 1.0")(rows[-2:]), "mixes versions"),
        (lambda rows: rows + of(point_id="x")(rows[-2:]), r"mgk_full has two results \(cost, "),
        (lambda rows: [r for r in rows if r.variant != "softmax"], "no baseline row: softmax"),
    ],
)
def test_rows_of_another_sweep_are_refused(results, rows, tmp_path, change, problem):
    append_rows(tmp_path / "rows.jsonl", change(rows))
    with pytest.raises(ConfigError, match=problem):
        write_report(results[0], tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_that_count_one_point_differently_are_refused(results, rows, tmp_path):
    append_rows(tmp_path / "rows.jsonl", rows)
    other = [row.model_copy(update={"macs": row.macs + 1}) for row in rows]
    append_rows(tmp_path / "rows.1-of-2.jsonl", other)
    with pytest.raises(ConfigError, match=r"counts of the point .* differ"):
        write_report(results[0], tmp_path, tmp_path / "out")


@pytest.mark.parametrize("status", ["failed", "skipped"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_point_that_one_shard_could_not_measure_is_that_of_another(
    rows, tmp_path, status, is_first
):
    """As on machines with less memory; a skipped point also has the row of its prediction."""
    point = [row for row in rows if row.point_id == rows[0].point_id]
    lost = {"status": status, "rows_in_point": 1, "macs": None, "num_parameters": None}
    files = ("rows.a.jsonl", "rows.b.jsonl")
    first, second = files if is_first else files[::-1]
    append_rows(tmp_path / first, [point[0].model_copy(update=lost)])
    append_rows(tmp_path / second, rows)
    found = load_results(tmp_path)
    assert sorted(map(repr, found)) == sorted(map(repr, rows))


def test_empty_sweep(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"half": ')
    with pytest.raises(ConfigError, match="empty"):
        write_report(sweep(), tmp_path, tmp_path / "out")


@pytest.mark.usefixtures("sketches", "uncounted")
@pytest.mark.parametrize("seq_len", [[8], [8, 16]])
def test_a_sweep_without_a_baseline_has_a_report_and_a_front_page(seq_len, tmp_path):
    grid = {"embed_dim": [8], "seq_len": seq_len}
    config = sweep(baseline=None, variants={"a": attention()}, grid=grid)
    run_sweep(config, tmp_path / "rows", ROOT, stream=str)
    write_report(config, tmp_path / "rows", tmp_path / "reports/a")
    front = write_front_page(tmp_path / "reports", "a command", efficiency_lines)
    assert "(a/report.md)" in front.read_text(encoding="utf-8")


def test_a_failed_row_without_a_number_of_heads_has_no_layer():
    row = {"attention_class": "SoftmaxAttention", "attention_args": "{}", "embed_dim": 8}
    for heads in (None, float("nan")):
        assert layer_of_row({**row, "num_heads": heads, "head_dim": 4}) is None


@pytest.mark.parametrize("form", ["--out {}", "--out={}"])
def test_the_command_can_be_pasted_and_has_no_absolute_path(form, monkeypatch):
    monkeypatch.delenv("PROFILING_COMMAND", raising=False)
    given = {str(Path.cwd() / "a b"): "a b", "/elsewhere/c": "c", "d;e": "d;e"}
    for value, shown in given.items():
        monkeypatch.setattr(sys, "argv", ["x", *form.replace(" ", "\n").format(value).split("\n")])
        words = ["python", "-m", "profiling", *form.replace(" ", "\n").format(shown).split("\n")]
        assert shlex.split(command_line()) == words
