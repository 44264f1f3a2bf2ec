"""From parallel text to arrays of ids: cleaning, pieces, dictionaries."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.core.cache import CacheWriter
from datamodules.text.releases import shown_name
from datamodules.text.translation.batches import write_sentences
from datamodules.text.translation.bpe import MARK, Codes, joined
from datamodules.text.translation.coder import Cutter, Side, TextCoder
from datamodules.text.translation.dictionary import Dictionary
from datamodules.text.translation.files import EmptyLines, Lines, ParallelText, check_pair
from datamodules.text.translation.job import LineJob, lines_of
from datamodules.text.translation.moses import Moses
from lit_probattn.base.errors import DataError, require_at_least

__all__ = ["Cleaning", "Preparation", "is_prepared", "read_text"]

SIDES: tuple[Side, Side] = ("source", "target")
_LOOKED_AT = 1000  # lines that tell whether text was cut into pieces already
_CUT = re.compile(rf"\S{MARK} ")
# A dictionary that lacks more of the training text belongs to other text.
_MOST_UNKNOWN = 0.1


@dataclass(frozen=True)
class Cleaning:
    """Which pairs of the training text are left out.

    Source: clean-corpus-n.perl of Moses.

    Args:
        max_ratio: Pairs of which one side has more than so many times the words of the other.
        max_words: Pairs of which one side has more words.
        by_pieces: Whether pieces are counted in place of words.
    """

    max_ratio: float | None = None
    max_words: int | None = None
    by_pieces: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, max_words=self.max_words)
        if self.max_ratio is not None and not self.max_ratio >= 1:
            raise DataError(f"max_ratio must be at least 1, received {self.max_ratio}")

    @property
    def counts(self) -> bool:
        """Whether anything is left out."""
        return self.max_ratio is not None or self.max_words is not None

    def keeps(self, source: int, target: int) -> bool:
        """Whether a pair of so many words stays."""
        if not source or not target:
            return False
        if self.max_words is not None and max(source, target) > self.max_words:
            return False
        return self.max_ratio is None or max(source / target, target / source) <= self.max_ratio


@dataclass
class Preparation:
    """The steps from files to a cache.

    Args:
        cutter: What pieces are; what it has to learn, it learns from the training text.
        joint_dictionary: Whether both languages have one dictionary.
        dictionary_limit: Largest number of ids of a dictionary.
        languages: Codes of the source and the target language.
    """

    job: LineJob
    text: ParallelText
    cutter: Cutter
    cleaning: Cleaning
    empty_lines: EmptyLines
    num_merges: int
    joint_dictionary: bool
    dictionary_limit: int | None
    languages: tuple[str, str]
    title: str

    def run(self, writer: CacheWriter) -> None:
        """Add everything to a cache."""
        checked = {
            name: check_pair(pair, self.empty_lines) for name, pair in self.text.splits.items()
        }
        full = {name: found for name, (found, _) in checked.items()}
        shared = {
            name: int(np.isin(numbers, checked["train"][1]).sum())
            for name, (_, numbers) in checked.items()
            if name != "train"
        }
        sizes = {name: len(found) for name, found in full.items()}
        if self.cutter.method == "moses_bpe":
            for name, side in itertools.product(sizes, SIDES):
                self._words_file(name, side, sizes[name])
        if self.cleaning.counts and not self.cleaning.by_pieces:
            full["train"] &= self._clean(lambda side: self._words("train", side))
        if not full["train"].any():
            raise DataError(f"{self._file('train')}: no sentence pair is left after cleaning")
        self.cutter = self._learn(self._parts(full)["train"][1])
        for name, side in itertools.product(sizes, SIDES):
            self._pieces_file(name, side, sizes[name])
        if self.cleaning.counts and self.cleaning.by_pieces:
            full["train"] &= self._clean(lambda side: lines_of(self._pieces_path("train", side)))
        parts = self._parts(full)
        for name, (_, chosen) in parts.items():
            if not chosen.any():
                raise DataError(f"{self._file(name)}: no sentence pair is left for {name}")
        coder = TextCoder(self.cutter, *self._dictionaries(parts["train"][1]))
        unknown = {name: self._write(writer, coder, name, *parts[name]) for name in parts}
        facts = {
            "lines": sizes,
            "left_out": {name: sizes[name] - int(full[name].sum()) for name in sizes},
            "unknown": unknown,
            "shared": shared,
            "method": self.cutter.method,
        }
        writer.add_text("coder", coder.text)
        writer.add_facts(facts)

    # ---- words and pieces --------------------------------------------------------------------

    def _words_file(self, name: str, side: Side, total: int) -> None:
        moses: Moses = getattr(self.cutter, side)
        normalise = self.text.normalise and name == "train"

        def convert(lines: Sequence[str]) -> list[str]:
            if normalise:
                lines = [moses.normalised(line) for line in lines]
            return [moses.words(line) for line in lines]

        title = f"{self.title}: words of {name}, {side}"
        self.job.lines(f"{name}.{side}.words", self._raw(name, side), total, convert, title)

    def _pieces_file(self, name: str, side: Side, total: int) -> None:
        title = f"{self.title}: pieces of {name}, {side}"
        pieces = (lambda lines: lines) if self.cutter.method == "prepared" else self.cutter.pieces
        self.job.lines(f"{name}.{side}.pieces", self._words(name, side), total, pieces, title)

    def _words(self, name: str, side: Side) -> Iterator[str]:
        """Yield what is cut into pieces, of every line of a split."""
        if self.cutter.method == "moses_bpe":
            return lines_of(self.job.folder / f"{name}.{side}.words.txt")
        if self.cutter.method == "prepared":
            return (" ".join(line.split()) for line in self._raw(name, side))
        return (self.cutter.words(line, side) for line in self._raw(name, side))

    def _raw(self, name: str, side: Side) -> Lines:
        lines: Lines = getattr(self.text.splits[name], side)
        return lines

    def _pieces_path(self, name: str, side: Side) -> Path:
        return self.job.folder / f"{name}.{side}.pieces.txt"

    def _file(self, name: str) -> str:
        return self.text.splits.get(name, self.text.splits["train"]).source.name

    def _clean(self, lines: Callable[[Side], Iterator[str]]) -> npt.NDArray[np.bool_]:
        both = zip(lines("source"), lines("target"), strict=True)
        return np.fromiter(
            (self.cleaning.keeps(len(a.split()), len(b.split())) for a, b in both), dtype=bool
        )

    def _parts(
        self, full: dict[str, npt.NDArray[np.bool_]]
    ) -> dict[str, tuple[str, npt.NDArray[np.bool_]]]:
        """Return the split whose lines each split is taken from, and which of them."""
        parts = {name: (name, chosen) for name, chosen in full.items()}
        if self.text.held_out_every:
            every, held_out = self.text.held_out_every, np.zeros_like(full["train"])
            held_out[np.flatnonzero(full["train"])[every - 1 :: every]] = True
            parts["train"] = "train", full["train"] & ~held_out
            parts["val"] = "train", held_out
        return {name: parts[name] for name in ("train", "val", "test")}

    # ---- what is learned ---------------------------------------------------------------------

    def _learn(self, chosen: npt.NDArray[np.bool_]) -> Cutter:
        def lines() -> Iterator[str]:
            for side in SIDES:
                yield from itertools.compress(self._words("train", side), chosen)

        def make() -> str:
            return json.dumps(asdict(self.cutter.learned(lines, self.num_merges)))

        facts = json.loads(self.job.text("cutter", make))
        return Cutter(**{**facts, **{side: Moses(**facts[side]) for side in SIDES}})

    def _dictionaries(self, chosen: npt.NDArray[np.bool_]) -> tuple[Dictionary, Dictionary]:
        given = self.text.dictionaries
        if given:
            for language in self.languages:
                if language not in given:
                    have = shown_name(next(iter(given.values())))
                    raise DataError(
                        f"found {have}, but no dict.{language}.txt beside it; add it, or remove "
                        f"both to have dictionaries made"
                    )
            source, target = (self._given_dictionary(language) for language in self.languages)
            if self.joint_dictionary and source != target:
                raise DataError(
                    f"{' and '.join(shown_name(path) for path in given.values())} differ, so they "
                    f"are no joint dictionary; set joint_dictionary to false"
                )
            return source, source if source == target else target
        if self.joint_dictionary:
            both = self._count(chosen, SIDES)
            return both, both
        return self._count(chosen, ("source",)), self._count(chosen, ("target",))

    def _given_dictionary(self, language: str) -> Dictionary:
        path = self.text.dictionaries[language]
        return Dictionary.from_text(read_text(path), shown_name(path))

    def _count(self, chosen: npt.NDArray[np.bool_], sides: Sequence[Side]) -> Dictionary:
        paths = [self._pieces_path("train", side) for side in sides]
        lines = (line for path in paths for line in itertools.compress(lines_of(path), chosen))
        pieces = (line.split() for line in lines)
        return Dictionary.count(pieces, self.cutter.alphabet, self.dictionary_limit)

    # ---- results -----------------------------------------------------------------------------

    def _write(
        self,
        writer: CacheWriter,
        coder: TextCoder,
        name: str,
        origin: str,
        chosen: npt.NDArray[np.bool_],
    ) -> dict[Side, list[int]]:
        """Write a split; return the number of unknown tokens, and of all, by side."""
        counts: dict[Side, list[int]] = {}
        for side in SIDES:
            lines = itertools.compress(lines_of(self._pieces_path(origin, side)), chosen)
            ids = map(partial(coder.ids, side), lines)
            counts[side] = list(write_sentences(writer, f"{name}_{side}", ids))
            self._refuse_other_dictionary(name, side, *counts[side])
            if name != "train":
                shown = itertools.compress(self._shown(origin, side), chosen)
                writer.add_text(f"{name}_{side}_lines", "\n".join(shown))
        return counts

    def _shown(self, name: str, side: Side) -> Iterator[str]:
        """Yield the lines as they stand; the words of lines that were cut into pieces already."""
        if self.cutter.method in ("prepared", "words"):
            return (joined(line.split()) for line in self._raw(name, side))
        return iter(self._raw(name, side))

    def _refuse_other_dictionary(self, name: str, side: Side, unknown: int, total: int) -> None:
        if name == "train" and self.text.dictionaries and unknown > _MOST_UNKNOWN * total:
            path = self.text.dictionaries[self.languages[SIDES.index(side)]]
            raise DataError(
                f"{shown_name(path)} lacks {unknown} of the {total} tokens of "
                f"{getattr(self.text.splits[name], side).name} ({100 * unknown / total:.0f} %): "
                f"it belongs to other text; remove it, or cut the text with its codes"
            )


def is_prepared(lines: Lines) -> bool:
    """Whether text was cut into pieces already, by the marks in its first lines."""
    return any(_CUT.search(line) for line in itertools.islice(lines, _LOOKED_AT))


def read_codes(path: Path) -> Codes:
    """Read BPE codes; a DataError names the file and the line that is wrong."""
    return Codes.from_text(read_text(path), shown_name(path))


def read_text(path: Path) -> str:
    """Read a small file; a DataError if it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{shown_name(path)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{shown_name(path)} is not UTF-8: {error}") from None
