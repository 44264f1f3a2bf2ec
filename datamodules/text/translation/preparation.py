"""Preparation of parallel text: cleaning, segmentation, dictionaries, ids."""

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

from datamodules.core.base import SPLITS
from datamodules.core.cache import CacheWriter
from datamodules.core.files import read_text, shown_name
from datamodules.text.translation.batches import write_sentences
from datamodules.text.translation.bpe import MARK, Codes, joined
from datamodules.text.translation.coder import Cutter, Side, TextCoder
from datamodules.text.translation.dictionary import Dictionary
from datamodules.text.translation.files import EmptyLines, Lines, ParallelText, check_pair
from datamodules.text.translation.job import LineJob, lines_of
from datamodules.text.translation.moses import Moses
from lit_probattn.base.errors import DataError

SIDES: tuple[Side, Side] = ("source", "target")
_LOOKED_AT = 1000  # lines inspected for BPE markers
_CUT = re.compile(rf"\S{MARK} ")
# A dictionary that misses a larger fraction of the training text is rejected.
_MOST_UNKNOWN = 0.1


@dataclass(frozen=True)
class Cleaning:
    """Filter of training pairs.

    Source: clean-corpus-n.perl of Moses.

    Args:
        max_ratio: Maximum ratio of the word counts of both sides.
        max_words: Maximum number of words per side.
        by_pieces: Whether pieces are counted instead of words.
    """

    max_ratio: float | None = None
    max_words: int | None = None
    by_pieces: bool = False

    @property
    def counts(self) -> bool:
        """Whether any pair can be dropped."""
        return self.max_ratio is not None or self.max_words is not None

    def keeps(self, source: int, target: int) -> bool:
        """Whether a pair with these word counts is kept."""
        if not source or not target:
            return False
        if self.max_words is not None and max(source, target) > self.max_words:
            return False
        return self.max_ratio is None or max(source / target, target / source) <= self.max_ratio


@dataclass
class Preparation:
    """The steps from files to a cache.

    Args:
        cutter: Segmentation; missing codes are learned from the training text.
        joint_dictionary: Whether both languages share one dictionary.
        dictionary_limit: Maximum number of ids of a dictionary.
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
        """Run all steps and write the results to a cache."""
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
            raise DataError(f"{self._file('train')}: no sentence pairs remain after cleaning")
        self.cutter = self._learn(self._parts(full)["train"][1])
        for name, side in itertools.product(sizes, SIDES):
            self._pieces_file(name, side, sizes[name])
        if self.cleaning.counts and self.cleaning.by_pieces:
            full["train"] &= self._clean(lambda side: lines_of(self._pieces_path("train", side)))
        parts = self._parts(full)
        for name, (_, chosen) in parts.items():
            if not chosen.any():
                raise DataError(f"{self._file(name)}: no sentence pairs remain for {name}")
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
        """Yield the units to segment, for every line of a split."""
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
        """Return, for each split, the split that contains its lines and a mask of them."""
        parts = {name: (name, chosen) for name, chosen in full.items()}
        if self.text.held_out_every:
            every, held_out = self.text.held_out_every, np.zeros_like(full["train"])
            held_out[np.flatnonzero(full["train"])[every - 1 :: every]] = True
            parts["train"] = "train", full["train"] & ~held_out
            parts["val"] = "train", held_out
        return {name: parts[name] for name in SPLITS}

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
                        f"found {have}, but missing dict.{language}.txt in the same folder; add "
                        "it, or remove both to build dictionaries from the text"
                    )
            source, target = (self._given_dictionary(language) for language in self.languages)
            if self.joint_dictionary and source != target:
                raise DataError(
                    f"{' and '.join(shown_name(path) for path in given.values())} differ, but "
                    "joint_dictionary is true; set it to false"
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
        """Write a split; return the numbers of unknown and of all tokens, by side."""
        counts: dict[Side, list[int]] = {}
        for side in SIDES:
            lines = itertools.compress(lines_of(self._pieces_path(origin, side)), chosen)
            ids = map(partial(coder.ids, side), lines)
            counts[side] = list(write_sentences(writer, f"{name}_{side}", ids))
            self._reject_other_dictionary(name, side, *counts[side])
            if name != "train":
                shown = itertools.compress(self._shown(origin, side), chosen)
                writer.add_text(f"{name}_{side}_lines", "\n".join(shown))
        return counts

    def _shown(self, name: str, side: Side) -> Iterator[str]:
        """Yield the original lines; for segmented text, the words."""
        if self.cutter.method in ("prepared", "words"):
            return (joined(line.split()) for line in self._raw(name, side))
        return iter(self._raw(name, side))

    def _reject_other_dictionary(self, name: str, side: Side, unknown: int, total: int) -> None:
        if name == "train" and self.text.dictionaries and unknown > _MOST_UNKNOWN * total:
            path = self.text.dictionaries[self.languages[SIDES.index(side)]]
            raise DataError(
                f"{shown_name(path)} lacks {unknown} of the {total} tokens of "
                f"{getattr(self.text.splits[name], side).name} ({100 * unknown / total:.0f} %), so "
                "it was built from other text; remove it, or segment the text with its codes"
            )


def is_prepared(lines: Lines) -> bool:
    """Whether text is already segmented, judged by the markers in its first lines."""
    return any(_CUT.search(line) for line in itertools.islice(lines, _LOOKED_AT))


def read_codes(path: Path) -> Codes:
    """Read BPE codes; a DataError names the file and the invalid line."""
    return Codes.from_text(read_text(path), shown_name(path))
