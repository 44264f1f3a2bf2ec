"""Fine-tuning trains alike for every layout, and goes on after a kill bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch

from lit_probattn.cli.app import main
from lit_probattn.tasks import QuestionAnswering, TextClassifier
from tests.datamodules.text.fine_tuning import made
from tests.support.runs import (
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

DOUBLE = ("--trainer.precision", "64-true")
NO_DROPOUT = ("--model.init_args.dropout", "0.0")  # torch's dropout differs by rank
NO_HEAD_DROPOUT = ("--model.init_args.head_dropout", "0.0")
TWO_PROCESSES = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
TWO_PARTS = ("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "16")
TASKS = ("squad_v2", "mnli")


def command(name: str, folder: Path, task: str, *more: str) -> list[str]:
    """Attention dropout stays on: it is drawn by sample, so the layout is irrelevant."""
    attention = write_attention(folder, "MGKAttention", num_components=2)
    text = folder.parent / task
    if not text.exists():
        made.write_squad(text, "2.0") if task == "squad_v2" else made.write_mnli(text)
    files = ["--task", f"tiny/{task}", "--attention", attention]
    place = ["--run.root", str(folder / "runs"), "--trainer.accelerator", "cpu"]
    place += ["--data.init_args.cache_dir", str(folder.parent / "cache")]
    place += ["--data.init_args.path", str(text)]
    if "--trainer.devices" not in more:
        place += ["--trainer.devices", "1"]
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.log_every_n_steps", "1"]
    dropout = ["--model.init_args.attention_dropout", "0.2"]
    return [name, *files, *place, *quiet, *dropout, *more]


def trained(factory, task, *more):
    """Run folder of a training in as many processes as it says."""
    folder = factory.mktemp("run")
    work = command("fit", folder, task, *more)
    if "--trainer.strategy" in more:
        assert in_ranks(lambda: main(work)) == [0, 0]
    else:
        run(work)
    return folder


def still(task):
    return (*NO_DROPOUT, *(NO_HEAD_DROPOUT if task == "mnli" else ()))


@pytest.fixture(scope="module", params=TASKS)
def whole(request, tmp_path_factory):
    task = request.param
    return task, trained(tmp_path_factory, task, *still(task), *DOUBLE)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TWO_PROCESSES, id="processes"),
        pytest.param(TWO_PARTS, id="accumulation"),
        pytest.param((*TWO_PARTS, *TWO_PROCESSES), id="both", marks=pytest.mark.slow),
    ],
)
def test_layouts_train_alike_in_double_precision(whole, tmp_path_factory, layout):
    task, folder = whole
    other = trained(tmp_path_factory, task, *still(task), *DOUBLE, *layout)
    rows = [metrics(only_version(place)) for place in (folder, other)]
    assert len(rows[0]) == len(rows[1]) == 16
    for first, second in zip(*rows, strict=True):
        assert first.keys() == second.keys()
        for key in first:
            if key.startswith(("train/", "val/")) and first[key]:
                assert float(second[key]) == pytest.approx(
                    float(first[key]), rel=1e-6 if key.endswith("accuracy") else 1e-10
                )
    states = [newest_state(only_version(place))["state_dict"] for place in (folder, other)]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-9, atol=1e-11)


def test_two_processes_score_and_predict_like_one(whole):
    task, folder = whole
    found = []
    for more in ((), TWO_PROCESSES):
        for name in ("test", "predict"):
            work = command(name, folder, task, *still(task), *DOUBLE, "--ckpt_path", "last", *more)
            assert set(in_ranks(lambda work=work: main(work), 2 if more else 1)) == {0}
        version = only_version(folder)
        report = json.loads((version / "test-step-00000016.json").read_text())
        table = pd.read_parquet(version / "predictions-step-00000016.parquet")
        found.append(({k: v for k, v in report.items() if k.startswith(("test/", "num"))}, table))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    pd.testing.assert_frame_equal(found[0][1], found[1][1], rtol=1e-6)
    if task == "squad_v2":
        assert found[0][0]["test/questions"] == 9.0 == len(found[0][1])


@pytest.mark.parametrize(
    ("task", "cls"), [("squad_v2", QuestionAnswering), ("mnli", TextClassifier)]
)
def test_killed_and_resumed_equals_uninterrupted(task, cls, tmp_path_factory, monkeypatch):
    """With dropout, inside an optimiser step of two parts, and with initial weights."""
    first = trained(tmp_path_factory, task, "--trainer.max_steps", "4")
    weights = ("--init_from", str(only_version(first) / "checkpoints/step-00000004.ckpt"))
    uninterrupted = only_version(trained(tmp_path_factory, task, *TWO_PARTS, *weights))
    train = cls.training_step

    def step(self, batch, batch_idx):
        if batch_idx == 21:
            kill_me()
        return train(self, batch, batch_idx)

    folder = tmp_path_factory.mktemp("killed")
    words = command("fit", folder, task, *TWO_PARTS, *weights)
    with monkeypatch.context() as context:
        context.setattr(cls, "training_step", step)
        assert in_child(lambda: main(words)) == -signal.SIGKILL
    run([*words, "--ckpt_path", "last"])
    resumed = only_version(folder)
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    assert metrics(resumed) == metrics(uninterrupted)
