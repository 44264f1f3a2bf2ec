"""Where sentences lie: shards of the one-billion-word release, read as one text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.core.errors import DataError, MissingDataError
from datamodules.core.files import not_found
from datamodules.text.fine_tuning.documents import is_heading, sentences_of
from datamodules.text.source import Block, PlainText, TextSource

__all__ = ["HELD_OUT_SHARDS", "PUBLISHED", "SentenceText", "find_release"]

_RELEASE = "1-billion-word-language-modeling-benchmark-r13output"
_TRAINING = "training-monolingual.tokenized.shuffled"
_HELD_OUT = "heldout-monolingual.tokenized.shuffled"
_TRAINING_NAMES = [f"news.en-{number:05d}-of-00100" for number in range(1, 100)]
HELD_OUT_SHARDS = 50
_HELD_OUT_NAMES = [f"news.en.heldout-{number:05d}-of-00050" for number in range(HELD_OUT_SHARDS)]
_SHOWN = 3  # names of missing shards

# Sentences of the training text, and of all held-out shards.
PUBLISHED = {"train": 30_301_028, "held out": 306_688}


@dataclass(frozen=True)
class SentenceText(TextSource):
    """Files as one text of a sentence per line; positions count through all files.

    Blanks around a sentence, and several in a row, are left out, and so are empty lines.

    Args:
        parts: The files.
        paragraphs: Lines are paragraphs, which are cut into sentences; headings of WikiText
            (`= Title =`) are left out.
    """

    parts: tuple[TextSource, ...]
    paragraphs: bool = False

    @property
    def name(self) -> str:
        """The first file, and how many more."""
        more = len(self.parts) - 1
        return self.parts[0].name + (f" and {more} more" if more else "")

    @property
    def unit(self) -> str:  # type: ignore[override]
        """What positions count."""
        return self.parts[0].unit

    @property
    def size(self) -> int:
        """Size of all files."""
        return sum(part.size for part in self.parts)

    def identity(self) -> list[Any]:
        """What every part says of itself."""
        return [self.paragraphs, *(part.identity() for part in self.parts)]

    def blocks(self, start: int = 0) -> Iterator[Block]:
        """Yield pieces of whole sentences, each ended by a newline."""
        first = 0
        for part in self.parts:
            size = part.size
            if first + size > start:
                for block in part.blocks(max(0, start - first)):
                    yield Block(self._sentences(block.text), first + block.position)
            first += size

    def _sentences(self, text: str) -> str:
        lines = [" ".join(line.split()) for line in text.split("\n")]
        if self.paragraphs:
            lines = [s for line in lines if not is_heading(line) for s in sentences_of(line)]
        return "".join(f"{line}\n" for line in lines if line)


def find_release(data_dir: Path, test_shards: int, val_shards: int) -> dict[str, TextSource]:
    """Find the shards of the splits train, val and test.

    Looked for in `data_dir` and in its folders lm1b and that of the release's name. The test are
    the first held-out shards, validation the next ones.

    Raises:
        MissingDataError: There is no release, or shards of it are missing.
        DataError: A shard is empty or cut off.
    """
    folders = (data_dir / _RELEASE, data_dir, data_dir / "lm1b" / _RELEASE, data_dir / "lm1b")
    there = [p for p in folders if (p / _TRAINING).is_dir() or (p / _HELD_OUT).is_dir()]
    if not there:
        raise not_found(
            "LM1B",
            "the one-billion-word benchmark is",
            f"the folders {_TRAINING} and {_HELD_OUT} in {_RELEASE}",
            f"It is {_RELEASE}.tar.gz of https://www.statmt.org/lm-benchmark, unpacked",
            "lm1b",
            data_dir,
            "; --corpus other takes any text with a sentence per line",
        )
    used = _HELD_OUT_NAMES[: test_shards + val_shards]
    held_out = _shards(there[0] / _HELD_OUT, used)
    train = _shards(there[0] / _TRAINING, _TRAINING_NAMES)
    parts = {"train": train, "val": held_out[test_shards:], "test": held_out[:test_shards]}
    return {name: _text(paths) for name, paths in parts.items()}


def _shards(folder: Path, names: list[str]) -> list[Path]:
    """Return the shards of a folder; an error names those that are missing or not whole."""
    paths = [folder / name for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise MissingDataError(
            f"LM1B: {len(missing)} of {len(names)} shards are not in {folder}: "
            f"{', '.join(missing[:_SHOWN])}{more}; unpack the release again"
        )
    for path in paths:
        if not _is_whole(path):
            raise DataError(
                f"{path} is empty or cut off: its last line has no end; unpack the release again"
            )
    return paths


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        file.seek(-1, 2)
        return file.read() == b"\n"


def _text(paths: list[Path]) -> SentenceText:
    return SentenceText(tuple(paths), tuple(PlainText((path,)) for path in paths))
