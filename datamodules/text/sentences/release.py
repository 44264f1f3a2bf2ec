"""Sentence-level text: shards of the one-billion-word release, read as one text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.text.fine_tuning.documents import is_heading, sentences_of
from datamodules.text.releases import lm1b
from datamodules.text.source import JoinedText, PlainText, TextSource
from lit_probattn.base.errors import DataError


@dataclass(frozen=True)
class SentenceText(JoinedText):
    """Files as one text with a sentence per line; positions count over all files.

    Leading, trailing and repeated whitespace is removed, and so are empty lines.

    Args:
        paragraphs: Whether lines are paragraphs, which are split into sentences; headings of
            WikiText (`= Title =`) are skipped.
    """

    paragraphs: bool

    def identity(self) -> list[Any]:
        """Return the identity of every part."""
        return [self.paragraphs, *(part.identity() for part in self.parts)]

    def conversion_of(self, part: TextSource) -> Callable[[str], str]:
        """Return the function that divides a text into sentences."""
        return self._sentences

    def _sentences(self, text: str) -> str:
        lines = [" ".join(line.split()) for line in text.split("\n")]
        if self.paragraphs:
            lines = [s for line in lines if not is_heading(line) for s in sentences_of(line)]
        return "".join(f"{line}\n" for line in lines if line)


def find_release(data_dir: Path, test_shards: int, val_shards: int) -> dict[str, TextSource]:
    """Find the text of the splits train, val and test.

    The first held-out shards are the test split, the next ones validation.

    Raises:
        MissingDataError: The release or some of its shards are missing.
        DataError: A shard is empty or truncated.
    """
    found = lm1b(test_shards + val_shards).find(data_dir)
    paths = [path for part in found.values() for path in part]
    for path in paths:
        if not _is_whole(path):
            raise DataError(
                f"{path} is empty or truncated: its last line lacks a newline; unpack the release "
                "again"
            )
    held_out = len(paths) - test_shards - val_shards
    train, rest = paths[:held_out], paths[held_out:]
    parts = {"train": train, "val": rest[test_shards:], "test": rest[:test_shards]}
    return {name: _text(shards) for name, shards in parts.items()}


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        file.seek(-1, 2)
        return file.read() == b"\n"


def _text(paths: list[Path]) -> SentenceText:
    return SentenceText(tuple(paths), tuple(PlainText((path,)) for path in paths), False)
