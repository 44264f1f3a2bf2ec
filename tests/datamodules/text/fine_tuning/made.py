"""Small files in the forms of SQuAD, MultiNLI, SST-2 and QNLI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PEOPLE = ("Ada", "Björn", "Chloé", "Dmitri", "Eve", "Fumiko", "Grégoire", "Hana")
CITIES = ("Oslo", "Lima", "Kyoto", "Zürich", "Quito", "Dakar", "Malmö", "Perth")
THINGS = ("a red boat", "the old mill", "seven lamps", "an iron gate", "some salt", "two owls")


def context(number: int) -> str:
    person, city = PEOPLE[number % 8], CITIES[(number * 3 + 1) % 8]
    thing = THINGS[number % 6]
    return f"In {1900 + number}, {person} went to {city} and bought {thing} there."


def asked(number: int, name: str) -> dict[str, Any]:
    """A question about `context(number)`; every third asks for the city."""
    text = context(number)
    answer, question = (
        (CITIES[(number * 3 + 1) % 8], f"Where did {PEOPLE[number % 8]} go?")
        if number % 3 == 0
        else (THINGS[number % 6], f"What did {PEOPLE[number % 8]} buy?")
    )
    answers = [{"text": answer, "answer_start": text.index(answer)}]
    return {"id": name, "question": question, "answers": answers}


def squad(first: int, count: int, version: str = "1.1", per_paragraph: int = 1) -> dict[str, Any]:
    """Questions in the release's form; in 2.0 every fourth has no answer."""
    paragraphs = []
    for number in range(first, first + count):
        qas = [asked(number, f"q{number}-{k}") for k in range(per_paragraph)]
        if version == "2.0":
            for item in qas:
                impossible = number % 4 == 1
                item["is_impossible"] = impossible
                if impossible:
                    item["plausible_answers"], item["answers"] = item["answers"], []
        paragraphs.append({"context": context(number), "qas": qas})
    half = len(paragraphs) // 2
    articles = [
        {"title": "One", "paragraphs": paragraphs[:half]},
        {"title": "Two", "paragraphs": paragraphs[half:]},
    ]
    return {"data": articles, "version": version if version == "1.1" else "v2.0"}


def write_squad(
    folder: Path, version: str = "1.1", train: int = 24, dev: int = 9, released: bool = False
) -> Path:
    """Write train and dev to a folder; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    ending = f"-v{version}.json" if released else ".json"
    for name, first, count in (("train", 0, train), ("dev", 50, dev)):
        text = json.dumps(squad(first, count, version))
        (folder / f"{name}{ending}").write_text(text, encoding="utf-8")
    return folder


# ---- pairs -------------------------------------------------------------------------------------

LABELS = ("entailment", "neutral", "contradiction")


def _pair(number: int) -> tuple[str, str, str]:
    label = LABELS[number % 3]
    endings = {"entailment": "went away", "neutral": 'said "no"', "contradiction": "stayed"}
    first = f"{PEOPLE[number % 8]} went to {CITIES[number // 3 % 8]} in {1900 + number}."
    return first, f"{PEOPLE[number % 8]} {endings[label]}.", label


def write_mnli(folder: Path, ending: str = ".jsonl", train: int = 24, dev: int = 9) -> Path:
    """Write MultiNLI as its authors release it; one of each dev set has no label."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, first, count in (
        ("train", 0, train),
        ("dev_matched", 100, dev),
        ("dev_mismatched", 200, dev),
    ):
        rows = []
        for number in range(first, first + count):
            one, two, label = _pair(number)
            gold = "-" if name != "train" and number == first + 1 else label
            row = {"annotator_labels": [label], "genre": "travel", "gold_label": gold}
            rows.append({**row, "pairID": f"{number}e", "sentence1": one, "sentence2": two})
        if ending == ".jsonl":
            text = "".join(json.dumps(row) + "\n" for row in rows)
        else:
            names = ["gold_label", "genre", "pairID", "sentence1", "sentence2", "label1"]
            lines = [[*(row[n] for n in names[:-1]), row["annotator_labels"][0]] for row in rows]
            text = "".join("\t".join(line) + "\n" for line in [names, *lines])
        glue = ending == ".tsv"
        file = f"{name}.tsv" if glue else f"multinli_1.0_{name}{ending}"
        (folder / file).write_text(text, encoding="utf-8")
    return folder


def write_sst2(folder: Path) -> Path:
    """Write SST-2 as GLUE does: blanks at the end, quotes that are not paired."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 12), ("dev", 6)):
        rows = [
            f'a " {name} film {n} that {"shines" if n % 2 else "bores"} \t{n % 2}'
            for n in range(count)
        ]
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n", "utf-8")
    return folder


def write_qnli(folder: Path) -> Path:
    """Write QNLI as GLUE does."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 12), ("dev", 6)):
        rows = [
            f"{n}\tWhere is {PEOPLE[n % 8]}?\t{PEOPLE[(n + n % 2) % 8]} is in Oslo {n}.\t"
            f"{'not_entailment' if n % 2 else 'entailment'}"
            for n in range(count)
        ]
        head = "index\tquestion\tsentence\tlabel\n"
        (folder / f"{name}.tsv").write_text(head + "\n".join(rows) + "\n", "utf-8")
    return folder
