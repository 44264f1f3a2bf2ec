"""Exact match and F1 against the sums written out, and thresholds against all there are."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from lit_probattn.tasks.fine_tuning.answers import (
    Prediction,
    best_threshold,
    exact_match,
    f1,
    normalise,
    scores_of,
)

# Prediction, correct answers, exact match, and F1 as a fraction: 2 · common / (words of both).
CASES = [
    ("Denver Broncos", ["Denver Broncos"], 1, (4, 4)),
    ("the Denver Broncos", ["Denver Broncos"], 1, (4, 4)),
    ("The Denver Broncos!", ["denver  broncos"], 1, (4, 4)),
    ("Broncos", ["Denver Broncos"], 0, (2, 3)),
    ("Denver, Broncos of Colorado", ["Denver Broncos"], 0, (4, 6)),
    ("Panthers", ["Denver Broncos"], 0, (0, 3)),
    ("Carolina", ["Denver Broncos", "Carolina"], 1, (2, 2)),
    ("Carolina Panthers", ["the Panthers", "Carolina Hurricanes team"], 0, (2, 3)),
    ("U.S.", ["US"], 1, (2, 2)),
    ("U.S. dollars", ["dollars"], 0, (2, 3)),
    ("a an the", ["an"], 1, (0, 1)),  # nothing is left of either: F1 0 in version 1.1
    ("theatre", ["atre"], 0, (0, 2)),  # articles are whole words
    ("an apple a day", ["apple day"], 1, (4, 4)),
    ("one one two", ["one two two"], 0, (4, 6)),  # bags, not sets
    ("1,000", ["1000"], 1, (2, 2)),
    ("twenty-one", ["twenty one"], 0, (0, 3)),  # the hyphen leaves nothing behind
    ("\tnew\n york ", ["New York"], 1, (4, 4)),
    ("café", ["cafe"], 0, (0, 2)),
    ("“quoted”", ["quoted"], 0, (0, 2)),  # only punctuation of ASCII goes
    ("", ["Denver"], 0, (0, 1)),
]


@pytest.mark.parametrize(("prediction", "answers", "exact", "share"), CASES)
def test_scores_of_one_question(prediction, answers, exact, share):
    assert exact_match(prediction, answers) == exact
    assert f1(prediction, answers) == pytest.approx(share[0] / share[1], rel=1e-15)


def oracle_f1(prediction: str, answer: str) -> float:
    """Each word of the prediction is crossed out in the answer once."""
    words, left = normalise(prediction).split(), normalise(answer).split()
    wanted, common = len(left), 0
    for word in words:
        if word in left:
            left.remove(word)
            common += 1
    if not common:
        return 0.0
    precision, recall = common / len(words), common / wanted
    return 2 / (1 / precision + 1 / recall)


def test_f1_is_the_harmonic_mean_of_words_crossed_out():
    draw = random.Random(1)
    words = ["red", "the", "blue", "Red", "boat,", "a", "boat"]
    for _ in range(300):
        found, *answers = (
            " ".join(draw.choices(words, k=draw.randrange(1, 6)))
            for _ in range(draw.choice([2, 3]))
        )
        expected = max(oracle_f1(found, answer) for answer in answers)
        assert f1(found, answers) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "overlap"),
    [
        ("", [], 1.0, 1.0),
        ("Denver", [], 0.0, 0.0),
        ("the", [], 1.0, 1.0),  # normalised, nothing is left
        ("", ["Denver"], 0.0, 0.0),
        ("Denver", ["the", "Denver"], 1.0, 1.0),  # an answer without words does not count
        ("", ["the", "Denver"], 0.0, 0.0),
    ],
)
def test_version_2_knows_questions_without_an_answer(prediction, answers, exact, overlap):
    assert exact_match(prediction, answers, "2.0") == exact
    assert f1(prediction, answers, "2.0") == overlap


def test_means_are_in_percent():
    rows = [Prediction("the boat", 0.0, ["boat"]), Prediction("red boat", 9.0, ["boat", "ship"])]
    found = scores_of(rows, "1.1")
    assert found == {"exact_match": 50.0, "f1": pytest.approx(250 / 3), "questions": 2.0}


ROWS = [
    Prediction("boat", -2.0, ["boat"]),
    Prediction("red ship", 0.5, ["ship"]),
    Prediction("mill", -1.0, []),
    Prediction("owl", 3.0, []),
    Prediction("gate", 2.0, ["the gate", "iron gate"]),
]


def test_version_2_has_both_kinds_of_questions():
    found = scores_of(ROWS, "2.0", threshold=1.0)
    # boat 1, red ship 2/3, mill 0, no answer 1, no answer where there is one 0
    assert found["exact_match"] == pytest.approx(40.0)
    assert found["f1"] == pytest.approx(100 * (1 + 2 / 3 + 1) / 5)
    assert found["has_answer_questions"] == 3
    assert found["no_answer_questions"] == 2
    assert found["has_answer_f1"] == pytest.approx(100 * (1 + 2 / 3) / 3)
    assert found["no_answer_exact_match"] == pytest.approx(50.0)


def test_the_best_threshold_gives_the_best_score():
    found = scores_of(ROWS, "2.0")
    for name in ("exact_match", "f1"):
        threshold = found[f"best_{name}_threshold"]
        assert scores_of(ROWS, "2.0", threshold)[name] == pytest.approx(found[f"best_{name}"])
        every = [scores_of(ROWS, "2.0", t)[name] for t in (-9.0, -2.0, -1.0, 0.5, 2.0, 3.0)]
        assert found[f"best_{name}"] == pytest.approx(max(every))


def mean_at(threshold, rows):
    parts = [(not known if odds > threshold else score) for score, known, odds in rows]
    return 100 * sum(parts) / len(parts)


def test_the_best_threshold_is_that_of_trying_all():
    """With equal odds among them."""
    draw = random.Random(4)
    for count in (1, 2, 5, 9):
        for _ in range(40):
            scores = [draw.choice([0.0, 0.5, 1.0]) for _ in range(count)]
            known = [draw.random() < 0.5 for _ in range(count)]
            odds = [float(draw.randrange(4)) for _ in range(count)]

            rows = list(zip(scores, known, odds, strict=True))

            found = best_threshold(scores, known, odds)
            tried = [mean_at(t, rows) for t in itertools.chain([-1.0], odds)]
            assert found.score == pytest.approx(max(tried))
            assert mean_at(found.threshold, rows) == pytest.approx(found.score)


def test_of_thresholds_that_score_alike_the_smallest_is_named():
    best = best_threshold([1.0, 0.0, 0.0], [True, True, True], [0.5, 2.0, 3.0])
    assert best == (pytest.approx(100 / 3), 0.5)
    assert best_threshold([0.0, 0.0], [True, False], [0.5, 2.0]) == (50.0, -0.5)


def test_nothing_to_score():
    assert math.isnan(scores_of([], "1.1")["f1"])
