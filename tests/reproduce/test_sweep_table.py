"""Tables of measured costs: every printed number beside ours, absolute and as a ratio."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import yaml

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.tables import Part, kinds, read_published
from lit_probattn.experiments.expectations import Estimate, Printed
from lit_probattn.reproduce.__main__ import main
from lit_probattn.reproduce.sweep_table import Ours, ratio_verdict, table_of
from profiling.measure.rows import read_rows
from profiling.sweep.config import load_sweep
from tests.profiling.helpers import fork_workers
from tests.support.patching import check_figures
from tests.support.paths import ROOT

SWEEPS = ("mgk_table7", "mgk_table7_cuda")
SWEEP = {
    "name": "tiny_table",
    "model": {
        **{"kind": "classifier", "head_dim": 8, "mlp_dim": 16, "num_layers": 1},
        **{"vocab_size": 16, "num_classes": 3},
    },
    "baseline": "softmax",
    "variants": {
        "softmax": {"attention": {"config": "configs/attention/softmax.yaml"}},
        "mgk": {"attention": {"config": "configs/attention/mgk.yaml"}, "heads_divisor": 2},
    },
    "grid": {"embed_dim": [16], "seq_len": [32], "num_heads": [2], "batch_size": [2, 1]},
    "measure": ["memory", "time"],
    "timing": {"warmup": 0, "repeats": 3},
}
PRINTED = "table,task,method,heads,metric,split,value\n" + "".join(
    f"tiny_table7,retrieval,{method},{heads},{metric},test,{value}\n"
    for method, heads, metric, value in (
        ("Softmax", 2, "memory_kb", "58.0"),
        ("MGK", 1, "memory_kb", "53.6"),
        ("Softmax", 2, "seconds", "0.357"),
        ("MGK", 1, "seconds", "0.278"),
    )
)


def write(folder, **change):
    """A table of two rows."""
    path = folder / "tiny_table.yaml"
    path.write_text(yaml.safe_dump({**SWEEP, "report": {"title": "Tiny"}}, sort_keys=False))
    entry = {
        **{"title": "Tiny, table 7", "kind": "sweep_table", "sweep": str(path)},
        **{"sweep_on_gpu": str(path), "device": "A100", "batch_size": 2},
        "rows": {"softmax": ["Softmax", "2"], "mgk": ["MGK", "1"]},
        "numbers": {
            "memory_kb": {"metric": "memory_bytes", "words": "memory, kB", "scale": 1000},
            "seconds": {"metric": "time_median_s", "words": "time, s"},
        },
        **change,
    }
    tables = folder / "tables"
    tables.mkdir(exist_ok=True)
    (tables / "tiny_table7.yaml").write_text(yaml.safe_dump(entry))
    (tables / "published.csv").write_text(PRINTED)
    part = Part("tiny_table7", tables, entry)
    return part, ["tiny_table7", "--tables", str(tables), "--runs", str(folder / "runs")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The table after its sweep."""
    folder = tmp_path_factory.mktemp("table")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        fork_workers(patch)
        check_figures(patch)
        patch.setattr("profiling.sweep.predictions.predict", lambda point: (60_000, 20_000))
        entry, words = write(folder)
        assert main(words) == 0
    return folder, entry, words


def rewritten(folder, variants=("softmax", "mgk"), **change):
    """Change the rows of variants in the sweep's results, for a table of them."""
    path = folder / "runs/profiling/tiny_table/rows.jsonl"
    rows = [
        row.model_copy(update=change if row.variant in variants else {}) for row in read_rows(path)
    ]
    table = table_of(write(folder)[0], folder / "runs", None)
    path.write_text("".join(f"{row.model_dump_json()}\n" for row in rows))
    return table


@pytest.mark.usefixtures("sketches")
def test_each_printed_number_has_a_line_and_a_verdict(measured):
    folder, _, words = measured
    out = folder / "runs/reproduce/reports/tiny_table7"
    table = pd.read_csv(out / "printed.csv").set_index(["number", "variant"])
    assert len(table) == 4
    assert set(table["verdict"]) == {"inconclusive"}  # no A100
    memory = table.loc[("memory_kb", "mgk")]
    base = table.loc[("memory_kb", "softmax")]
    assert memory["deviation"] == pytest.approx(memory["ours"] - 53.6, rel=1e-3)
    assert memory["ratio"] == pytest.approx(memory["ours"] / base["ours"], rel=1e-4)
    assert memory["ratio_published"] == pytest.approx(53.6 / 58, rel=1e-4)
    assert set(table["ratio_verdict"].dropna()) == {"inconclusive"}  # no GPU
    assert pd.isna(base["ratio"])
    text = (out / "report.md").read_text(encoding="utf-8")
    assert "| MGK, 1 head | memory, kB | 53.6 |" in text
    assert "](figures/printed.svg)" in text
    assert (out / "figures/printed.png").is_file()
    assert text.count(f"`python -m lit_probattn.reproduce {words[0]}") == 1  # sweep and report
    assert "python -m profiling" not in text
    assert "| nan |" not in text
    assert main([*words, "--report", "--out", str(folder / "again")]) == 0
    assert (folder / "again/printed.csv").read_bytes() == (out / "printed.csv").read_bytes()


def test_absolute_numbers_are_judged_on_the_papers_device(measured, tmp_path):
    folder, *_ = measured
    (tmp_path / "runs").symlink_to(folder / "runs")
    change = {"device": "cuda", "device_name": "NVIDIA A100-SXM4-80GB", "time_median_s": 0.3571}
    spread = {"time_p20_s": 0.3569, "time_p80_s": 0.358}
    before = (folder / "runs/profiling/tiny_table/rows.jsonl").read_text(encoding="utf-8")
    try:
        other = rewritten(folder, **change, **spread)
        table = other.table.set_index(["number", "variant"])
    finally:
        (folder / "runs/profiling/tiny_table/rows.jsonl").write_text(before)
    told = "The devices differ, so the comparison is inconclusive."
    assert told not in other.printed_figure().caption
    assert told in rewritten(folder).printed_figure().caption
    assert table.loc[("seconds", "softmax"), "verdict"] == "agrees"
    assert table.loc[("seconds", "mgk"), "verdict"] == "differs"
    assert table.loc[("seconds", "mgk"), "ratio_verdict"] == "inconclusive"  # 1.00, printed 0.78


def test_numbers_of_different_devices_have_no_ratio(measured):
    folder, *_ = measured
    path = folder / "runs/profiling/tiny_table/rows.jsonl"
    before = path.read_text(encoding="utf-8")
    try:
        table = rewritten(folder, ["mgk"], device_name="another").table.set_index("variant")
    finally:
        path.write_text(before)
    assert table.loc["mgk", "ours"].notna().all()
    assert table.loc["mgk", "ratio"].isna().all()


@pytest.mark.parametrize(
    ("low", "value", "high", "verdict"),
    [
        (0.9237, 0.9237, 0.9237, "agrees"),
        (0.9, 0.95, 1.1, "agrees"),
        (0.6, 0.6, 0.6, "same direction"),
        (0.95, 0.98, 1.1, "same direction"),
        (0.95, 1.02, 1.1, "inconclusive"),
        (1.002, 1.002, 1.002, "differs"),
    ],
)
def test_a_ratio_is_judged_by_its_spread_and_its_side(low, value, high, verdict):
    printed = Printed.read("53.58").over(Printed.read("58.00"))
    assert printed.low == pytest.approx(0.92363, abs=1e-4)
    assert printed.high == pytest.approx(0.92396, abs=1e-4)
    ours = Ours(Estimate(value, low, high), "measured", 32, "cuda", "x")
    assert ratio_verdict(printed, ours, "cuda") == verdict
    above = Printed.read("58.00").over(Printed.read("53.58"))
    other = replace(ours, estimate=Estimate(1 / value, 1 / high, 1 / low))
    assert ratio_verdict(above, other, "cuda") == verdict
    for one in (None, replace(ours, device="cpu"), replace(ours, source="predicted")):
        assert ratio_verdict(printed, one, "cuda") == "inconclusive"
    assert ratio_verdict(printed, replace(ours, device="meta", source="predicted"), "") == verdict


@pytest.mark.parametrize("accelerator", [None, "gpu"])
def test_table_7_prints_twelve_numbers_of_variants_that_both_sweeps_have(accelerator):
    table = table_of(kinds()["mgk_table7"], ROOT / "none", accelerator)
    rows = [row for row in read_published() if row["table"] == "mgk_table7"]
    assert sorted(table.printed.values()) == sorted(row["value"] for row in rows)
    assert len(table.printed) == 12
    assert {"memory", "time"} <= set(table.config.measure)
    assert table.config.grid.batch_size[0] == table.part["batch_size"] == 32


@pytest.mark.parametrize("name", SWEEPS)
def test_what_the_sweep_prints_of_mlk_it_prints_of_smlk(name):
    published = load_sweep(name).report.published
    kinds_of = {v: {p.metric for p in published if p.variant == v} for v in ("mlk4", "smlk4")}
    assert kinds_of["mlk4"] == kinds_of["smlk4"] != set()
    assert len(published) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": {"softmax": ["Softmax", "2"]}}, "missing MGK, 1, memory_kb"),
        (
            {"rows": {"softmax": ["Softmax", "2"], "mkg": ["MGK", "1"]}},
            "unknown variant 'mkg' of the sweep; did you mean 'mgk'?",
        ),
        (
            {
                "numbers": {
                    "memory_kb": {"metric": "memory_bytes", "words": ""},
                    "seconds": {"metric": "time_median_s", "words": ""},
                    "joules": {"metric": "energy_j", "words": ""},
                }
            },
            "published.csv: missing joules of softmax",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused(change, message, tmp_path):
    table = table_of(write(tmp_path, **change)[0], tmp_path / "runs", None)
    with pytest.raises(ConfigError) as error:
        _ = table.printed
    assert message in str(error.value)
