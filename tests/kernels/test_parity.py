"""Every kernel against the float64 reference: output and all gradients, beside eager code."""

from __future__ import annotations

import itertools

import pytest
import torch

from profiling.kernels.cases import CASES
from profiling.kernels.parity import BUDGET, ParityTask, over_budget, parity_rows
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bfloat16 is wrong; a GPU's is what training uses.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
FAMILIES = {
    "dense": ("softmax", "gaussian", "mgk", "smgk"),
    "fish": ("fish", "gfish"),
    "linear": ("linear", "mlk"),
}
# Float32 draws more, so that a ratio of parameters of a few numbers is no accident.
SHAPES = {
    "dense": [(29, 31), (37, 45), (7, 33), (33, 5)],
    "fish": [(11 + 2 * i, 14 + 7 * i % 18) for i in range(6)],
    "linear": [(37, 45), (33, 21), (10, 10), *((11 + 3 * i, 14 + 3 * i) for i in range(3))],
}
# What runs every time: cases of each family of the kernels.
FAST = [
    ("softmax, grouped", torch.float16),
    ("mgk soft, prior per position", torch.float16),
    ("smgk hard", torch.float16),
    ("fish, noise per head", torch.float16),
    ("mlk, shifted keys", torch.float16),
]


def draws_noise(case):
    """Whether a case has noise scales: parameters of so few numbers that many calls are needed."""
    return "noise_scale" in case.options and case.options.get("noise") != "none"


def cases_of(family):
    return [case for case in CASES if case.name.startswith(FAMILIES[family])]


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("case", "dtype"), mostly_slow(itertools.product(cases_of("dense"), DTYPES), FAST[:3])
)
def test_error_of_pairs_is_within_twice_that_of_eager_code(case, dtype):
    shapes = SHAPES["dense"] if dtype == torch.float32 else SHAPES["dense"][:1]
    rows = parity_rows(ParityTask(case, dtype, str(DEVICE), 13, tuple(shapes)))
    assert {row.tensor for row in rows} >= {"out", "query", "key", "value"}
    for row in rows:
        assert row.ratio <= BUDGET, row


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("case", "dtype"),
    mostly_slow(itertools.product(cases_of("fish") + cases_of("linear"), DTYPES[:2]), FAST[3:]),
)
def test_error_of_mixed_heads_and_of_states_is_within_twice_that_of_eager_code(case, dtype):
    """Output and input gradients each, and parameters of a layer together."""
    family = "fish" if case in cases_of("fish") else "linear"
    shapes = SHAPES[family] if draws_noise(case) else SHAPES[family][:3]
    shapes = shapes if dtype == torch.float32 else shapes[::3]
    rows = parity_rows(ParityTask(case, dtype, str(DEVICE), 9, tuple(shapes)))
    found = {row.tensor for row in rows}
    assert found >= {"out", "query", "key", "value"}
    assert "mixing.weights.0" in found or family == "linear"
    assert over_budget(rows) == []
