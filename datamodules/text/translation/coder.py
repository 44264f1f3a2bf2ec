"""Conversion between lines of text and ids, for both languages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers

from datamodules.text.learn import byte_pairs
from datamodules.text.translation.bpe import Codes, joined
from datamodules.text.translation.dictionary import Dictionary
from datamodules.text.translation.moses import Moses
from lit_probattn.base.errors import DataError

Method = Literal["subwords", "moses_bpe", "prepared", "words"]
Side = Literal["source", "target"]
_NUM_BYTES = 256


@dataclass(frozen=True)
class Cutter:
    """Segmentation of text into pieces.

    Args:
        method: `subwords` is byte-level pair encoding, which is lossless; `moses_bpe` are pieces of
            Moses' words; `prepared` is text that already consists of such pieces; `words` are
            separated by whitespace, possibly with `@@` markers.
        source: Moses tokeniser of the source language.
        target: Moses tokeniser of the target language.
        codes: BPE codes in the format of subword-nmt. None disables segmentation of words.
        tokenizer: Sub-words in the format of `tokenizers`.
    """

    method: Method
    source: Moses
    target: Moses
    codes: str | None = None
    tokenizer: str | None = None

    def words(self, line: str, side: Side) -> str:
        """Return the units to segment: words, or the stripped line for sub-words."""
        moses = self._moses(side)
        if self.method in ("moses_bpe", "prepared"):
            return moses.words(line)
        if moses.lower:
            line = line.lower()
        return " ".join(line.split()) if self.method == "words" else line.strip()

    def pieces(self, lines: Sequence[str]) -> list[str]:
        """Return the pieces of each of `words`, separated by spaces."""
        if self.method == "subwords":
            encoded = self._subwords.encode_batch(list(lines), add_special_tokens=False)
            return [" ".join(line.tokens) for line in encoded]
        return [self._codes.cut(line) if self._codes else line for line in lines]

    @property
    def alphabet(self) -> list[str]:
        """Pieces that every dictionary contains."""
        if self.method != "subwords":
            return []
        return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())

    def line(self, pieces: Sequence[str]) -> str:
        """Return target pieces as one line of detokenised text."""
        if self.method == "subwords":
            text: str = self._subwords.decoder.decode(list(pieces))
            return text.replace("\n", " ").lstrip(" ")  # a model can generate any byte
        text = joined(pieces)
        return text if self.method == "words" else self.target.line(text)

    def tokenised(self, pieces: Sequence[str]) -> str:
        """Return target pieces as words separated by spaces, tokenised by Moses for sub-words."""
        if self.method == "subwords":
            return self.target.words(self.line(pieces))
        return joined(pieces)

    def learned(self, lines: Callable[[], Iterable[str]], num_merges: int) -> Cutter:
        """Return a copy with codes learned from lines of `words` of both languages, if needed."""
        if self.method == "moses_bpe" and self.codes is None:
            return Cutter(**{**vars(self), "codes": Codes.learn(lines, num_merges).text})
        if self.method == "subwords":
            learned = byte_pairs(lines(), _NUM_BYTES + num_merges, blank_first=True)
            return Cutter(**{**vars(self), "tokenizer": learned.to_str()})
        return self

    def _moses(self, side: Side) -> Moses:
        return self.source if side == "source" else self.target

    @cached_property
    def _codes(self) -> Codes | None:
        return None if self.codes is None else Codes.from_text(self.codes, "BPE codes")

    @cached_property
    def _subwords(self) -> Any:
        tokenizer = tokenizers.Tokenizer.from_str(str(self.tokenizer))
        return tokenizer


@dataclass(frozen=True)
class TextCoder:
    """Conversion between text of both languages and ids, stored as one JSON text.

    Args:
        cutter: Segmentation into pieces.
        source: Dictionary of the source language.
        target: Dictionary of the target language, possibly the same.
    """

    cutter: Cutter
    source: Dictionary
    target: Dictionary

    @property
    def text(self) -> str:
        """Serialised form, which `from_text` parses."""
        one = self.source == self.target
        return json.dumps(
            {
                "cutter": asdict(self.cutter),
                "source": self.source.text,
                "target": None if one else self.target.text,
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_text(cls, text: str) -> TextCoder:
        """Parse `text`."""
        stored = json.loads(text)
        facts = stored["cutter"]
        for side in ("source", "target"):
            facts[side] = Moses(**facts[side])
        source = Dictionary.from_text(stored["source"], "source dictionary")
        target = source
        if stored["target"] is not None:
            target = Dictionary.from_text(stored["target"], "target dictionary")
        return cls(Cutter(**facts), source, target)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of source lines, with the end token."""
        words = [self.cutter.words(line, "source") for line in lines]
        if self.cutter.method == "prepared" and self.cutter.codes is None:
            raise DataError(
                "the text consists of BPE pieces, but its codes are missing, so other lines cannot "
                "be segmented; add the file `code` to the folder of the text, or set codes_file"
            )
        return [self.ids("source", line).tolist() for line in self.cutter.pieces(words)]

    def ids(self, side: Side, pieces: str) -> npt.NDArray[np.int32]:
        """Return the ids of pieces separated by spaces, with the end token."""
        dictionary = self.source if side == "source" else self.target
        return dictionary.ids(pieces.split(), spell=self.cutter.method == "subwords")

    def detokenise(self, ids: Iterable[int]) -> str:
        """Return target ids as detokenised text, without markers of BPE and Moses."""
        return self.cutter.line(self.target.words(ids))

    def tokenised(self, ids: Iterable[int]) -> str:
        """Return target ids as words of Moses' tokeniser, separated by spaces."""
        return self.cutter.tokenised(self.target.words(ids))

    def tokenised_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield target lines as `tokenised` does."""
        for line in lines:
            if self.cutter.method == "subwords":
                yield self.cutter.target.words(line)
            else:
                yield self.cutter.words(line, "target")
