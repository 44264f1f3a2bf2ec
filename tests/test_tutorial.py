"""The tutorial notebook runs from first to last cell and compares the pair that it trains."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.support.forks import program
from tests.support.paths import ROOT

# Shows the seeds of each run.
SHOW_SEEDS = """
import lightning.pytorch as pl
fit = pl.Trainer.fit
def show_and_fit(trainer, model, data):
    print(f"fit with seeds {model.seed}, {data.seed}")
    fit(trainer, model, data)
pl.Trainer.fit = show_and_fit
"""
NOTEBOOK = json.loads((ROOT / "examples/tutorial.ipynb").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("seeds", "steps", "least"),
    [((0, 1), 3, 0.0), pytest.param((0, 1, 2), 40, 45.0, marks=pytest.mark.slow)],
)
def test_every_cell_runs(seeds, steps, least, tmp_path):
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    settings = "SEEDS, STEPS = (0, 1, 2), 40\n"
    assert settings in code
    code = code.replace(settings, f"SEEDS, STEPS = {seeds}, {steps}\n")
    environment = {
        **os.environ,
        "MPLBACKEND": "agg",
        "LIT_PROBATTN_CACHE": str(tmp_path / "cache"),
    }
    shown = "\n".join(program(SHOW_SEEDS + code, tmp_path, environment=environment))
    pairs = re.findall(r"^fit with seeds (\d), (\d)$", shown, re.MULTILINE)
    assert pairs == 2 * [(str(seed), str(seed)) for seed in seeds]
    runs = re.findall(r"^(.+), seed (\d): (\d+\.\d) %$", shown, re.MULTILINE)
    assert len(runs) == 2 * len(seeds)
    assert all(float(accuracy) > least for _, _, accuracy in runs)
    (interval,) = re.findall(r"^difference: .* \[(.*), (.*)\] points$", shown, re.MULTILINE)
    assert float(interval[0]) <= float(interval[1])
