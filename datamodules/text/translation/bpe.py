"""Byte pair encoding of words, with the file format and the markers of subword-nmt (`@@`)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from datamodules.text.learn import without_long_words
from lit_probattn.base.errors import DataError

MARK = "@@"
_END = "</w>"
_LAST = "\ue000"  # end of a word as a symbol; a private-use character


class Codes:
    """Ranked merges of symbol pairs, which segment words.

    Source: subword-nmt (Sennrich et al., ACL 2016), its file formats 0.1 and 0.2, and that of
    fastBPE, which adds a count to each line.

    Args:
        merges: Pairs of symbols, the first merge first.
        end_is_symbol: Whether the end of a word is a separate symbol (version 0.1) instead of part
            of the last character.
    """

    def __init__(self, merges: Sequence[tuple[str, str]], end_is_symbol: bool = False) -> None:
        self.merges, self.end_is_symbol = list(merges), end_is_symbol
        pairs = list(dict.fromkeys(self.merges))  # the first of duplicates is used
        if end_is_symbol:
            pairs = [(a.replace(_END, _LAST), b.replace(_END, _LAST)) for a, b in pairs]
        symbols = dict.fromkeys(["", *itertools.chain(*((a, b, a + b) for a, b in pairs))])
        ids = {symbol: number for number, symbol in enumerate(symbols)}
        suffix = {} if end_is_symbol else {"end_of_word_suffix": _END}
        self._tokenizer = Tokenizer(models.BPE(ids, pairs, unk_token="", **suffix))
        self._end = _LAST if end_is_symbol else ""
        self._known: dict[str, str] = {}

    @classmethod
    def from_text(cls, text: str, name: str) -> Codes:
        """Parse the content of a file; a DataError names the line that is not a symbol pair."""
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
                    f"{name}: line {number} is {line[:60]!r}: expected two symbols separated by a "
                    "space, as in the codes of subword-nmt"
                )
            merges.append((symbols[0], symbols[1]))
        if not merges:
            raise DataError(f"{name} has no merges: expected two symbols per line")
        return cls(merges, end_is_symbol=version == "0.1")

    @classmethod
    def learn(cls, lines: Callable[[], Iterable[str]], num_merges: int) -> Codes:
        """Learn merges with a count of at least 2 from lines of words, by the package `tokenizers`.

        Departs from the source: the order of merges of pairs with equal counts.
        """
        characters: set[str] = set()
        ends: set[str] = set()
        for word in set(itertools.chain.from_iterable(line.split() for line in lines())):
            characters.update(word)
            ends.add(word[-1])
        tokenizer = Tokenizer(models.BPE(end_of_word_suffix=_END))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        trainer = trainers.BpeTrainer(
            vocab_size=len(characters) + len(ends) + num_merges,
            min_frequency=2,
            end_of_word_suffix=_END,
            show_progress=False,
        )
        tokenizer.train_from_iterator(map(without_long_words, lines()), trainer)
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        return cls([(first, second) for first, second in merges[:num_merges]])

    @property
    def text(self) -> str:
        """Content of a file."""
        version = "0.1" if self.end_is_symbol else "0.2"
        return f"#version: {version}\n" + "".join(f"{a} {b}\n" for a, b in self.merges)

    def cut(self, line: str) -> str:
        """Return the pieces of a line of words; pieces inside a word end with the marker."""
        words = line.split()
        new = [word for word in dict.fromkeys(words) if word not in self._known]
        cut = self._tokenizer.encode_batch([word + self._end for word in new])
        for word, found in zip(new, cut, strict=True):
            # By offsets, since characters without a merge are not symbols.
            pieces = [word[first:end] for first, end in found.offsets]
            self._known[word] = f"{MARK} ".join(piece for piece in pieces if piece)
        return " ".join(self._known[word] for word in words)


def joined(pieces: Iterable[str]) -> str:
    """Return the words of pieces, separated by spaces."""
    text = " ".join(pieces) + " "
    return text.replace(f"{MARK} ", "").rstrip(" ")
