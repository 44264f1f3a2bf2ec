"""The benchmark of DDP's overhead: its sides differ in processes and batch only."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from examples.studies.ddp_overhead import SIDES, WARMUP, fit_arguments, main, ratio_rows, step_rows
from lit_probattn.records.tables import markdown_lines
from profiling.study import shown


def test_ratios_are_those_of_the_medians():
    names = list(SIDES)
    rounds = {names[0]: [0.4, 0.4, 0.4], names[1]: [0.2, 0.2, 0.2], names[2]: [0.3, 0.2, 0.25]}
    cpu = dict(zip(names, (0.4, 0.2, 0.44), strict=True))
    times = {
        side: [np.tile((t, cpu[side]), (5, 1)) for t in walls] for side, walls in rounds.items()
    }
    steps = pd.DataFrame(step_rows("mgk", times))
    assert f"| mgk | {names[2]} | 250 | 440 |" in markdown_lines(steps)
    lines = markdown_lines(shown(pd.DataFrame(ratio_rows("mgk", times)), "clock"))
    assert "| same global batch: wall | 0.625 [0.550, 0.700] |" in lines
    assert "| half the batch: wall (1 = no overhead) | 1.250 [1.100, 1.400] |" in lines
    expected = "same global batch: processor time (1 = no overhead) | 1.100 [1.100, 1.100]"
    assert f"| {expected} |" in lines


def test_sides_differ_in_processes_and_batch_only(tmp_path):
    one, half, two = (fit_arguments(side, "softmax", 9, tmp_path) for side in SIDES)
    assert {a for a, b in zip(one, half, strict=True) if a != b} == {"16"}
    assert set(two) - set(one) == {"2", "--trainer.strategy", "ddp"}


@pytest.mark.slow
def test_it_runs(capsys):
    steps = WARMUP + 4
    assert main(["--variants", "softmax", "--rounds", "1", "--steps", str(steps)]) == 0
    assert "| softmax | 2 processes |" in capsys.readouterr().out
