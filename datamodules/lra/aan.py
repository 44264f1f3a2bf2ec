"""The AAN pairs of the Long Range Arena release: `new_aan_pairs.{train,eval,test}.tsv`.

No header, no quoting. Each line has five tab-separated columns: the label as a float (`0.0` or
`1.0`), two paper ids, and the texts of the two papers. Everything is read as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from datamodules.core.files import Release
from datamodules.lra.arena import RELEASE, RELEASE_FOLDERS
from lit_probattn.base.errors import DataError, prefixed

SPLIT_FILES = {
    "train": "new_aan_pairs.train.tsv",
    "val": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
FILES = Release(
    "Retrieval",
    "retrieval",
    ", ".join(SPLIT_FILES.values()),
    f"The files are part of {RELEASE}, built from the ACL Anthology Network",
    ({name: (file,) for name, file in SPLIT_FILES.items()},),
    ("", "tsv_data", *(f"{folder}/tsv_data" for folder in RELEASE_FOLDERS)),
)
# The published pipelines truncate texts here before they measure the length.
MAX_TEXT_BYTES = 10000
_NUM_COLUMNS = 5
_LABEL = re.compile(rb"([01])(\.0+)?")


class Pair(NamedTuple):
    """One line: label (1 if the papers are linked), prefixes of both texts, their full sizes."""

    target: int
    texts: tuple[bytes, bytes]
    num_bytes: tuple[int, int]


def read_pairs(path: Path, advance: Callable[[int], None]) -> Iterator[Pair]:
    """Yield the pairs of a file line by line; a DataError gives the line number of a fault."""
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            advance(len(line))
            with prefixed(f"{path}:{number}", ValueError, to=DataError):
                if not line.endswith(b"\n"):
                    raise ValueError("the last line lacks a newline; the file is truncated")
                yield _parse(line.removesuffix(b"\n").removesuffix(b"\r"))
    if not number:
        raise DataError(f"{path}: the file is empty")


def _parse(line: bytes) -> Pair:
    """Parse a line; raises ValueError with the reason."""
    columns = line.split(b"\t")
    if len(columns) != _NUM_COLUMNS:
        raise ValueError(
            f"expected {_NUM_COLUMNS - 1} tabs (label, two ids, two texts), "
            f"received {len(columns) - 1}"
        )
    label, _, _, first, second = columns
    return Pair(
        _target(label),
        (first[:MAX_TEXT_BYTES], second[:MAX_TEXT_BYTES]),
        (len(first), len(second)),
    )


def _target(label: bytes) -> int:
    match = _LABEL.fullmatch(label)
    if match is None:
        shown = label[:40].decode("utf-8", "backslashreplace")
        raise ValueError(f"the label must be 0.0 or 1.0, received {shown!r}")
    return int(match[1])
