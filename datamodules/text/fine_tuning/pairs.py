"""Texts and pairs of texts with labels: MultiNLI, SST-2 and QNLI as they are released.

MultiNLI is read as its authors release it (JSON lines, or the tab-separated .txt) and as GLUE does;
SST-2 and QNLI as GLUE does. Fields of GLUE's tables are never quoted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from datamodules.core.errors import DataError, MissingDataError, nearest
from datamodules.core.tables import check_names, read_json, read_utf8

__all__ = ["CORPORA", "Corpus", "CorpusName", "LabelledPair", "find_corpus", "read_corpus"]

CorpusName = Literal["mnli", "sst2", "qnli"]
_NO_LABEL = "-"


class LabelledPair(NamedTuple):
    """A text, or two of them, with a label, and what messages call it."""

    texts: tuple[str, str | None]
    label: str
    place: str


@dataclass(frozen=True)
class Corpus:
    """How a corpus is released.

    Args:
        title: Its name.
        labels: Label of each class number, in GLUE's order.
        written: What stands for a label in a file, where it is not the label.
        columns: Names of the columns of the first and the second text.
        label_columns: Names of the label's column, the likeliest first.
        files: Files of each split, the form that is looked for first in front.
        sizes: Published numbers of examples.
        origin: Where it is from.
        folder: Its folder in data_dir.
    """

    title: str
    labels: tuple[str, ...]
    written: dict[str, str]
    columns: tuple[str, str | None]
    label_columns: tuple[str, ...]
    files: tuple[dict[str, str], ...]
    sizes: dict[str, int]
    origin: str
    folder: str


def _multinli(ending: str) -> dict[str, str]:
    names = {"train": "train", "val": "dev_matched", "test": "dev_mismatched"}
    return {split: f"multinli_1.0_{name}{ending}" for split, name in names.items()}


_GLUE = {"train": "train.tsv", "val": "dev.tsv"}
CORPORA: dict[str, Corpus] = {
    "mnli": Corpus(
        title="MultiNLI",
        labels=("entailment", "neutral", "contradiction"),
        written={},
        columns=("sentence1", "sentence2"),
        label_columns=("gold_label", "label"),
        files=(
            _multinli(".jsonl"),
            _multinli(".txt"),
            {"train": "train.tsv", "val": "dev_matched.tsv", "test": "dev_mismatched.tsv"},
        ),
        sizes={"train": 392_702, "val": 9_815, "test": 9_832},
        origin="It is multinli_1.0.zip of cims.nyu.edu/~sbowman/multinli, or MNLI of GLUE",
        folder="mnli",
    ),
    "sst2": Corpus(
        title="SST-2",
        labels=("negative", "positive"),
        written={"0": "negative", "1": "positive"},
        columns=("sentence", None),
        label_columns=("label",),
        files=(_GLUE,),
        sizes={"train": 67_349, "val": 872},
        origin="It is SST-2 of GLUE (gluebenchmark.com)",
        folder="sst2",
    ),
    "qnli": Corpus(
        title="QNLI",
        labels=("entailment", "not_entailment"),
        written={},
        columns=("question", "sentence"),
        label_columns=("label",),
        files=(_GLUE,),
        sizes={"train": 104_743, "val": 5_463},
        origin="It is QNLI (v2) of GLUE (gluebenchmark.com)",
        folder="qnli",
    ),
}


def find_corpus(name: CorpusName, folder: Path) -> dict[str, Path] | None:
    """Return the file of each split in a folder; None if there is none of them.

    Raises:
        MissingDataError: Some of them are there only.
    """
    for files in CORPORA[name].files:
        paths = {split: folder / file for split, file in files.items()}
        there = [path for path in paths.values() if path.is_file()]
        if len(there) == len(paths):
            return paths
        if there:
            absent = ", ".join(str(p) for p in paths.values() if p not in there)
            raise MissingDataError(
                f"{CORPORA[name].title}: found {there[0]}, but not {absent}; put all in one folder"
            )
    return None


def read_corpus(name: CorpusName, path: Path) -> tuple[list[LabelledPair], int]:
    """Read a file of a corpus.

    Returns:
        The examples, and how many were left out because annotators agreed on no label (`-`).

    Raises:
        DataError: A column is missing, a row has other columns, or a label is not of the corpus.
    """
    corpus = CORPORA[name]
    rows = _json_rows(path) if path.suffix == ".jsonl" else _tab_rows(path)
    found: list[LabelledPair] = []
    left_out = 0
    columns: tuple[str, str | None, str] | None = None
    for place, row in rows:
        if columns is None:
            columns = (*corpus.columns, _label_column(corpus, row, path))
            _require_columns(columns, row, path)
        first, second, label_name = columns
        label = _text(row, label_name, place).strip()
        if label == _NO_LABEL:
            left_out += 1
            continue
        label = corpus.written.get(label, label)
        if label not in corpus.labels:
            valid = [*corpus.labels, *corpus.written]
            raise DataError(
                f"{place}: label {label!r} is not one of {', '.join(valid)}{nearest(label, valid)}"
            )
        texts = _text(row, first, place), None if second is None else _text(row, second, place)
        found.append(LabelledPair(texts, label, place))
    if not found:
        raise DataError(f"{path} has no labelled rows")
    return found, left_out


def _label_column(corpus: Corpus, row: dict[str, Any], path: Path) -> str:
    there = [name for name in corpus.label_columns if name in row]
    if there:
        return there[0]
    raise DataError(
        f"{path} has no column {' or '.join(corpus.label_columns)}, its columns are "
        f"{', '.join(row)}; a test file of GLUE has no labels"
    )


def _require_columns(columns: tuple[str, str | None, str], row: dict[str, Any], path: Path) -> None:
    for name in columns:
        if name is not None and name not in row:
            raise DataError(
                f"{path} has no column {name!r}, its columns are {', '.join(row)}"
                f"{nearest(name, row)}"
            )


def _text(row: dict[str, Any], name: str, place: str) -> str:
    """Return a field; a DataError if it is not there, or no text."""
    value = row.get(name)
    if not isinstance(value, str):
        problem = "is missing" if value is None else "is not text"
        raise DataError(f"{place}: {name!r} {problem}")
    if value != value.encode("utf-8", "ignore").decode():
        raise DataError(f"{place}: {name!r} is not valid Unicode; correct the row")
    return value


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(read_utf8(path).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        yield place, read_json(line, place)


def _tab_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = read_utf8(path).split("\n")
    names = lines[0].rstrip("\r").split("\t")
    check_names(path, names)
    for number, line in enumerate(lines[1:], 2):
        fields = line.rstrip("\r").split("\t")
        if fields == [""]:
            continue
        place = f"{path}, line {number}"
        if len(fields) != len(names):
            raise DataError(
                f"{place}: columns: {len(fields)}, expected {len(names)} ({', '.join(names)})"
            )
        yield place, dict(zip(names, fields, strict=True))
