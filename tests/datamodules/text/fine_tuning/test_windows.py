"""Windows: every answer is found again by its characters, and no token of a text is left out."""

from __future__ import annotations

import json

import pytest

from datamodules import QuestionAnswering
from datamodules.text.fine_tuning.windows import Windows, token_span

LONG = (
    "Grüße aus Zürich! In 1905, naïve café-goers — 12 of them — met 東京 visitors. 👩‍🔬 Marie "
    "said: “E = mc²” isn’t mine; she'd read it (twice) in the Annalen der Physik. The word "
    "antidisestablishmentarianism was the last thing that Ólafur wrote at 3.50 p.m."
)
ANSWERS = (
    *("Grüße", "Zürich", "1905", "naïve café-goers", "12 of them", "東京", "👩‍🔬 Marie"),
    *("“E = mc²”", "twice", "(twice)", "antidisestablishmentarianism", "Ólafur"),
    *("Annalen der Physik", "3.50 p.m.", "isn’t mine; she'd read it", "p.m."),
)


def made(folder, tokens, question="Which of them is it?", **options):
    """Data whose questions are about one long text, each with another answer."""
    folder.mkdir(exist_ok=True)
    qas = [
        {
            "id": str(i),
            "question": question,
            "answers": [{"text": a, "answer_start": LONG.index(a)}],
        }
        for i, a in enumerate(ANSWERS)
    ]
    content = {"version": "1.1", "data": [{"paragraphs": [{"context": LONG, "qas": qas}]}]}
    for name in ("train", "dev"):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    sizes = {"max_length": 40, "stride": 7, "max_query_length": 9, "batch_size": 4, **options}
    limit = {"wordpiece": 150, "bpe": 300}[tokens]
    data = QuestionAnswering(
        path=str(folder), tokens=tokens, vocab_limit=limit, cache_dir=str(folder / "cache"), **sizes
    )
    data.setup()
    return data


@pytest.mark.parametrize("tokens", ["wordpiece", "bpe"])
@pytest.mark.parametrize("max_length", [30, 40, 400])
def test_every_answer_is_recovered_from_its_windows(tokens, max_length, tmp_path):
    data = made(tmp_path / "x", tokens, max_length=max_length)
    split = data.split("train")
    holding = dict.fromkeys(range(len(ANSWERS)), 0)
    for number in range(len(split)):
        sample = split[number]
        assert len(sample.values) <= max_length
        first, last = sample.target
        if (first, last) == (0, 0):
            continue
        assert sample.second <= first <= last < sample.second + sample.size
        question = split.question_of(number)
        begin, end = data.characters("train", number, first, last)
        assert LONG[begin:end].strip() == ANSWERS[question]
        holding[question] += 1
    lost = [ANSWERS[i] for i, count in holding.items() if not count]
    assert all(len(text) > 12 for text in lost), lost  # longer than what two windows share
    assert max_length < 400 or not lost


@pytest.mark.parametrize("tokens", ["wordpiece", "bpe"])
def test_windows_cover_the_text_and_show_question_and_piece(tokens, tmp_path):
    data = made(tmp_path / "x", tokens)
    tokeniser, split = data.tokeniser, data.split("val")
    text_ids, offsets = tokeniser.encode_plain(LONG)
    asked = tokeniser.encode_plain("Which of them is it?")[0][:9]
    covered = set()
    for number in range(len(split)):
        if split.question_of(number):
            continue
        sample = split[number]
        piece = sample.values[sample.second : sample.second + sample.size].tolist()
        begin, _ = data.characters("val", number, sample.second, sample.second)
        first = next(i for i, place in enumerate(offsets) if place[0] == begin)
        while text_ids[first : first + len(piece)] != piece:
            first += 1  # several tokens of one character
        assert sample.values.tolist() == tokeniser.join(asked, piece)
        covered |= set(range(first, first + len(piece)))
    assert covered == set(range(len(text_ids)))


def test_long_questions_are_cut_off(tmp_path):
    data = made(tmp_path / "x", "wordpiece", question="why " * 50, max_query_length=5)
    sample = data.split("train")[0]
    assert sample.second == 5 + 2
    assert data.decode(sample.values[1:6]).split() == ["why"] * 5


def test_pieces_are_those_of_the_definition():
    windows = Windows(max_length=20, num_special=3, max_query_length=8, stride=4)
    found = [(w.first, w.size) for w in windows.pieces(7, 23)]
    assert found == [(0, 10), (4, 10), (8, 10), (12, 10), (16, 7)]
    assert [(w.first, w.size) for w in windows.pieces(7, 10)] == [(0, 10)]
    wide = Windows(max_length=20, num_special=3, max_query_length=8, stride=40)
    assert [(w.first, w.size) for w in wide.pieces(7, 23)] == [(0, 10), (10, 10), (20, 3)]


def test_spans_of_tokens():
    offsets = [(0, 3), (4, 7), (7, 8), (9, 12)]
    assert token_span(offsets, 4, 7) == (1, 1)
    assert token_span(offsets, 5, 10) == (1, 3)
    assert token_span(offsets, 3, 4) is None  # a blank
    assert token_span(offsets, 0, 12) == (0, 3)
    assert token_span([(0, 1), (0, 1), (0, 1), (1, 2)], 0, 1) == (0, 2)  # bytes of a character
