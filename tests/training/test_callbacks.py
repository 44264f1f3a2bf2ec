"""Callbacks of every run: lines of progress, sources of the ranks, the record, throughput."""

from __future__ import annotations

import json
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar
from torch import nn

from lit_probattn.attention import recorded_choices
from lit_probattn.base.errors import ConfigError
from lit_probattn.training import callbacks
from lit_probattn.training.callbacks import (
    PlainProgress,
    RunRecord,
    SameSources,
    Throughput,
    make_progress_bar,
)
from lit_probattn.training.evaluation import TestScores
from lit_probattn.training.run_record import read_starts


@pytest.fixture
def progress(monkeypatch):
    """Return a function that passes the micro-batch after `step` steps at second `now`."""
    bar = PlainProgress()
    trainer = SimpleNamespace(max_steps=10, is_global_zero=True)
    trainer.callback_metrics = {"train/loss": 0.5}

    def at(step, now, hook="on_train_batch_end"):
        monkeypatch.setattr(callbacks.time, "monotonic", lambda: now)
        trainer.global_step = step
        getattr(bar, hook)(trainer, None)

    at(2, 100.0, "on_train_start")
    at.bar = bar
    return at


def test_progress_is_printed_at_the_first_step_every_ten_seconds_and_at_the_last(progress, capsys):
    for step, now in ((2, 101.0), (3, 102.0), (4, 111.9), (5, 112.0), (10, 116.0)):
        progress(step, now)
    assert capsys.readouterr().out.splitlines() == [
        "step  3/10  loss 0.5000  0.50 steps/s  remaining 0:00:14",
        "step  5/10  loss 0.5000  0.25 steps/s  remaining 0:00:20",
        "step 10/10  loss 0.5000  0.50 steps/s  remaining 0:00:00",
    ]


def test_progress_that_is_disabled_prints_nothing_until_it_is_enabled(progress, capsys):
    progress.bar.disable()
    progress(3, 102.0)
    assert capsys.readouterr().out == ""
    progress.bar.enable()
    progress(4, 120.0)
    assert capsys.readouterr().out.startswith("step  4/10")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_only(is_terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: is_terminal))
    assert isinstance(make_progress_bar(), RichProgressBar) == is_terminal


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        ({"train.tsv": "1", "test.tsv": "2"}, None),
        ({"train.tsv": "1", "test.tsv": "3"}, "test.tsv"),
        ({"train.tsv": "1"}, "test.tsv"),
        ({"train.tsv": "1", "test.tsv": "2", "more.tsv": "3"}, "more.tsv"),
    ],
)
def test_a_rank_with_other_source_files_ends_the_run(other, differing, monkeypatch):
    own = {"train.tsv": "1", "test.tsv": "2"}
    trainer = SimpleNamespace(world_size=2, datamodule=SimpleNamespace(source_hashes=own))
    monkeypatch.setattr(callbacks, "gather_objects", lambda mine: [mine, other])
    with raises_unless(differing is None, rf"\(different: {differing}\)"):
        SameSources().setup(trainer, None, "fit")


def raises_unless(is_equal, message):
    return nullcontext() if is_equal else pytest.raises(ConfigError, match=message)


@pytest.mark.parametrize(("is_first", "lines"), [(True, 1), (False, 0)])
def test_the_first_rank_records_the_first_step_alone(is_first, lines, tmp_path, capsys):
    (tmp_path / "versions.json").write_text(json.dumps({"starts": [{}]}))
    record = RunRecord(tmp_path)
    trainer = SimpleNamespace(is_global_zero=is_first, world_size=3, precision="32-true")
    for _ in range(2):
        record.on_train_batch_end(trainer, nn.Linear(3, 5))
    assert capsys.readouterr().out.count("parameters: 20;") == lines
    recorded = read_starts(tmp_path)[0]
    assert recorded.pop("backends", None) == (recorded_choices() if is_first else None)
    known = {"num_parameters": 20, "world_size": 3, "precision": "32-true"}
    assert recorded == (known if is_first else {})


def test_samples_per_second_are_those_of_all_ranks_without_pauses(monkeypatch):
    """Three micro-batches of 4 samples, 2 ranks and 0.5 s each; 60 s of validation after two."""
    seconds, logged = [0.0], {}
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: seconds[0])
    trainer = SimpleNamespace(world_size=2, accumulate_grad_batches=3, log_every_n_steps=1)
    trainer.global_step = 0
    task = SimpleNamespace(device=torch.device("cpu"), log=logged.__setitem__)
    throughput = Throughput()
    for batch_idx in range(3):
        throughput.on_train_batch_start()
        seconds[0] += 0.5
        trainer.global_step = (batch_idx + 1) // 3
        throughput.on_train_batch_end(trainer, task, None, {"sample_ids": range(4)}, batch_idx)
        if batch_idx == 1:
            assert logged == {}
            throughput.on_validation_start()
            seconds[0] += 60.0
    assert logged == {"samples_per_second": 16.0}


def test_the_loader_of_test_scores_is_released_when_the_training_ends():
    """It can have worker processes."""
    scores, loaders = TestScores(1), []

    def test_as_validation():
        loaders.append(nn.Identity())
        return loaders[0]

    data = SimpleNamespace(test_as_validation=test_as_validation)
    scores.on_fit_start(SimpleNamespace(datamodule=data), None)
    held = weakref.ref(loaders.pop())
    assert held() is not None
    scores.teardown(None, None, "fit")
    assert held() is None
