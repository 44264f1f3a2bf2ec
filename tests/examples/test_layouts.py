"""One global batch on several layouts: the losses differ by the order of summation only."""

from __future__ import annotations

import numpy as np
import pytest

from examples.studies import layouts
from examples.studies.layouts import LAYOUTS, REQUIRED, Layout, largest_differences
from lit_probattn.base.errors import ChildError
from profiling.measure.processes import run_in_ranks

STEPS = 5


@pytest.mark.slow  # two processes, and accumulation: tests/tasks/distributed/test_ddp.py
def test_losses_do_not_depend_on_the_layout():
    """Attention dropout and FiSH's noise are on, priors follow the M-step in setting B."""
    rows = largest_differences(REQUIRED, LAYOUTS, steps=STEPS, precision="64-true")
    cases = [(layout, variant) for layout in LAYOUTS for variant in REQUIRED]
    assert list(zip(rows["layout"], rows["variant"], strict=True)) == cases
    assert not (~(rows["difference"] < 1e-13)).any(), rows


@pytest.mark.slow  # other losses are shown: below
def test_the_comparison_sees_dropout_that_depends_on_the_rank(monkeypatch):
    make = layouts.fit_arguments

    def with_dropout(*args):
        return [*make(*args), "--model.init_args.dropout", "0.1"]

    monkeypatch.setattr(layouts, "fit_arguments", with_dropout)
    rows = largest_differences(["softmax"], [Layout(2)], steps=STEPS)
    assert rows["difference"].tolist()[0] > 1e-4


def test_the_report_names_variants_layouts_and_steps(monkeypatch, capsys):
    """The table of many trainings, with losses that are made up."""

    def losses_of(variants, layout, steps, precision, folder):
        change = 1e-7 * (layout.processes - 1) + 1e-8 * (layout.accumulation - 1)
        return {variant: np.full(steps, 1.0 + change) for variant in variants}

    monkeypatch.setattr(layouts, "losses_of", losses_of)
    assert layouts.main(["--variants", "mlk", "fish", "--steps", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("over 5 steps, 32-true, global batch 8" in line for line in lines)
    assert f"| variant | {' | '.join(map(str, LAYOUTS))} |" in lines
    assert lines[-2:] == [
        f"| {variant} | 3.0e-08 | 1.0e-07 | 1.1e-07 | 3.0e-07 |" for variant in ("mlk", "fish")
    ]


def test_a_rank_that_fails_or_hangs_is_reported(tmp_path):
    def fail() -> int:
        print("what went wrong")
        return 3

    with pytest.raises(ChildError, match=r"\[3, 3\].*\n.*what went wrong"):
        run_in_ranks(fail, 2, log=tmp_path / "log")
    with pytest.raises(ChildError, match=r"ranks \[0\] did not finish within 1 s"):
        run_in_ranks(lambda: __import__("time").sleep(60) or 0, 1, timeout=0.51)
