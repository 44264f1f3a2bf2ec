"""What errors of a kernel are too large."""

from __future__ import annotations

from profiling.kernels.parity import ParityRow, over_budget


def row(tensor: str, ratio: float) -> ParityRow:
    return ParityRow("fish", "float32", tensor, ratio, ratio, 1.0)


def test_every_input_is_held_alone_and_parameters_together():
    few = [row("noise_scale.theta", 2.1), row("mixer.weight", 1.0)]
    assert over_budget([row("out", 1.9), *few]) == []
    assert over_budget([row("bias", 2.1), *few]) == [row("bias", 2.1)]
    bad = [row("noise_scale.theta", 3.0), row("mixer.weight", 1.0)]
    assert over_budget([row("out", 1.9), *bad]) == bad
