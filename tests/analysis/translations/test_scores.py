"""Scores of translations: counts that sum up, intervals, changed words, groups by length."""

from __future__ import annotations

import numpy as np
import pytest

from lit_probattn.analysis.translations.scores import (
    Bootstrap,
    bleu_of,
    buckets,
    changed_counts,
    changed_f1,
    changed_scores,
    score,
)
from lit_probattn.experiments.expectations import Estimate
from lit_probattn.tasks.bleu import FORMS, bleu_of_counts, corpus_bleu, sentence_counts

pytest.importorskip("sacrebleu")

REFERENCES = [
    "The well-known cat sat on the mat, and then it slept.",
    "A dog barked at the tall man in the street.",
    "Nobody read the long report about the budget.",
    "Yes.",
    "The well-known dog sat on the street, and then it barked.",
]
HYPOTHESES = [
    "the well-known cat sat on a mat, and then it slept.",
    "A dog barked at the man in the street.",
    "Nobody read the long report on budgets.",
    "No.",
    "The dog sat on the mat, and then it slept.",
]


@pytest.mark.parametrize("form", FORMS)
def test_counts_of_sentences_sum_to_the_score_of_the_corpus(form):
    counts = sentence_counts(HYPOTHESES, REFERENCES, form)
    whole = corpus_bleu(HYPOTHESES, REFERENCES, form)
    assert whole.score > 10
    assert bleu_of_counts(counts.sum(0), form) == pytest.approx(whole.score, rel=1e-12)
    assert counts[:, 8:].sum(0).tolist() == [whole.hypothesis_words, whole.reference_words]
    part = [0, 2, 3]
    alone = corpus_bleu([HYPOTHESES[i] for i in part], [REFERENCES[i] for i in part], form)
    assert bleu_of_counts(counts[part].sum(0), form) == pytest.approx(alone.score, rel=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_scores_without_longer_matches_are_smoothed_as_the_form_says(form):
    lines, against = ["a b x y z"], ["a b c d e"]
    counts = sentence_counts(lines, against, form).sum(0)
    expected = corpus_bleu(lines, against, form).score
    assert bleu_of_counts(counts, form) == pytest.approx(expected, rel=1e-12)
    assert (expected > 0) == (form == "detokenised")


def test_resamples_are_scores_of_the_sentences_drawn():
    """Against the score of each drawn list of sentences, counted anew."""
    draws = np.random.default_rng(3).integers(5, size=(7, 5))
    counts = sentence_counts(HYPOTHESES, REFERENCES, "detokenised")
    found = Bootstrap(5, 7, seed=3).scores(counts, bleu_of("detokenised"))
    for value, draw in zip(found, draws, strict=True):
        sides = ([lines[i] for i in draw] for lines in (HYPOTHESES, REFERENCES))
        assert value == pytest.approx(corpus_bleu(*sides, "detokenised").score, rel=1e-12)


def test_differences_are_paired():
    bootstrap = Bootstrap(5, 200, seed=0)
    made, again, copied = (
        score(sentence_counts(lines, REFERENCES, "detokenised"), bleu_of("detokenised"), bootstrap)
        for lines in (HYPOTHESES, HYPOTHESES, REFERENCES)
    )
    assert made.minus(again) == Estimate(0.0, 0.0, 0.0)
    own, difference = made.interval, copied.minus(made)
    assert own.low < own.value < own.high
    assert difference.value == pytest.approx(100 - made.value)
    # The reference scores 100 on every resample: what varies is the other side alone.
    assert difference.low == pytest.approx(100 - own.high)
    assert difference.direction == 1
    assert made.minus(copied).direction == -1
    assert Estimate(1.0, -0.1, 2.0).direction == 0
    assert Estimate(1.0, -0.1, 2.0).text() == "+1.00 [-0.10, +2.00]"


def test_intervals_are_the_middle_95_percent_and_follow_the_seed():
    counts = np.arange(40.0)[:, None]
    first, second = (
        score(counts, lambda total: float(total[0]) / 40, Bootstrap(40, 4000, seed))
        for seed in (1, 2)
    )
    again = score(counts, lambda total: float(total[0]) / 40, Bootstrap(40, 4000, 1))
    assert again.interval == first.interval != second.interval
    deviation = counts.std() / 40**0.5
    assert first.interval.high - 19.5 == pytest.approx(1.96 * deviation, rel=0.05)
    assert 19.5 - first.interval.low == pytest.approx(1.96 * deviation, rel=0.05)


def test_copying_scores_nothing_and_the_reference_everything():
    sources = ["Die Datei main.c, und 3 Katzen", "Katze Katze the cat", "gleich gleich"]
    references = ["The file main.c, and 3 cats", "the cat the cat", "gleich gleich"]
    for copied in (sources, [f" {line} " for line in sources]):
        assert changed_f1(changed_counts(sources, references, copied).sum(0)) == 0.0
    whole = changed_counts(sources, references, references).sum(0)
    assert changed_scores(whole) == (100.0, 100.0, 100.0)
    assert whole.tolist() == [6.0, 6.0, 6.0]  # The file and cats; the cat; nothing


def test_changed_words_are_counted_as_multisets():
    """By hand: R − S = {b, c}, Y − S = {b, b, d}; one of them is right."""
    counts = changed_counts(["a b"], ["a b b c"], ["b b b d"])
    assert counts.tolist() == [[1.0, 2.0, 3.0]]
    recall, precision, both = changed_scores(counts.sum(0))
    assert (recall, precision) == pytest.approx((50.0, 100 / 3))
    assert both == pytest.approx(2 * recall * precision / (recall + precision))


def test_words_are_those_of_13a():
    """The comma and the point are words of their own, and so no change."""
    assert changed_counts(["Hallo, Welt."], ["Hello, world."], ["Hello, Welt."]).tolist() == [
        [1.0, 2.0, 1.0]
    ]


def test_nothing_to_change_is_no_division_by_zero():
    assert changed_scores(changed_counts(["a"], ["a"], ["a"]).sum(0)) == (0.0, 0.0, 0.0)


def test_buckets_hold_every_sentence_once_in_order():
    lengths = [3, 9, 1, 3, 3, 7, 20, 9, 4, 2]
    found = buckets(lengths, 3)
    assert np.sum([members for _, members in found], axis=0).tolist() == [1] * len(lengths)
    assert [name for name, _ in found] == ["1–3", "4–7", "8–20"]
    assert [int(members.sum()) for _, members in found] == [5, 2, 3]
    assert [name for name, _ in buckets([4, 4, 4], 5)] == ["4"]
