"""Sets made of plain text: what they promise of every sample, and that text decides them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from datamodules import QuestionAnswering, TextPairs
from examples.sets.of_plain_text import (
    BLANK,
    ClozeQuestions,
    ShuffledSentences,
    main,
    sentences_of,
)
from lit_probattn.base.errors import DataError, MissingDataError
from tests.datamodules.text.fine_tuning.made import CITIES, PEOPLE


def write_text(folder: Path, count: int = 40) -> Path:
    """Paragraphs of four sentences, a heading, a line that is too short."""
    folder.mkdir(exist_ok=True)
    lines = [" = Heading = ", "Too short."]
    for n in range(count):
        person, city, other = PEOPLE[n % 8], CITIES[n % 8], CITIES[(n + 3) % 8]
        lines.append(
            f"In the year {1500 + n} the painter {person} lived near {city} . Nobody knew that "
            f"{person} once saw {other} in winter . The town of {city} was then {n + 11} years "
            f"old . It remembered {person} and the terrible disaster of {1500 + n} well ."
        )
    (folder / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def cloze(folder: Path, **options) -> dict[str, list[dict]]:
    out = folder / "out"
    told = list(ClozeQuestions(str(folder), str(out), **options).make())
    parts = {
        name: json.loads((out / f"{name}.json").read_text("utf-8")) for name in ("train", "dev")
    }
    found = {name: part["data"][0]["paragraphs"] for name, part in parts.items()}
    assert [str(len(part)) in line for part, line in zip(found.values(), told, strict=True)]
    return found


def test_every_answer_stands_in_the_text_once_and_fills_the_blank(tmp_path):
    text = write_text(tmp_path / "x")
    source = (text / "a.txt").read_text("utf-8")
    found = cloze(text)
    names = set()
    for paragraph in [*found["train"], *found["dev"]]:
        (asked,) = paragraph["qas"]
        (answer,) = asked["answers"]
        phrase, start, context = answer["text"], answer["answer_start"], paragraph["context"]
        assert context[start : start + len(phrase)] == phrase
        assert len(re.findall(rf"(?<!\w){re.escape(phrase)}(?!\w)", context)) == 1
        assert asked["question"].count(BLANK) == 1
        whole = asked["question"].replace(BLANK, phrase)
        assert whole in source  # the sentence that was taken out
        assert whole not in context
        names.add(asked["id"])
    assert len(names) == len(found["train"]) + len(found["dev"]) > 40


def test_no_paragraph_is_in_two_splits(tmp_path):
    found = cloze(write_text(tmp_path / "x"))
    years = {
        name: {
            y for p in part for y in re.findall(r"15\d\d", p["context"] + p["qas"][0]["question"])
        }
        for name, part in found.items()
    }
    assert years["train"]
    assert years["dev"]
    assert not years["train"] & years["dev"]


def test_text_alone_decides(tmp_path):
    """Not the order of lines, nor the names of files."""
    one, two = (write_text(tmp_path / name) for name in ("x", "y"))
    lines = (two / "a.txt").read_text("utf-8").splitlines()[::-1]
    (two / "b.txt").write_text("\n".join(lines[:20]), "utf-8")
    (two / "a.txt").write_text("\n".join(lines[20:]), "utf-8")
    assert cloze(one) == cloze(two)


def test_few_paragraphs_and_questions(tmp_path):
    found = cloze(write_text(tmp_path / "x"), per_paragraph=1, max_paragraphs=10)
    assert len(found["train"]) + len(found["dev"]) == 10


def pairs(folder: Path) -> dict[str, list[dict]]:
    out = folder / "out"
    list(ShuffledSentences(str(folder), str(out)).make())
    texts = {name: (out / f"{name}.jsonl").read_text("utf-8") for name in ("train", "dev")}
    return {name: [json.loads(line) for line in t.splitlines()] for name, t in texts.items()}


def test_pairs_are_balanced_and_true(tmp_path):
    text = write_text(tmp_path / "x")
    paragraphs = [
        " ".join(line.split()) for line in (text / "a.txt").read_text("utf-8").splitlines()
    ]
    for rows in pairs(text).values():
        counts = Counter(row["label"] for row in rows)
        assert counts["next"] == counts["other"] > 0
        assert len({row["sentence1"] for row in rows}) == len(rows)
        seconds = {row["sentence2"] for row in rows}
        for row in rows:
            both = f"{row['sentence1']} {row['sentence2']}"
            follows = any(both in paragraph for paragraph in paragraphs)
            assert follows == (row["label"] == "next")
        own = {p for p in paragraphs for row in rows if row["sentence1"] in p}
        assert all(any(second in p for p in own) for second in seconds)  # of the same split


def test_sentences():
    text = 'It is 3.5 m long. "Is it?" he asked. Yes. Dr. Who came at 5 p.m. and left'
    assert sentences_of(text) == [
        "It is 3.5 m long.",
        '"Is it?" he asked.',
        "Yes. Dr. Who came at 5 p.m. and left",
    ]
    assert sentences_of("") == []
    assert sentences_of("A sentence of five words . Then the next one of them . Short .") == [
        "A sentence of five words .",
        "Then the next one of them . Short .",
    ]


def test_the_commands_make_sets_that_data_read(tmp_path, capsys):
    text = write_text(tmp_path / "x")
    for name in ("cloze_questions", "shuffled_sentences"):
        assert main([name, "--text", str(text), "--out", str(tmp_path / name)]) == 0
    assert "samples of" in capsys.readouterr().out
    common = {"vocab_limit": 200, "cache_dir": str(tmp_path / "cache"), "max_length": 96}
    questions = QuestionAnswering(path=str(tmp_path / "cloze_questions"), **common)
    questions.setup()
    assert questions.split("train").num_questions > 40
    labelled = TextPairs(path=str(tmp_path / "shuffled_sentences"), **common)
    labelled.setup()
    assert labelled.classes == ["next", "other"]
    assert main(
        ["cloze_questions", "--text", str(text), "--out", str(tmp_path / "cloze_questions")]
    )
    assert "exists: choose another folder" in capsys.readouterr().err


def test_what_cannot_be_made(tmp_path):
    text = write_text(tmp_path / "x")
    list(ClozeQuestions(str(text), str(tmp_path / "out")).make())
    with pytest.raises(DataError, match="exists: choose another folder for out"):
        list(ClozeQuestions(str(text), str(tmp_path / "out")).make())
    with pytest.raises(MissingDataError, match="no such file or folder"):
        list(ClozeQuestions(str(tmp_path / "no"), str(tmp_path / "o")).make())
    (tmp_path / "short.txt").write_text("One line. And no more here.")
    with pytest.raises(DataError, match="0 paragraphs of 3 sentences or more, at least 2"):
        list(ShuffledSentences(str(tmp_path / "short.txt"), str(tmp_path / "o")).make())
