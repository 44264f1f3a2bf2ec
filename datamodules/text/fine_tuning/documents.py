"""Documents of plain text, as lists of consecutive sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from datamodules.core.files import read_utf8

Division = Literal["line", "blank_line", "heading", "file"]
SUFFIXES = (".txt", ".text", ".tokens", ".md")
_HEADING = re.compile(r"\s*=.*=\s*$")
_END = re.compile(r"(?<=[.!?])(?:[\"”’')\]])?\s+(?=[\"“‘(]?\s?[A-Z0-9])")
_LEAST_WORDS = 4
_TITLE = re.compile(r"\s*= [^=].*[^=] =\s*$")  # of an article; `= = x = =` is a section title


def read_documents(files: Sequence[Path], division: Division) -> Iterator[list[str]]:
    """Yield the sentences of each document.

    Lines are paragraphs and are split into sentences; headings of WikiText (`= Title =`) are
    skipped.

    Args:
        files: Text files in UTF-8.
        division: Unit of a document: a `line`, the text between blank lines (`blank_line`), the
            text below an article's `heading` in WikiText, or a `file`.

    Raises:
        DataError: A file is not UTF-8 text.
    """
    for path in files:
        document: list[str] = []
        for line in read_utf8(path).splitlines():
            text = " ".join(line.split())
            ends = {
                "line": True,
                "blank_line": not text,
                "heading": bool(_TITLE.match(line)),
                "file": False,
            }[division]
            if ends and document:
                yield document
                document = []
            if text and not is_heading(line):
                document += sentences_of(text)
        if document:
            yield document


def is_heading(line: str) -> bool:
    """Whether a line is a WikiText heading, `= Title =`."""
    return _HEADING.match(line) is not None


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a paragraph; very short ones are merged with the next."""
    found: list[str] = []
    start = 0
    for end in [match.end() for match in _END.finditer(text)] + [len(text)]:
        piece = text[start:end].strip()
        if len(piece.split()) >= _LEAST_WORDS or (end == len(text) and piece and not found):
            found.append(piece)
            start = end
        elif end == len(text) and piece:
            found[-1] += f" {piece}"
    return found
