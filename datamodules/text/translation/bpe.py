"""Byte pair encoding of words, in the files and with the marks of subword-nmt (`@@`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from datamodules.core.errors import DataError
from datamodules.text.vocabulary import tokenizers_package, without_long_words

__all__ = ["MARK", "Codes", "joined"]

MARK = "@@"
_END = "</w>"


class Codes:
    """Merges of pairs of symbols, by rank; they cut a word into pieces.

    Source: subword-nmt (Sennrich et al., ACL 2016), its files of version 0.1 and 0.2, and those of
    fastBPE, which add a count to each line.

    Args:
        merges: Pairs of symbols, the first merge first.
        end_is_symbol: Whether the end of a word is a symbol of its own (version 0.1), not a part of
            the last character's.
    """

    def __init__(self, merges: Sequence[tuple[str, str]], end_is_symbol: bool = False) -> None:
        self.merges, self.end_is_symbol = list(merges), end_is_symbol
        self._ranks: dict[tuple[str, str], int] = {}
        for rank, pair in enumerate(self.merges):
            self._ranks.setdefault(pair, rank)
        self._known: dict[str, str] = {}

    @classmethod
    def from_text(cls, text: str, name: str) -> Codes:
        """Read the content of a file; a DataError names the line that is no pair of symbols."""
        lines = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
        version = "0.1"
        first = 0
        if lines[0].startswith("#version:"):
            version, first = lines[0].partition(":")[2].strip(), 1
            if version not in ("0.1", "0.2"):
                raise DataError(f"{name}: version {version!r} of BPE codes; expected 0.1 or 0.2")
        merges = []
        for number, line in enumerate(lines[first:], first + 1):
            symbols = line.rstrip(" ").split(" ")
            if len(symbols) == 3 and symbols[2].isdecimal():  # fastBPE
                symbols, version = symbols[:2], "0.2"
            if len(symbols) != 2 or not all(symbols):
                raise DataError(
                    f"{name}: line {number} is {line[:60]!r}: expected two symbols with a blank "
                    f"between them, as in the codes of subword-nmt"
                )
            merges.append((symbols[0], symbols[1]))
        if not merges:
            raise DataError(f"{name} has no merges: expected two symbols per line")
        return cls(merges, end_is_symbol=version == "0.1")

    @classmethod
    def learn(cls, lines: Callable[[], Iterable[str]], num_merges: int) -> Codes:
        """Learn merges from lines of words, by the package `tokenizers`; pairs that occur twice.

        Departs from the source: of pairs with equal counts, which is merged first.
        """
        package = tokenizers_package("BPE codes to be learned", "set codes_file")
        characters: set[str] = set()
        ends: set[str] = set()
        for word in set(itertools.chain.from_iterable(line.split() for line in lines())):
            characters.update(word)
            ends.add(word[-1])
        model = package.models.BPE(end_of_word_suffix=_END)
        tokenizer = package.Tokenizer(model)
        tokenizer.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
        trainer = package.trainers.BpeTrainer(
            vocab_size=len(characters) + len(ends) + num_merges,
            min_frequency=2,
            end_of_word_suffix=_END,
            show_progress=False,
        )
        tokenizer.train_from_iterator(map(without_long_words, lines()), trainer)
        merges = _merges_of(tokenizer.to_str())
        return cls(merges[:num_merges])

    @property
    def text(self) -> str:
        """The content of a file."""
        version = "0.1" if self.end_is_symbol else "0.2"
        return f"#version: {version}\n" + "".join(f"{a} {b}\n" for a, b in self.merges)

    def cut(self, line: str) -> str:
        """Return the pieces of a line of words; those within a word end with the mark."""
        return " ".join(self._known.get(word) or self._cut_word(word) for word in line.split())

    def _cut_word(self, word: str) -> str:
        symbols = [*word[:-1], word[-1] + _END]
        if self.end_is_symbol:
            symbols = [*word, _END]
        while len(symbols) > 1:
            pairs = set(itertools.pairwise(symbols))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            symbols = _merge(symbols, best)
        if symbols[-1] == _END:
            symbols = symbols[:-1]
        else:
            symbols[-1] = symbols[-1].removesuffix(_END)
        found = f"{MARK} ".join(symbols)
        self._known[word] = found
        return found


def joined(pieces: Iterable[str]) -> str:
    """Return the words of pieces, separated by blanks."""
    text = " ".join(pieces) + " "
    return text.replace(f"{MARK} ", "").rstrip(" ")


def _merge(symbols: Sequence[str], pair: tuple[str, str]) -> list[str]:
    found: list[str] = []
    place = 0
    while place < len(symbols):
        both = tuple(symbols[place : place + 2]) == pair
        found.append("".join(pair) if both else symbols[place])
        place += 1 + both
    return found


def _merges_of(stored: str) -> list[tuple[str, str]]:
    """Return the merges of a stored tokeniser; earlier versions store each as one text."""
    import json

    merges = json.loads(stored)["model"]["merges"]
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    return [(first, second) for first, second in pairs]
