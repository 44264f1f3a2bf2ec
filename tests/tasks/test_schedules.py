"""Schedules against torch's own, and at the points that the recipe names."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from lit_probattn.tasks.schedules import check_schedule, lengths_of_run, schedule_values
from tests.tasks import tiny


@pytest.mark.parametrize(("total", "warmup"), [(50, 10), (53, 7), (31, 30), (20, 2)])
def test_one_cycle_equals_torch(total, warmup):
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = OneCycleLR(
        optimizer,
        max_lr=3e-3,
        total_steps=total,
        pct_start=warmup / total,
        anneal_strategy="linear",
    )
    for step in range(total):
        ours = schedule_values(
            "one_cycle", step, peak_lr=3e-3, total_steps=total, warmup_steps=warmup
        )
        group = optimizer.param_groups[0]
        assert ours.lr == pytest.approx(group["lr"], rel=1e-9, abs=1e-15)
        assert ours.beta1 == pytest.approx(group["betas"][0], rel=1e-12)
        optimizer.step()
        if step + 1 < total:
            theirs.step()


def test_recipe_of_listops():
    """Peak 1e-4, start 4e-6, end 4e-10 - the values of the specification."""

    def at(step):
        return schedule_values("one_cycle", step, peak_lr=1e-4, total_steps=5000, warmup_steps=1000)

    assert at(0).lr == pytest.approx(4e-6)
    assert at(999).lr == pytest.approx(1e-4)
    assert at(4999).lr == pytest.approx(1.6e-11 * 25)
    assert [at(s).beta1 for s in (0, 999, 4999)] == pytest.approx([0.95, 0.85, 0.95])


def test_without_momentum_cycling_beta1_is_left_alone():
    values = schedule_values(
        "one_cycle", 3, peak_lr=1.0, total_steps=10, warmup_steps=2, cycle_momentum=False
    )
    assert values.beta1 is None


def test_linear_is_that_of_bert():
    """Up over the warm-up, then the rest of the steps over those after it, as in transformers."""
    lrs = [
        schedule_values("linear", step, peak_lr=3.0, total_steps=12, warmup_steps=4).lr
        for step in range(12)
    ]
    assert lrs[:4] == pytest.approx([0.75, 1.5, 2.25, 3.0])
    assert lrs[4:] == pytest.approx([3.0 * (12 - step) / 8 for step in range(4, 12)])
    assert schedule_values("linear", 0, peak_lr=3.0, total_steps=5, warmup_steps=0).lr == 3.0
    with pytest.raises(ValueError, match="warmup_steps below its length"):
        check_schedule("linear", total_steps=5, warmup_steps=5)
    with pytest.raises(ValueError, match=r"step must be in 0\.\.4"):
        schedule_values("linear", 5, peak_lr=3.0, total_steps=5, warmup_steps=0)


def test_cosine_and_constant():
    def cosine(step):
        return schedule_values("cosine", step, peak_lr=2.0, total_steps=11, warmup_steps=2).lr

    assert [cosine(s) for s in (0, 1, 2, 10)] == pytest.approx([1.0, 2.0, 2.0, 0.0])
    assert cosine(6) == pytest.approx(1 + math.cos(math.pi / 2))

    def constant(step):
        return schedule_values("constant", step, peak_lr=2.0, total_steps=-1, warmup_steps=4).lr

    assert [constant(s) for s in (0, 3, 4, 10**6)] == pytest.approx([0.5, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_is_refused(step):
    with pytest.raises(ValueError, match=f"0..9.*received {step}"):
        schedule_values("one_cycle", step, peak_lr=1.0, total_steps=10, warmup_steps=2)


def test_lengths_without_meaning_are_refused():
    with pytest.raises(ValueError, match="warmup_steps 10 and schedule_steps 10"):
        check_schedule("cosine", total_steps=10, warmup_steps=10)
    with pytest.raises(ValueError, match="at least 0, received -1"):
        check_schedule("constant", total_steps=10, warmup_steps=-1)
    check_schedule("constant", total_steps=-1, warmup_steps=10)


@pytest.mark.parametrize(
    ("max_steps", "schedule_steps", "warmup", "expected"),
    [
        (8, None, 50, (8, 0)),
        (60, None, 60, (60, 6)),
        (60, None, 59, (60, 59)),
        (1000, 20000, 8000, (20000, 8000)),  # a part of a longer schedule
        (9000, 20000, 8000, (20000, 8000)),  # longer than the warm-up: as configured
        (8, 50, 50, (50, 50)),  # no run of the schedule has a meaning: to be refused
        (-1, None, 5, (-1, 5)),
    ],
)
def test_a_warm_up_as_long_as_the_run_is_scaled_to_it(max_steps, schedule_steps, warmup, expected):
    assert lengths_of_run(max_steps, schedule_steps, warmup) == expected


@pytest.mark.parametrize(
    ("max_steps", "schedule_steps", "said"),
    [
        (
            8,
            None,
            "warm-up scaled: warmup_steps 9 is not below max_steps 8; the schedule ends",
        ),
        (
            8,
            50,
            "max_steps 8 ends within the warm-up of 9 steps: for a complete schedule set --model",
        ),
        (9, 50, "max_steps 9 ends within the warm-up of 9 steps"),
        (10, 50, ""),
        (10, None, ""),
    ],
)
def test_what_becomes_of_the_warm_up_is_one_line(max_steps, schedule_steps, said, capsys):
    steps = {"schedule_steps": schedule_steps, "warmup_steps": 9}
    task = tiny.task(schedule="cosine_global", **steps)
    task.trainer = tiny.trainer(max_steps)
    capsys.readouterr()
    task.setup("fit")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == bool(said)
    assert all(line.startswith(said) for line in lines)


def test_rate_and_momentum_of_every_step_are_logged():
    """BERT's schedule of four steps, two of them warm-up, written out."""
    logged = []

    class Log(Callback):
        def on_train_batch_end(self, trainer, *_):
            values = trainer.callback_metrics
            logged.append((float(values["lr"]), float(values["beta1"])))

    module = tiny.task(schedule="linear", warmup_steps=2, lr=0.5, betas=(0.75, 0.99))
    tiny.trainer(4, callbacks=[Log()], log_every_n_steps=1).fit(module, tiny.data())
    assert logged == [(0.25, 0.75), (0.5, 0.75), (0.5, 0.75), (0.25, 0.75)]
