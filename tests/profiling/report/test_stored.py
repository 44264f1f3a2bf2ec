"""A report made again from its own rows.csv: the same numbers, or a refusal."""

from __future__ import annotations

import json
import shutil

import pytest

from lit_probattn.base.errors import ConfigError
from profiling.cli import main
from profiling.report.page import write_report
from profiling.report.stored import stored_rows
from profiling.sweep.run import run_sweep
from tests.profiling.helpers import MGK, attention, fork_workers, sweep
from tests.support.patching import spare_drawing
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("sketches")
CHANGES = {
    "variants": {
        "softmax": attention(),
        "mgk": attention(MGK, num_heads=1),
    },
    "grid": {"embed_dim": [8], "seq_len": [8, 16], "mode": ["eval"]},
    "measure": ["cost", "memory"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A sweep, the folder of its results, and that of its report."""
    folder, config = tmp_path_factory.mktemp("stored"), sweep(**CHANGES)
    with pytest.MonkeyPatch.context() as patch:
        fork_workers(patch)
        patch.setattr("profiling.sweep.predictions.predict", lambda point: (6_000, 2_000))
        run_sweep(config, folder / "results", ROOT, stream=lambda _: None)
        spare_drawing(patch)
        write_report(config, folder / "results", folder / "report")
    return config, folder


def test_a_report_made_of_a_report_is_the_same(made, tmp_path):
    config, folder = made
    write_report(config, folder / "report", tmp_path)
    for name in ("report.md", "report.json", "rows.csv", "ratios.csv"):
        assert (tmp_path / name).read_bytes() == (folder / "report" / name).read_bytes(), name
    kept = stored_rows(config, folder / "report", ROOT)
    assert (
        len(kept) == len((folder / "report/rows.csv").read_text(encoding="utf-8").splitlines()) - 1
    )
    assert {row.point_id for row in kept if row.quantity == "memory"} == {
        row.point_id for row in kept
    } - {row.point_id for row in kept if row.quantity == "cost"}


def test_results_come_before_the_report_in_the_same_folder(made, tmp_path):
    config, folder = made
    shutil.copytree(folder / "results", tmp_path / "both")
    (tmp_path / "both/report.json").write_text("{}")
    write_report(config, tmp_path / "both", tmp_path / "both")
    ratios = (tmp_path / "both/ratios.csv").read_bytes()
    assert ratios == (folder / "report/ratios.csv").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"grid": {**CHANGES["grid"], "seq_len": [8, 32]}},
            "missing rows of cost softmax D=8",
        ),
        ({"grid": {**CHANGES["grid"], "seq_len": [8]}}, "rows.csv: unknown cost softmax 16"),
        (
            {"variants": {**CHANGES["variants"], "mgk": attention(MGK, num_components=3)}},
            "the variants of the report differ",
        ),
    ],
)
def test_another_sweep_is_refused(change, message, made):
    with pytest.raises(ConfigError, match="run the sweep again") as error:
        stored_rows(sweep(**{**CHANGES, **change}), made[1] / "report", ROOT)
    assert message in str(error.value)


def test_a_report_of_something_else_is_refused(made, tmp_path):
    config, folder = made
    shutil.copytree(folder / "report", tmp_path / "copy")
    data = json.loads((tmp_path / "copy/report.json").read_text(encoding="utf-8"))
    (tmp_path / "copy/report.json").write_text(json.dumps({**data, "kind": "study"}))
    with pytest.raises(ConfigError, match="expected the report of a sweep, received kind 'study'"):
        stored_rows(config, tmp_path / "copy", ROOT)
    (tmp_path / "copy/report.json").unlink()
    with pytest.raises(ConfigError, match=r"missing or invalid report\.json"):
        stored_rows(config, tmp_path / "copy", ROOT)


@pytest.mark.slow  # of a small sweep: above
def test_a_committed_report_is_made_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    report = ROOT / "reports/mgk_figure4"
    words = ["report", "--config", "mgk_figure4", "--results", str(report)]
    assert main([*words, "--out", str(tmp_path)]) == 0
    for name in ("rows.csv", "ratios.csv"):
        assert (tmp_path / name).read_bytes() == (report / name).read_bytes()
    before, after = (
        json.loads((f / "report.json").read_text(encoding="utf-8")) for f in (report, tmp_path)
    )
    for data in (before, after):
        del data["made"]["reported_by"]
    assert before == after
