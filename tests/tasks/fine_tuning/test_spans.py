"""The best spans of windows, and of questions, against trying all."""

from __future__ import annotations

import math

import pytest
import torch

from lit_probattn.tasks.fine_tuning.spans import Window, best_spans, merge, probabilities


@pytest.mark.parametrize("count", [1, 4, 200])
@pytest.mark.parametrize("longest", [1, 3, 30])
def test_best_spans_are_those_of_all_pairs(longest, count):
    generator = torch.Generator().manual_seed(2)
    start, end = torch.randn(2, 3, 9, generator=generator, dtype=torch.float64)
    allowed = torch.zeros(3, 9, dtype=torch.bool)
    for row, (first, last) in enumerate(((2, 8), (0, 3), (5, 6))):
        allowed[row, first:last] = True
    found = best_spans(start, end, allowed, count=count, max_answer_length=longest)
    for row in range(3):
        every = sorted(
            (
                (float(start[row, s] + end[row, e]), s, e)
                for s in range(9)
                for e in range(s, min(9, s + longest))
                if allowed[row, s] and allowed[row, e]
            ),
            reverse=True,
        )[:count]
        real = found.scores[row] > -math.inf
        got = zip(*(part[row][real].tolist() for part in found), strict=True)
        assert [(s, e) for _, s, e in every] == [(s, e) for _, s, e in got]
        torch.testing.assert_close(
            found.scores[row][real], torch.tensor([s for s, *_ in every], dtype=torch.float64)
        )


CONTEXTS = ["Ada went to Oslo and Oslo again", "", "Eve bought salt"]


def test_windows_of_a_question_are_read_together():
    """The best text of all, each once; the least score of no answer."""
    windows = [
        Window(2, 1.0, [(3.0, 11, 15)]),
        Window(0, 2.0, [(1.5, 12, 16), (1.0, 0, 3)]),
        Window(0, 0.5, [(2.5, 21, 25), (0.5, 0, 8), (0.1, 3, 4)]),
    ]
    first, second = merge(windows, CONTEXTS, 3)
    assert first.question == 0
    assert first.null == 0.5
    assert first.texts == ["Oslo", "Ada", "Ada went"]
    assert first.scores == [2.5, 1.0, 0.5]
    assert first.odds == -2.0
    assert second.text == "salt"
    assert second.odds == -2.0


def test_the_order_of_windows_changes_nothing():
    windows = [Window(0, float(i), [(1.0, i, i + 3), (0.5, 0, i + 1)]) for i in range(6)]
    assert merge(windows, CONTEXTS, 4) == merge(windows[::-1], CONTEXTS, 4)


def test_without_a_text_there_is_no_answer():
    (found,) = merge([Window(0, 1.0, [(5.0, 3, 4)])], CONTEXTS, 2)  # a blank
    assert found.text == ""
    assert found.odds == math.inf


def test_probabilities_are_a_softmax():
    expected = torch.tensor([1.0, 3.0, -700.0], dtype=torch.float64).softmax(0).tolist()
    assert probabilities([1.0, 3.0, -700.0]) == pytest.approx(expected)
    assert probabilities([]) == []
