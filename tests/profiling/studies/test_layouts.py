"""One global batch on several layouts: the losses differ by the order of summation only."""

from __future__ import annotations

import pytest

from profiling.measure.processes import RanksError, run_in_ranks
from profiling.studies import layouts
from profiling.studies.layouts import LAYOUTS, REQUIRED, Layout, largest_differences, table_text

STEPS = 5


@pytest.mark.parametrize(
    ("variants", "shapes"),
    [
        pytest.param(("mgk_soft_e", "fish"), (Layout(2, 2),), id="two"),
        pytest.param(REQUIRED, LAYOUTS, id="all", marks=pytest.mark.slow),
    ],
)
def test_losses_do_not_depend_on_the_layout(variants, shapes):
    """Attention dropout and FiSH's noise are on, priors follow the M-step in setting B."""
    table = largest_differences(variants, shapes, steps=STEPS, precision="64-true")
    assert list(table) == list(variants)
    assert all(list(row) == list(shapes) for row in table.values())
    assert {v: d for v, row in table.items() for d in row.values() if not d < 1e-13} == {}
    assert f"over {STEPS} steps" in table_text(table, STEPS, "64-true")


def test_the_comparison_sees_dropout_that_depends_on_the_rank(monkeypatch):
    make = layouts.fit_arguments

    def with_dropout(*args):
        return [*make(*args), "--model.init_args.dropout", "0.1"]

    monkeypatch.setattr(layouts, "fit_arguments", with_dropout)
    table = largest_differences(["softmax"], [Layout(2)], steps=STEPS)
    assert table["softmax"][Layout(2)] > 1e-4


def test_a_rank_that_fails_or_hangs_is_reported(tmp_path):
    def fail() -> int:
        print("what went wrong")
        return 3

    with pytest.raises(RanksError, match=r"\[3, 3\].*\n.*what went wrong"):
        run_in_ranks(fail, 2, log=tmp_path / "log")
    with pytest.raises(RanksError, match=r"ranks \[0\] did not end within 1 s"):
        run_in_ranks(lambda: __import__("time").sleep(60) or 0, 1, timeout=0.7)
