"""Labelled texts and text pairs: MultiNLI, SST-2 and QNLI in their released formats.

MultiNLI is read in its authors' formats (JSON lines or tab-separated .txt) and in GLUE's; SST-2 and
QNLI in GLUE's. Fields of GLUE's tables are never quoted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from datamodules.core.own import Rows
from datamodules.core.tables import read_released
from lit_probattn.base.errors import DataError, nearest

CorpusName = Literal["mnli", "sst2", "qnli"]
_NO_LABEL = "-"


@dataclass(frozen=True)
class Corpus:
    """Format of the tables of a corpus.

    Args:
        labels: Label of each class number, in GLUE's order.
        columns: Names of the text columns.
        label_columns: Possible names of the label column, most likely first.
        written: Spelling of each label in the files, if different.
    """

    labels: tuple[str, ...]
    columns: tuple[str, ...]
    label_columns: tuple[str, ...] = ("label",)
    written: tuple[tuple[str, str], ...] = ()


CORPORA: dict[CorpusName, Corpus] = {
    "mnli": Corpus(
        ("entailment", "neutral", "contradiction"),
        ("sentence1", "sentence2"),
        ("gold_label", "label"),
    ),
    "sst2": Corpus(
        ("negative", "positive"),
        ("sentence",),
        written=(("0", "negative"), ("1", "positive")),
    ),
    "qnli": Corpus(("entailment", "not_entailment"), ("question", "sentence")),
}


def read_corpus(corpus: Corpus, path: Path) -> tuple[Rows, int]:
    """Read a file of a corpus.

    Returns:
        The examples, with None as the second text of single texts; and the number of examples
        without a label (`-`), which are skipped.

    Raises:
        DataError: A column is missing, a row has different columns, or a label is unknown.
    """
    table = read_released(path, (*corpus.columns, *corpus.label_columns))
    named = [name for name in corpus.label_columns if name in table.columns]
    label_column = named[0] if named else corpus.label_columns[0]
    columns = [table.column(name, "", ()) for name in (*corpus.columns, label_column)]
    *texts, labels = (table.strings(name, released=True) for name in columns)
    written = dict(corpus.written)
    rows = Rows([], [], [], notes=[])
    for number, label in enumerate(labels):
        label = written.get(label.strip(), label.strip())
        if label == _NO_LABEL:
            continue
        if label not in corpus.labels:
            valid = [*corpus.labels, *written]
            raise DataError(
                f"{table.location(number)}: unknown label {label!r}, expected one of "
                f"{', '.join(valid)}{nearest(label, valid, lists=False)}"
            )
        values = [column[number] for column in texts]
        rows.values.append((values[0], values[1] if len(values) > 1 else None))
        rows.labels.append(label)
        rows.locations.append(table.location(number))
    if not rows.labels:
        raise DataError(f"{path} has no labelled rows")
    return rows, len(labels) - len(rows.labels)
