"""Terms made and differentiated inside the kernels, against sums over distances in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from lit_probattn.kernels.dense import points
from lit_probattn.kernels.dense.selftest import _Form, compare_points
from lit_probattn.kernels.runtime import Launch, forced
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMS = {
    "mgk, equal": _Form(2, 2, False, True),
    "mgk, three": _Form(3, 3, False, False),
    "hard": _Form(2, 2, True, False),
    "smgk": _Form(2, 1, False, True),
    "smgk, own variances": _Form(3, 1, False, False),
    "smgk, hard": _Form(2, 1, True, True),
    "one": _Form(1, 1, False, False),
}


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("name", "gaussian"),
    mostly_slow(
        itertools.product(FORMS, [True, False]),
        [("hard", True), ("smgk, own variances", True), ("mgk, equal", False)],
    ),
)
def test_output_and_all_gradients_are_those_of_the_equation(name, gaussian, monkeypatch):
    """Queries and keys in several tiles of terms and of pairs; heads that share keys."""
    per_key = name != "mgk, equal"
    monkeypatch.setattr(points, "_BLOCK", 32)
    with forced(Launch(32, 32)):
        pairs = compare_points(
            FORMS[name], "causal", 5, DEVICE, torch.float32, (11, 7), (35, 39), gaussian, per_key
        )
    for found, exact in pairs:
        torch.testing.assert_close(found.double(), exact, atol=4e-5, rtol=4e-5)
