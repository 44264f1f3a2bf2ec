"""The tutorial notebook runs from first to last cell and compares the pair that it trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from tests.support.paths import ROOT

NOTEBOOK = json.loads((ROOT / "examples/tutorial.ipynb").read_text(encoding="utf-8"))


def test_every_cell_runs(tmp_path):
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in cells)
    program = "\n".join("".join(cell["source"]) for cell in cells)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MPLBACKEND": "agg",
        "LIT_PROBATTN_CACHE": str(tmp_path / "cache"),
    }
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = re.findall(r"^(.+), seed (\d): (\d+\.\d) %$", done.stdout, re.MULTILINE)
    assert len(runs) == 6
    assert all(float(accuracy) > 45 for _, _, accuracy in runs)
    (interval,) = re.findall(r"^difference: .* \[(.*), (.*)\] points$", done.stdout, re.MULTILINE)
    assert float(interval[0]) <= float(interval[1])
