"""What errors of a kernel are too large."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.attention import MGKAttention
from profiling.kernels import parity
from profiling.kernels.cases import Case
from profiling.kernels.parity import ParityRow, ParityTask, over_budget, parity_rows


def row(tensor: str, ratio: float) -> ParityRow:
    return ParityRow("fish", "float32", tensor, ratio, ratio, 1.0)


def test_every_input_is_held_alone_and_parameters_together():
    few = [row("noise_scale.theta", 2.1), row("mixer.weight", 1.0)]
    assert over_budget([row("out", 1.9), *few]) == []
    assert over_budget([row("bias", 2.1), *few]) == [row("bias", 2.1)]
    bad = [row("noise_scale.theta", 3.0), row("mixer.weight", 1.0)]
    assert over_budget([row("out", 1.9), *bad]) == bad


@pytest.mark.parametrize(("error", "is_over"), [(1e-7, False), (1.0, True)])
def test_a_gradient_that_is_zero_is_compared_with_rounding(monkeypatch, error, is_over):
    """The prior of a single component has none: eager code's rounding does not bound it."""

    def heads(layer, backend, inputs, dtype):
        exact = {name: torch.ones(4, dtype=torch.float64) for name in ("out", "query", "prior")}
        exact["prior"] *= 1e-18
        if dtype == torch.float64:
            return exact
        off = error if backend == "triton" else 1e-8
        return {name: (x + (name == "prior") * off).to(dtype) for name, x in exact.items()}

    monkeypatch.setattr(parity, "heads_and_gradients", heads)
    case = Case("one component", MGKAttention, {"num_components": 1})
    rows = parity_rows(ParityTask(case, torch.float32, "cpu", 4, ((2, 2),)))
    assert bool(over_budget(rows)) is is_over
