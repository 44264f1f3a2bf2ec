"""Committed reports of runs, made again from their rows: every number and verdict is the same."""

from __future__ import annotations

import re
import shlex

import pandas as pd
import pytest

from lit_probattn.compare.runs import Run
from lit_probattn.reproduce import __main__ as reproduce
from lit_probattn.reproduce import uea
from lit_probattn.reproduce.figures import low_rank
from tests.support.paths import ROOT

# Rows of sweeps have no run folder; `tests/profiling/test_cli.py` makes one of their reports again.
REPORTS = sorted(
    path.parent
    for path in (ROOT / "reports").rglob("rows.csv")
    if "run_folder" in path.read_text(encoding="utf-8").partition("\n")[0]
)
assert len(REPORTS) == 10
PLACES = ("--out", "--runs", "--data_dir", "--cache_dir")


def result_of(row):
    """Return the result of a run from its row in rows.csv."""
    known = {name: None if value != value else value for name, value in row.items()}
    processor, _, cores = row["device"].rpartition(", ")
    packages = dict(part.split(" ", 1) for part in row["versions"].split(", "))
    return known | {
        "values": {
            name.removeprefix("value "): value
            for name, value in known.items()
            if name.startswith("value ") and value is not None
        },
        "backends": dict(part.rsplit(": ", 1) for part in row["backends"].split("; ")),
        "hardware": {"processor": processor, "num_cores": cores.split()[0]},
        "python": packages.pop("python"),
        "packages": packages,
        "git": {"revision": row["git_revision"]},
        "sources": {},
    }


@pytest.mark.slow
@pytest.mark.parametrize("folder", REPORTS, ids=lambda f: str(f.relative_to(ROOT / "reports")))
def test_rows_give_the_same_report(folder, tmp_path, monkeypatch):
    text = (folder / "report.md").read_text(encoding="utf-8")
    _, _, module, *words = shlex.split(re.search("Command: `([^`]*)`", text)[1])
    results = {
        (row["task"], row["row"], row["seed"]): result_of(row)
        for row in pd.read_csv(folder / "rows.csv").to_dict("records")
    }
    used = set()

    def result(run):
        name = run.task.name, run.row.name, run.seed
        used.add(name)
        return results.get(name)

    def point_columns(_, stored):
        names = ("rule", "num_heads", "head_dim", "embed_dim", "mlp_dim", "metric", "perplexity")
        return {name: stored[name] for name in (*names, "num_parameters", "num_other_parameters")}

    monkeypatch.setattr(Run, "result", result)
    monkeypatch.setattr(Run, "changed_sources", lambda run: [])
    monkeypatch.setattr(low_rank, "point_columns", point_columns)
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word not in PLACES and before not in PLACES
    ]
    kept += [] if "--report" in kept else ["--report"]
    main = uea.main if "uea" in module else reproduce.main
    status = main([*kept, "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")])
    assert used >= results.keys()
    assert status == int(used > results.keys())  # 1 where runs of the command are missing

    ratios = next((tmp_path / "out").rglob("ratios.csv"))
    expected, found = pd.read_csv(folder / "ratios.csv"), pd.read_csv(ratios)
    pd.testing.assert_frame_equal(found[list(expected)], expected, rtol=1e-5, atol=0)
    if (folder / "verdicts.csv").exists():
        verdicts = ratios.parent / "verdicts.csv"
        assert verdicts.read_text(encoding="utf-8") == (folder / "verdicts.csv").read_text(
            encoding="utf-8"
        )
