"""Exact match and F1 of answers, as the evaluation of SQuAD defines them.

Both compare normalised texts: lower case, without ASCII punctuation, without the articles
a, an and the, and with single spaces. The score of a prediction is the maximum over the correct
answers. F1 compares bags of words:

    precision = common / words of the prediction,  recall = common / words of the answer

Version 1.1 gives F1 0 if a side has no words left; version 2.0 gives 1 if neither has any,
and drops correct answers without words, unless none remain: such a question has no answer.

Source: Rajpurkar et al., 2016 and 2018: evaluate-v1.1.py and evaluate-v2.0.py.
"""

from __future__ import annotations

import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Version = Literal["1.1", "2.0"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Return a text normalised for comparison."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, answers: Sequence[str], version: Version = "1.1") -> float:
    """Return 1 if a prediction equals one of the answers, else 0."""
    return max(_equal(prediction, answer) for answer in _compared(answers, version))


def f1(prediction: str, answers: Sequence[str], version: Version = "1.1") -> float:
    """Return the largest F1 of a prediction and an answer, in [0, 1]."""
    return max(_overlap(prediction, answer, version) for answer in _compared(answers, version))


def has_answer(answers: Sequence[str]) -> bool:
    """Return whether a question of version 2.0 has an answer."""
    return any(answers)


def _compared(answers: Sequence[str], version: Version) -> Sequence[str]:
    if version == "1.1":
        return answers
    return [answer for answer in answers if normalise(answer)] or [""]


def _equal(prediction: str, answer: str) -> float:
    return float(normalise(prediction) == normalise(answer))


def _overlap(prediction: str, answer: str, version: Version) -> float:
    found, wanted = normalise(prediction).split(), normalise(answer).split()
    if not found or not wanted:
        return float(version == "2.0" and found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


# ---- all questions -----------------------------------------------------------------------------


class Prediction(NamedTuple):
    """Prediction for one question.

    Attributes:
        text: most likely non-empty answer; empty if there is none.
        odds: no-answer score minus the score of `text`.
        answers: correct answers; none, or empty ones, if there is no answer.
    """

    text: str
    odds: float
    answers: Sequence[str]


class Best(NamedTuple):
    """The best score over all thresholds, in percent, and the smallest threshold that gives it."""

    score: float
    threshold: float


def scores_of(
    predictions: Iterable[Prediction], version: Version, threshold: float = 0.0
) -> dict[str, float]:
    """Return the mean scores of all questions, in percent, and the number of questions.

    Args:
        predictions: one for each question, in any order.
        threshold: in version 2.0, no answer is predicted if `odds` exceeds it.

    Returns:
        `exact_match`, `f1`, `questions`. In version 2.0 also the same for questions with and
        without an answer (`has_answer_…`, `no_answer_…`, if there are any), and
        `best_exact_match`, `best_f1` with their thresholds, `best_…_threshold`.
    """
    rows = list(predictions)
    if version == "1.1":
        pairs = [(row.text, row.answers or ("",)) for row in rows]
    else:
        pairs = [(_thresholded(row, threshold), row.answers or ("",)) for row in rows]
    exact = [exact_match(text, answers, version) for text, answers in pairs]
    overlap = [f1(text, answers, version) for text, answers in pairs]
    scores = _means("", exact, overlap)
    if version == "1.1":
        return scores
    known = [has_answer(row.answers) for row in rows]
    for name, wanted in (("has_answer_", True), ("no_answer_", False)):
        places = [place for place, found in enumerate(known) if found == wanted]
        if places:
            scores |= _means(name, [exact[i] for i in places], [overlap[i] for i in places])
    for name, score in (("exact_match", exact_match), ("f1", f1)):
        plain = [score(row.text, row.answers or ("",), version) for row in rows]
        best = best_threshold(plain, known, [row.odds for row in rows])
        scores |= {f"best_{name}": best.score, f"best_{name}_threshold": best.threshold}
    return scores


def _thresholded(row: Prediction, threshold: float) -> str:
    return "" if row.odds > threshold else row.text


def _means(name: str, exact: Sequence[float], overlap: Sequence[float]) -> dict[str, float]:
    count = len(exact)
    share = 100.0 / count if count else float("nan")
    means = {"exact_match": share * sum(exact), "f1": share * sum(overlap), "questions": count}
    return {f"{name}{key}": float(value) for key, value in means.items()}


def best_threshold(scores: Sequence[float], known: Sequence[bool], odds: Sequence[float]) -> Best:
    """Return the threshold with the best mean score.

    If the odds exceed it, no answer is predicted, which scores 1 for a question without an
    answer, and 0 otherwise. Candidate thresholds are the odds themselves, and one below all of
    them.

    Departs from the source: questions with equal odds are on the same side of a threshold.

    Args:
        scores: scores of the predicted texts, in [0, 1].
        known: whether each question has an answer.
        odds: odds of no answer.
    """
    if not scores:
        return Best(float("nan"), 0.0)
    gains: defaultdict[float, float] = defaultdict(float)
    for score, answered, value in zip(scores, known, odds, strict=True):
        gains[value] += score - (0.0 if answered else 1.0)
    total = float(sum(not answered for answered in known))
    best, threshold = total, min(odds) - 1.0
    for value in sorted(gains):
        total += gains[value]
        if total > best:
            best, threshold = total, value
    return Best(100.0 * best / len(scores), threshold)
