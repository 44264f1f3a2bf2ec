"""BLEU in its three forms: against sums written out, and against what papers' scripts do."""

from __future__ import annotations

import math
import sys
from collections import Counter

import pytest

from lit_probattn.tasks.bleu import FORMS, corpus_bleu, split_compounds, words_13a

pytest.importorskip("sacrebleu")

HYPOTHESES = [
    "The well-known cat sat on the mat of the house .",
    "he said : it is a man-made lake in the north",
    "nothing more than a few words here and there today",
]
REFERENCES = [
    "the Well-known cat sat on a mat of the house .",
    "he said that it is a man-made lake up north",
    "no more than a few words here and there , today",
]


def multi_bleu(hypotheses: list[str], references: list[str], lower: bool) -> float:
    """Geometric mean of clipped n-gram precisions, times the brevity penalty; nothing smoothed."""
    matched, total, lengths = [0] * 4, [0] * 4, [0, 0]
    for pair in zip(hypotheses, references, strict=True):
        ours, theirs = ((line.lower() if lower else line).split() for line in pair)
        lengths[0] += len(ours)
        lengths[1] += len(theirs)
        for n in range(1, 5):
            grams = Counter(tuple(ours[i : i + n]) for i in range(len(ours) - n + 1))
            known = Counter(tuple(theirs[i : i + n]) for i in range(len(theirs) - n + 1))
            matched[n - 1] += sum(min(count, known[gram]) for gram, count in grams.items())
            total[n - 1] += sum(grams.values())
    precision = math.exp(sum(math.log(m / t) for m, t in zip(matched, total, strict=True)) / 4)
    return 100 * precision * min(1.0, math.exp(1 - lengths[1] / lengths[0]))


def test_tokenised_is_the_lower_case_score_of_multi_bleu():
    found = corpus_bleu(HYPOTHESES, REFERENCES, "tokenised")
    assert found.score == pytest.approx(multi_bleu(HYPOTHESES, REFERENCES, lower=True), rel=1e-9)
    assert found.score != pytest.approx(multi_bleu(HYPOTHESES, REFERENCES, lower=False), rel=1e-3)
    assert "case:lc" in found.signature
    assert "tok:none" in found.signature


def test_compounds_are_split_on_both_sides_and_case_counts():
    found = corpus_bleu(HYPOTHESES, REFERENCES, "compound_split")
    split = [[split_compounds(line) for line in side] for side in (HYPOTHESES, REFERENCES)]
    assert found.score == pytest.approx(multi_bleu(*split, lower=False), rel=1e-9)
    assert found.score != pytest.approx(multi_bleu(HYPOTHESES, REFERENCES, lower=False), rel=1e-3)
    assert found.signature.endswith("|compounds:split")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("well-known", "well ##AT##-##AT## known"),
        ("a - b -c d-", "a - b -c d-"),
        ("aa-bb-cc", "aa ##AT##-##AT## bb ##AT##-##AT## cc"),
        # The script's expression takes each character once.
        ("a-b-c", "a ##AT##-##AT## b-c"),
    ],
)
def test_where_a_hyphen_splits(line, expected):
    assert split_compounds(line) == expected


def test_detokenised_is_sacrebleu_with_its_signature():
    import sacrebleu

    found = corpus_bleu(HYPOTHESES, REFERENCES, "detokenised")
    assert found.score == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    version = f"version:{sacrebleu.__version__}"
    assert found.signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|{version}"
    assert "detokenised" in str(found)
    assert found.signature in str(found)


def test_shorter_translations_are_penalised():
    short = [line.rsplit(" ", 4)[0] for line in HYPOTHESES]
    found = corpus_bleu(short, REFERENCES, "tokenised")
    assert found.brevity_penalty == pytest.approx(
        math.exp(1 - found.reference_words / found.hypothesis_words)
    )
    assert found.score == pytest.approx(multi_bleu(short, REFERENCES, lower=True), rel=1e-9)


def test_what_cannot_be_scored_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="received 1 and 3"):
        corpus_bleu(HYPOTHESES[:1], REFERENCES, "tokenised")
    with pytest.raises(ValueError, match="received 0 and 0"):
        corpus_bleu([], [], "tokenised")
    with pytest.raises(ValueError, match="one of detokenised, tokenised, compound_split"):
        corpus_bleu(HYPOTHESES, REFERENCES, "mixed")
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    for form in FORMS:
        with pytest.raises(ValueError, match=r"sacrebleu: pip install 'lit-probattn\[text\]'"):
            corpus_bleu(HYPOTHESES, REFERENCES, form)


def test_words_are_those_of_the_tokeniser_of_mteval():
    lines = ["Hello, world!  It's 1,000.5 m.", "", "(a-b) &quot;c&quot;\n"]
    assert words_13a(lines) == [
        ["Hello", ",", "world", "!", "It's", "1,000.5", "m", "."],
        [],
        ["(", "a-b", ")", '"', "c", '"'],
    ]
