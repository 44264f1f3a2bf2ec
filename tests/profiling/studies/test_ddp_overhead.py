"""The benchmark of DDP's overhead: its sides differ in processes and batch only."""

from __future__ import annotations

import numpy as np
import pytest

from profiling.studies.ddp_overhead import SIDES, WARMUP, fit_arguments, main, table_text


def test_ratios_are_those_of_the_medians():
    names = list(SIDES)
    rounds = {names[0]: [0.4, 0.4, 0.4], names[1]: [0.2, 0.2, 0.2], names[2]: [0.3, 0.2, 0.25]}
    cpu = dict(zip(names, (0.4, 0.2, 0.44), strict=True))
    times = {
        side: [np.tile((t, cpu[side]), (5, 1)) for t in walls] for side, walls in rounds.items()
    }
    text = table_text(times)
    assert f"| {names[2]} | 250.0 | 440.0 |" in text
    assert "same global batch: wall | 0.62 | 0.55 to 0.70 |" in text
    assert "half the batch: wall (1 = no overhead) | 1.25 | 1.10 to 1.40 |" in text
    assert "processor time (1 = no overhead) | 1.10 | 1.10 to 1.10 |" in text


def test_sides_differ_in_processes_and_batch_only(tmp_path):
    one, half, two = (fit_arguments(side, "softmax", 9, tmp_path) for side in SIDES)
    assert {a for a, b in zip(one, half, strict=True) if a != b} == {"16"}
    assert set(two) - set(one) == {"2", "--trainer.strategy", "ddp"}


@pytest.mark.slow
def test_it_runs(capsys):
    steps = WARMUP + 4
    assert main(["--variants", "softmax", "--rounds", "1", "--steps", str(steps)]) == 0
    assert "| 2 processes |" in capsys.readouterr().out
