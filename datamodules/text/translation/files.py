"""Files of parallel text, and their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from datamodules.core.files import shown_name
from lit_probattn.base.errors import DataError, MissingDataError

EmptyLines = Literal["error", "drop"]
# Split -> possible file names.
_STEMS = {"train": ("train",), "val": ("valid", "val", "dev"), "test": ("test",)}
CODES = ("code", "codes", "bpe.codes")
_SEGMENT = re.compile(r"<seg id[^>]*>\s*(.*?)\s*</seg>\s*$")
_DROPPED = ("<url>", "<talkid>", "<keywords>")
_STRIPPED = re.compile("</?(?:title|description)>")


@dataclass(frozen=True)
class Lines:
    """The lines of one language of one split, from one or more files.

    Lines end with a newline only; a byte-order mark is skipped. Most files have one sentence per
    line. In IWSLT's training files (`train.tags.…`), lines with URLs, ids and keywords are skipped,
    and tags of titles and descriptions are removed; in XML and SGML files only the lines
    `<seg id="…">` are used.
    """

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Name for messages."""
        more = len(self.paths) - 1
        return shown_name(self.paths[0]) + (f" and {more} more" if more else "")

    def numbered(self) -> Iterator[tuple[Path, int, str]]:
        """Yield file, line number and line; raises DataError for a line that is not UTF-8."""
        for path in self.paths:
            with path.open("rb") as file:
                for number, raw in enumerate(file, 1):
                    try:
                        line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                    except UnicodeDecodeError as error:
                        raise DataError(
                            f"{shown_name(path)}: line {number} is not UTF-8 (byte "
                            f"0x{raw[error.start]:02x}); convert the file, for example by `iconv "
                            "-f latin1 -t utf-8`"
                        ) from None
                    kept = _kept(path, line.removesuffix("\n").removesuffix("\r"))
                    if kept is not None:
                        yield path, number, kept

    def __iter__(self) -> Iterator[str]:
        return (line for _, _, line in self.numbered())


@dataclass(frozen=True)
class Pair:
    """Both languages of a split."""

    source: Lines
    target: Lines


@dataclass(frozen=True)
class ParallelText:
    """The text of the splits train, val and test, with the files in the same folder.

    Args:
        splits: The splits; `val` can be missing if it is split off from `train`.
        codes: BPE codes.
        dictionaries: Dictionary of each language that has one.
        held_out_every: Hold out every n-th training pair for validation; 0 disables.
        cleaned: Whether the training text is already cleaned.
        normalise: Whether punctuation of the training text is normalised.
        aggressive: Whether Moses' tokeniser splits hyphens between letters.
    """

    splits: Mapping[str, Pair]
    codes: Path | None = None
    dictionaries: Mapping[str, Path] = field(default_factory=dict)
    held_out_every: int = 0
    cleaned: bool = False
    normalise: bool = False
    aggressive: bool = False

    @property
    def paths(self) -> list[Path]:
        """All files."""
        sides = [side for pair in self.splits.values() for side in (pair.source, pair.target)]
        text = [path for side in sides for path in side.paths]
        beside = [*self.dictionaries.values(), *([self.codes] if self.codes else [])]
        return list(dict.fromkeys([*text, *beside]))


def _kept(path: Path, line: str) -> str | None:
    """Return the sentence of a line, or None."""
    if path.name.startswith("train.tags."):
        return None if any(tag in line for tag in _DROPPED) else _STRIPPED.sub("", line).strip()
    if path.suffix in (".xml", ".sgm"):
        found = _SEGMENT.search(line)
        return None if found is None else found[1].replace("’", "'")
    return line.strip()


def find_plain(title: str, folder: Path, source: str, target: str) -> ParallelText | None:
    """Find the files `train.<language>`, `valid.<language>`, `test.<language>`, or return None.

    Raises:
        MissingDataError: A language or a split is missing.
    """
    splits: dict[str, Pair] = {}
    for name, stems in _STEMS.items():
        for stem in stems:
            sides = [folder / f"{stem}.{language}" for language in (source, target)]
            present = [path for path in sides if path.is_file()]
            if len(present) == 1:
                (missing,) = (path for path in sides if path not in present)
                raise MissingDataError(
                    f"{title}: found {shown_name(present[0])}, but missing {missing.name} in the "
                    "same folder; both languages are required, line by line"
                )
            if present and name in splits:
                raise DataError(
                    f"{title}: {splits[name].source.name} and {shown_name(sides[0])} both denote "
                    f"{name}; remove or rename one pair"
                )
            if present:
                splits[name] = Pair(Lines((sides[0],)), Lines((sides[1],)))
    if not splits:
        return None
    for name, stems in _STEMS.items():
        if name not in splits:
            have = next(iter(splits.values())).source.name
            raise MissingDataError(
                f"{title}: found {have}, but missing {stems[0]}.{source} and {stems[0]}.{target} "
                "in the same folder"
            )
    codes = next((folder / name for name in CODES if (folder / name).is_file()), None)
    dictionaries = {
        language: folder / f"dict.{language}.txt"
        for language in (source, target)
        if (folder / f"dict.{language}.txt").is_file()
    }
    return ParallelText(splits, codes, dictionaries)


def check_pair(pair: Pair, empty: EmptyLines) -> tuple[npt.NDArray[np.bool_], npt.NDArray[Any]]:
    """Validate both sides of a pair of files.

    Returns:
        A mask of pairs without an empty side, and a hash of each pair that is valid in this
        process, each (num_lines,).

    Raises:
        DataError: The sides have different numbers of lines or are equal, a line is not UTF-8, a
            line is empty (if that is an error), or there are no lines.
    """
    full: list[npt.NDArray[np.bool_]] = []
    numbers: list[npt.NDArray[np.int64]] = []
    for lines in (pair.source, pair.target):
        pairs = np.fromiter(((hash(line), bool(line)) for line in lines), dtype=np.dtype("i8,?"))
        numbers.append(pairs["f0"])
        full.append(pairs["f1"])
    counts = [len(found) for found in full]
    if counts[0] != counts[1]:
        raise DataError(
            f"{pair.source.name} has {counts[0]} lines and {pair.target.name} has {counts[1]}: "
            "line n of one must be the translation of line n of the other"
        )
    if not counts[0]:
        raise DataError(f"{pair.source.name} and {pair.target.name} contain no text")
    if empty == "error":
        for lines, found in zip((pair.source, pair.target), full, strict=True):
            if not found.all():
                path, number, _ = next(entry for entry in lines.numbered() if not entry[2])
                more = int((~found).sum()) - 1
                raise DataError(
                    f"{shown_name(path)}: line {number} is "
                    f"empty{f', and {more} more' if more else ''}; remove empty lines from both "
                    "languages, or set empty_lines to drop"
                )
    if (numbers[0] == numbers[1]).all():
        raise DataError(
            f"{pair.source.name} and {pair.target.name} are identical; expected one to be a "
            "translation of the other"
        )
    return full[0] & full[1], numbers[0] * 3 + numbers[1]
