"""Every task's sums over ranks: training losses of parts, and scores, without other processes."""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_probattn.models.language_model import IGNORE
from lit_probattn.rollouts.facts import EvaluationFacts
from lit_probattn.tasks import Task
from lit_probattn.tasks.distributed import sum_with_gradients
from tests.tasks import test_language_model as language_model
from tests.tasks import test_masked_lm as masked_lm
from tests.tasks import test_translation as translation
from tests.tasks.decision import test_task as decision
from tests.tasks.distributed.simulated import last_rank
from tests.tasks.fine_tuning import test_question_answering as questions

Made = tuple[Task, dict[str, Any]]


def of_language_model() -> Made:
    inputs = torch.randint(41, (4, 7), generator=torch.Generator().manual_seed(2))
    target = inputs.roll(-1, 1)
    target[1:3, 4:] = IGNORE  # rows have different numbers of tokens
    rows = {"sample_ids": torch.arange(4), "num_words": torch.tensor([3, 0, 2, 5])}
    rows["key_mask"] = target != IGNORE
    return language_model.task().double().eval(), {"inputs": inputs, "target": target, **rows}


def of_masked_lm() -> Made:
    task = masked_lm.make_task(next_sentence=True, num_token_types=2)
    return task.double().eval(), masked_lm.pairs(4)


def of_questions() -> Made:
    """Two windows of the first question, one of the second."""
    task = questions.make_task()
    asked = [
        SimpleNamespace(context="abcdefghi", answers=["b", "fg"]),
        SimpleNamespace(context="rstuvwxyz", answers=[]),
    ]
    data = SimpleNamespace(
        version="2.0",
        questions=lambda split: asked,
        question_of=lambda split, window: window // 2,
        characters=lambda split, window, first, last: (first, last + 1),
    )
    task._data = lambda: data
    batch = questions.batch()
    return task, {**batch, "answerable": batch["key_mask"]}


def of_translation() -> Made:
    data = translation.batch()
    return translation.with_coder(translation.make_task().double(), data), data


MADE = {
    "language_model": of_language_model,
    "masked_language_model": of_masked_lm,
    "fine_tuning.question_answering": of_questions,
    "translation": of_translation,
}
# The collectives of each task's `log_scores`.
CALLS = {
    "language_model": ["language_model.sum_over_ranks"],
    "masked_language_model": ["base.sum_over_ranks"],
    **{
        name: ["base.sum_over_ranks", f"{name}.gather_objects"]
        for name in ("fine_tuning.question_answering", "translation")
    },
}


def rows_of(batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {
        name: value[rows] if torch.is_tensor(value) and value.dim() else value
        for name, value in batch.items()
    }


def scored(name: str, rows: slice) -> tuple[Task, dict[str, float]]:
    """A task that has evaluated some rows of its batch, and what its `log_scores` will log."""
    task, batch = MADE[name]()
    logged: dict[str, float] = {}
    task.log = lambda key, value, **_: logged.__setitem__(key, float(value))
    task.log_dict = lambda values, **_: logged.update({k: float(v) for k, v in values.items()})
    with torch.no_grad():
        task.evaluate(rows_of(batch, rows), "val")
    return task, logged


@pytest.mark.parametrize("name", MADE)
def test_scores_are_those_of_the_rows_of_all_ranks(name, monkeypatch):
    """With other processes, for one task: test_exact_metrics.py."""
    (task, whole), (first, alone), (last, together) = (
        scored(name, rows) for rows in (slice(None), slice(0, 1), slice(1, None))
    )
    task.log_scores("val")
    ranks = [lambda one=one: one.log_scores("val") for one in (first, last)]
    last_rank(monkeypatch, ranks, *CALLS[name])
    assert together == pytest.approx(whole, rel=1e-12)
    assert alone != pytest.approx(whole, rel=1e-3), "the first rank has seen its rows only"
    assert len(whole) > 2


@pytest.mark.parametrize("name", MADE)
def test_an_evaluation_with_gradients_leaves_no_graph(name):
    """A graph would keep the activations of the batch, and the task could not be copied."""
    task, batch = MADE[name]()
    task.evaluate(batch, "val")
    task.reset_scores()
    assert not task._sums.requires_grad
    copy.deepcopy(task)


@pytest.mark.parametrize("name", ["language_model", "translation"])
def test_the_mean_loss_of_ranks_and_micro_batches_is_that_of_the_global_batch(name, monkeypatch):
    """Two ranks of two micro-batches with different numbers of tokens."""
    monkeypatch.setattr("lit_probattn.tasks.base.num_ranks", lambda: 2)
    task, batch = MADE[name]()
    batch = {**batch, "global_tokens": (batch["target"] != IGNORE).sum()}
    count = len(batch["sample_ids"])
    task._trainer = SimpleNamespace(accumulate_grad_batches=2)
    bounds = [*range(4), count] if count > 3 else range(4)
    parts = [task.batch_loss(rows_of(batch, slice(*pair))) for pair in pairwise(bounds)]
    losses = task.token_losses(batch)
    expected = losses[:, 0].mean() if losses.dim() == 2 else losses.mean()
    torch.testing.assert_close(sum(parts) / 4, expected, rtol=1e-12, atol=0)


def test_gradients_of_ranks_with_unlike_numbers_of_steps_are_those_of_the_global_batch(monkeypatch):
    """A loss whose weights are known at the end of a step only; two micro-batches per rank."""
    lengths = (5, 2, 4, 1)
    batch = decision.batch(lengths)
    monkeypatch.setattr(Task, "on_before_optimizer_step", lambda *_: None)
    monkeypatch.setattr("lit_probattn.tasks.counted.num_ranks", lambda: 2)

    def gradients_of(rank: int) -> list[torch.Tensor]:
        task = decision.make_task().double().eval()
        for row in (2 * rank, 2 * rank + 1):
            (task.training_step(rows_of(batch, slice(row, row + 1)), row) / 2).backward()
        task.on_before_optimizer_step(None)
        return [parameter.grad for parameter in task.parameters()]

    monkeypatch.setattr(
        "lit_probattn.tasks.counted.sum_over_ranks", lambda _: torch.tensor([float(sum(lengths))])
    )
    first, second = gradients_of(0), gradients_of(1)
    whole = decision.make_task().double().eval()
    whole.batch_loss(batch).backward()
    for one, other, parameter in zip(first, second, whole.parameters(), strict=True):
        torch.testing.assert_close((one + other) / 2, parameter.grad, rtol=1e-10, atol=1e-14)


def test_episodes_of_two_ranks_are_those_of_one(monkeypatch):
    task = decision.make_task().double()
    task.facts = EvaluationFacts.of(decision.make_data())
    alone = task.play(28.0, 3)
    monkeypatch.setattr("lit_probattn.tasks.decision.num_ranks", lambda: 2)

    def play(rank: int) -> list[Any]:
        task._trainer = SimpleNamespace(global_rank=rank, progress_bar_callback=None)
        return task.play(28.0, 3)

    ranks = [lambda rank=rank: play(rank) for rank in (0, 1)]
    together = last_rank(monkeypatch, ranks, "decision.gather_objects")
    for one, other in zip(alone, together, strict=True):
        assert (one.number, one.length) == (other.number, other.length)
        assert one.total == pytest.approx(other.total, rel=1e-9)
    assert [episode.number for episode in alone] == [0, 1, 2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_a_sum_over_ranks_are_sums_over_ranks(ranks, monkeypatch):
    """Two ranks with values x and 2 x, and gradients g and 2 g; one rank has no sum to form."""
    module, calls = "lit_probattn.tasks.distributed", []

    def summed(values):
        calls.append(values.clone())
        return 3 * values

    monkeypatch.setattr(f"{module}.num_ranks", lambda: ranks)
    monkeypatch.setattr(f"{module}.sum_over_ranks", summed)
    values = torch.tensor([1.0, -2.0, 5.0], requires_grad=True)
    total = sum_with_gradients(values)
    total.backward(torch.tensor([7.0, 0.5, 1.0]))
    factor = 3 if ranks == 2 else 1
    assert total.tolist() == [factor * x for x in (1.0, -2.0, 5.0)]
    assert values.grad.tolist() == [factor * x for x in (7.0, 0.5, 1.0)]
    assert len(calls) == 2 * (ranks - 1)
