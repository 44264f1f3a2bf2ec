"""Accuracy and perplexity do not depend on the number of processes (R11)."""

from __future__ import annotations

import pytest

from tests.support.exact_metrics import NUM_TEST, TASKS, WORLD_SIZES, scores, table

STEPS = 1  # scores of a model that has learned nothing are as exact


# One task with two processes: ../../training/curves/test_test_scores.py; all: test_simulated.py.
@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_metrics_are_exact_for_every_number_of_processes(task, tmp_path):
    found = scores(task, tmp_path, "64-true", steps=STEPS)
    print(table(found))
    assert [score.world_size for score in found] == list(WORLD_SIZES)
    alone, *others = found
    assert all(alone.num_samples % score.world_size for score in others)
    for score in others:
        assert score.num_samples == alone.num_samples
        if task == "classifier":
            assert score.values["test/accuracy"] == alone.values["test/accuracy"]
            correct = alone.values["test/accuracy"] * NUM_TEST
            assert correct == pytest.approx(round(correct), abs=1e-5)
        else:
            perplexity = score.values["test/ppl_sliding"]
            assert perplexity == pytest.approx(alone.values["test/ppl_sliding"], rel=1e-12)
