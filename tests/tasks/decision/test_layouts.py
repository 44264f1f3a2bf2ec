"""Decision making trains alike for every layout, plays the same episodes, and survives a kill."""

from __future__ import annotations

import json

import pytest
import torch

from lit_probattn.cli.app import main
from lit_probattn.tasks import DecisionMaking
from tests.support.runs import fingerprint, in_ranks, metrics, newest_state, only_version
from tests.tasks.distributed.layouts import DOUBLE, NO_DROPOUT, TWO_PROCESSES, Trial, two_parts

TWO_PARTS = two_parts(16)
TRIAL = Trial("tiny/d4rl")


@pytest.fixture(scope="module")
def whole_double(tmp_path_factory):
    return TRIAL.trained(tmp_path_factory, *NO_DROPOUT, *DOUBLE)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TWO_PARTS, id="accumulation", marks=pytest.mark.slow),
        pytest.param(TWO_PROCESSES, id="processes", marks=pytest.mark.slow),
        pytest.param((*TWO_PARTS, *TWO_PROCESSES), id="both"),
    ],
)
def test_layouts_train_alike_in_double_precision(whole_double, tmp_path_factory, layout):
    """Weights, losses, and the returns of the episodes that validations play."""
    other = TRIAL.trained(tmp_path_factory, *NO_DROPOUT, *DOUBLE, *layout)
    rows = [metrics(only_version(folder)) for folder in (whole_double, other)]
    assert len(rows[0]) == len(rows[1]) == 16
    for first, second in zip(*rows, strict=True):
        for key in ("train/loss", "val/loss", "val/return_high", "val/return_low", "val/score"):
            assert bool(first[key]) == bool(second[key])
            if first[key]:
                assert float(second[key]) == pytest.approx(float(first[key]), rel=1e-9)
    states = [newest_state(only_version(folder))["state_dict"] for folder in (whole_double, other)]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-10, atol=1e-12)


def test_a_test_of_two_processes_plays_the_episodes_of_one(whole_double):
    found = []
    for more in ((), TWO_PROCESSES):
        work = TRIAL.command(
            whole_double, *NO_DROPOUT, *DOUBLE, "--ckpt_path", "last", *more, name="test"
        )
        assert set(in_ranks(lambda work=work: main(work), 2 if more else 1)) == {0}
        path = only_version(whole_double) / "test-step-00000016.json"
        found.append(json.loads(path.read_text()))
        path.unlink()
    one, two = (report["evaluation"]["targets"] for report in found)
    for name in ("high", "low"):
        assert len(one[name]["returns"]) == 4
        assert two[name]["returns"] == pytest.approx(one[name]["returns"], rel=1e-9)
    assert found[1]["test/loss"] == pytest.approx(found[0]["test/loss"], rel=1e-12)


def test_killed_and_resumed_equals_uninterrupted(tmp_path_factory, tmp_path, monkeypatch):
    """With dropout, inside an optimiser step of two parts; a validation in three plays episodes."""
    more = (
        *("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "8"),
        *("--model.init_args.val_every", "3"),
    )
    uninterrupted = only_version(TRIAL.trained(tmp_path_factory, *more))
    resumed = TRIAL.trained_in_two_pieces(DecisionMaking, 21, tmp_path, monkeypatch, *more)
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    assert metrics(resumed) == metrics(uninterrupted)
    assert sum(bool(row["val/score"]) for row in metrics(resumed)) == 1
