"""Translation trains alike for every layout, and goes on after a kill bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from lit_probattn.cli.app import main
from lit_probattn.tasks import Translation
from tests.support.runs import (
    ROOT,
    fingerprint,
    in_child,
    in_ranks,
    kill_me,
    metrics,
    newest_state,
    only_version,
    run,
    write_attention,
)

pytest.importorskip("sacrebleu")
TASK = str(ROOT / "configs/tasks/tiny/translation.yaml")
DOUBLE = ("--trainer.precision", "64-true")
NO_DROPOUT = ("--model.init_args.dropout", "0.0")  # torch's dropout differs by rank
TWO_PROCESSES = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
TWO_PARTS = ("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "16")


def command(folder: Path, *more: str, name: str = "fit") -> list[str]:
    """Attention dropout stays on: it is drawn by sample, so the layout is irrelevant."""
    attention = write_attention(folder, "MGKAttention", num_components=2)
    place = ["--run.root", str(folder / "runs"), "--trainer.accelerator", "cpu"]
    place += ["--data.init_args.cache_dir", str(folder.parent / "cache")]
    if "--trainer.devices" not in more:
        place += ["--trainer.devices", "1"]
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.log_every_n_steps", "1"]
    dropout = ["--model.init_args.attention_dropout", "0.2"]
    files = ["--config", TASK, "--config", attention]
    return [name, *files, *place, *quiet, *dropout, *more]


def trained(factory, *more):
    """Run folder of a training in as many processes as it says."""
    folder = factory.mktemp("run")
    work = command(folder, *more)
    if "--trainer.strategy" in more:
        assert in_ranks(lambda: main(work)) == [0, 0]
    else:
        run(work)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained(tmp_path_factory, *NO_DROPOUT)


@pytest.fixture(scope="module")
def whole_double(tmp_path_factory):
    return trained(tmp_path_factory, *NO_DROPOUT, *DOUBLE)


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
    assert_same_losses(whole, trained(tmp_path_factory, *NO_DROPOUT, *TWO_PROCESSES), 1e-6)


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
    assert_same_losses(whole_double, trained(tmp_path_factory, *more), 1e-12)


def test_evaluation_and_predictions_of_two_processes_are_those_of_one(whole):
    found = []
    for more in ((), TWO_PROCESSES):
        work = command(whole, *NO_DROPOUT, "--ckpt_path", "last", *more, name="test")
        assert set(in_ranks(lambda work=work: main(work), 2 if more else 1)) == {0}
        path = only_version(whole) / "test-step-00000016.json"
        found.append(json.loads(path.read_text()))
        path.unlink()
    assert [report["num_samples"] for report in found] == [21, 21]
    assert found[0]["bleu"] == found[1]["bleu"]
    assert found[1]["test/nll"] == pytest.approx(found[0]["test/nll"], rel=1e-6)


def test_killed_and_resumed_equals_uninterrupted(tmp_path_factory, tmp_path, monkeypatch):
    """With dropout, inside an optimiser step of two parts."""
    uninterrupted = only_version(trained(tmp_path_factory, *TWO_PARTS))
    train = Translation.training_step

    def step(self, batch, batch_idx):
        if batch_idx == 21:
            kill_me()
        return train(self, batch, batch_idx)

    with monkeypatch.context() as context:
        context.setattr(Translation, "training_step", step)
        assert in_child(lambda: main(command(tmp_path, *TWO_PARTS))) == -signal.SIGKILL
    run(command(tmp_path, *TWO_PARTS, "--ckpt_path", "last"))
    resumed = only_version(tmp_path)
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    assert metrics(resumed) == metrics(uninterrupted)
