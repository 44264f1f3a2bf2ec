"""Kernels of linear attention, its mixtures and linear FiSH against float64 sums over all pairs."""

from __future__ import annotations

import itertools

import pytest
import torch

from lit_probattn.kernels.linear.selftest import compare
from lit_probattn.kernels.runtime import Launch, forced
from profiling.kernels.cases import CASES
from profiling.kernels.parity import parity_rows
from tests.kernels.budget import check_budget, draws_noise
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OURS = [case for case in CASES if case.name.startswith(("linear", "mlk"))]
SHAPES = [(37, 45), (33, 21), (10, 10)]
# More for noise scales: the error of one number in three calls says little (budget.py).
MANY = [*SHAPES, *((11 + 3 * i, 14 + 3 * i) for i in range(3))]


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("case", "dtype"),
    mostly_slow(
        itertools.product(OURS, [torch.float32, torch.float16]),
        [("linear fish", torch.float16), ("mlk, shifted keys", torch.float32)],
    ),
)
def test_error_is_within_twice_that_of_eager_code(case, dtype):
    shapes = MANY if draws_noise(case) else SHAPES
    shapes = shapes if dtype == torch.float32 else shapes[::2]
    rows = parity_rows(case, dtype, device=DEVICE, head_dim=9, shapes=shapes)
    assert {row.tensor for row in rows} >= {"out", "query", "key", "value"}
    check_budget(rows)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("weighted", "is_causal", "chunk"),
    mostly_slow(
        itertools.product([False, True], [False, True], [16, 64]),
        [(False, True, 64), (True, False, 64)],
    ),
)
def test_chunks_of_any_length_agree(weighted, is_causal, chunk):
    for sizes in ((21, 40), (40, 21), (1, 5)):
        with forced(Launch(chunk, chunk)):
            pairs = compare(weighted, is_causal, DEVICE, torch.float32, (11, 7), sizes)
        for found, exact in pairs:
            torch.testing.assert_close(found.double(), exact, atol=3e-5, rtol=3e-5)
