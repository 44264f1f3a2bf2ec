"""Translation trains alike for every layout, and goes on after a kill bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lit_probattn.cli.app import main
from lit_probattn.tasks import Translation
from tests.support.runs import fingerprint, in_ranks, metrics, newest_state, only_version
from tests.tasks.distributed.layouts import DOUBLE, NO_DROPOUT, TWO_PROCESSES, Trial, two_parts

pytest.importorskip("sacrebleu")
TWO_PARTS = two_parts(16)


def _flags(folder: Path) -> list[str]:
    cache = ["--data.init_args.cache_dir", str(folder.parent / "cache")]
    return [*cache, "--model.init_args.attention_dropout", "0.2"]


TRIAL = Trial("tiny/translation", _flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return TRIAL.trained(tmp_path_factory, *NO_DROPOUT)


@pytest.fixture(scope="module")
def whole_double(tmp_path_factory):
    return TRIAL.trained(tmp_path_factory, *NO_DROPOUT, *DOUBLE)


def assert_same_losses(one, other, rel):
    rows = [metrics(only_version(folder)) for folder in (one, other)]
    assert len(rows[0]) == len(rows[1]) == 16
    for first, second in zip(*rows, strict=True):
        for key in ("train/loss", "train/nll", "val/loss", "val/nll"):
            assert bool(first[key]) == bool(second[key])
            if first[key]:
                assert float(second[key]) == pytest.approx(float(first[key]), rel=rel)
        assert first["val/bleu"] == second["val/bleu"]
    states = [newest_state(only_version(folder))["state_dict"] for folder in (one, other)]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=100 * rel, atol=rel)


def test_two_processes_train_like_one(whole, tmp_path_factory):
    assert_same_losses(whole, TRIAL.trained(tmp_path_factory, *NO_DROPOUT, *TWO_PROCESSES), 1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TWO_PARTS, id="accumulation"),
        pytest.param(TWO_PROCESSES, id="processes"),
        pytest.param((*TWO_PARTS, *TWO_PROCESSES), id="both", marks=pytest.mark.slow),
    ],
)
def test_layouts_train_alike_in_double_precision(whole_double, tmp_path_factory, layout):
    more = (*NO_DROPOUT, *DOUBLE, *layout)
    assert_same_losses(whole_double, TRIAL.trained(tmp_path_factory, *more), 1e-12)


def test_evaluation_and_predictions_of_two_processes_are_those_of_one(whole):
    found = []
    for more in ((), TWO_PROCESSES):
        work = TRIAL.command(whole, *NO_DROPOUT, "--ckpt_path", "last", *more, name="test")
        assert set(in_ranks(lambda work=work: main(work), 2 if more else 1)) == {0}
        path = only_version(whole) / "test-step-00000016.json"
        found.append(json.loads(path.read_text()))
        path.unlink()
    assert [report["num_samples"] for report in found] == [21, 21]
    assert found[0]["bleu"] == found[1]["bleu"]
    assert found[1]["test/nll"] == pytest.approx(found[0]["test/nll"], rel=1e-6)


def test_killed_and_resumed_equals_uninterrupted(tmp_path_factory, tmp_path, monkeypatch):
    """With dropout, inside an optimiser step of two parts."""
    uninterrupted = only_version(TRIAL.trained(tmp_path_factory, *TWO_PARTS))
    resumed = TRIAL.trained_in_two_pieces(Translation, 21, tmp_path, monkeypatch, *TWO_PARTS)
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    assert metrics(resumed) == metrics(uninterrupted)
