"""The same losses as when they were written down, step by step; and the same ones every time."""

from __future__ import annotations

import functools
import itertools
import json

import numpy as np
import pytest

from tests.house.golden import FILE, STEPS, VARIANTS, losses, losses_of_the_command

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
# Other processors, threads and versions of PyTorch sum in another order: over 20 steps that stays
# far below this, and a change of meaning far above it (see the last test).
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(scope="module")
def of_a_run(folder):
    """The losses of a run of each variant."""
    return functools.cache(lambda variant: losses(variant, folder))


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_those_written_down(variant, of_a_run):
    assert len(GOLDEN[variant]) == STEPS
    np.testing.assert_allclose(of_a_run(variant), GOLDEN[variant], rtol=TOLERANCE)


def test_two_runs_on_one_machine_are_equal(folder, of_a_run):
    """The second by the command."""
    assert losses_of_the_command("fish", folder) == of_a_run("fish")


def test_the_tolerance_tells_variants_and_seeds_apart(folder):
    curves = [GOLDEN[variant] for variant in VARIANTS]
    curves.append(losses("softmax", folder, seed=1))
    for first, second in itertools.combinations(curves, 2):
        difference = np.abs(np.array(first) - np.array(second)) / np.array(first)
        assert difference.max() > 10 * TOLERANCE
