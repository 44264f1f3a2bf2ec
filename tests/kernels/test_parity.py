"""Every dense kernel against the float64 reference: output and all gradients, beside eager code."""

from __future__ import annotations

import itertools

import pytest
import torch

from profiling.kernels.cases import CASES
from profiling.kernels.parity import BUDGET, parity_rows
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bfloat16 is wrong; a GPU's is what training uses.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
SHAPES = [(37, 45), (29, 31), (7, 33), (33, 5)]
# What runs every time: one case of each family of the kernels.
FAST = [
    ("softmax, grouped", torch.float16),
    ("mgk soft, prior per position", torch.float16),
    ("smgk hard", torch.float16),
]
DENSE = [case for case in CASES if case.name.startswith(("softmax", "gaussian", "mgk", "smgk"))]


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(("case", "dtype"), mostly_slow(itertools.product(DENSE, DTYPES), FAST))
def test_error_is_within_twice_that_of_eager_code(case, dtype):
    # Priors have a few numbers only: float32 draws more, so that a ratio is no accident.
    shapes = SHAPES if dtype == torch.float32 else SHAPES[1:2]
    rows = parity_rows(case, dtype, device=DEVICE, head_dim=13, shapes=shapes)
    assert {row.tensor for row in rows} >= {"out", "query", "key", "value"}
    for row in rows:
        assert row.ratio <= BUDGET, row
