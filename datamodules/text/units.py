"""Tokens of the user's own text: bytes, characters, words with `<unk>`, or trained sub-words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from datamodules.core.errors import DataError, require_at_least, require_one_of
from datamodules.core.progress import progress
from datamodules.text.source import TextSource
from datamodules.text.vocabulary import (
    END_OF_LINE,
    UNKNOWN,
    SubwordVocabulary,
    Tokens,
    Vocabulary,
    texts_of,
)

__all__ = ["Bytes", "Characters", "TokenChoice", "Unit"]

Unit = Literal["bytes", "characters", "words", "subwords"]
_NEWLINE = ord("\n")


class Bytes(Tokens):
    """The 256 bytes of UTF-8; the newline ends a line."""

    what = "bytes"
    end_of_line = _NEWLINE

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the bytes, whatever the text: there is nothing to store."""
        return cls()

    @property
    def text(self) -> str:
        """What is stored: a name."""
        return "bytes\n"

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> tuple[npt.NDArray[np.int32], int]:
        """Turn text into its bytes; none is unknown."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32), 0

    def decode(self, ids: Iterable[int]) -> str:
        """Turn bytes into text; what is cut off within a character is shown as �."""
        return bytes(int(i) for i in ids).decode("utf-8", "replace")


class Characters(Tokens):
    """Characters; id 0 is `<unk>`, 1 the newline, then by decreasing frequency.

    Args:
        characters: All but the newline, in the order of their ids.
    """

    what = "characters"
    end_of_line = 1

    def __init__(self, characters: str) -> None:
        self._characters = characters
        self._ids = {character: i + 2 for i, character in enumerate(characters)}
        self._ids["\n"] = self.end_of_line

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `text` gives."""
        return cls(json.loads(text))

    @property
    def text(self) -> str:
        """The characters, as JSON."""
        return json.dumps(self._characters) + "\n"

    def __len__(self) -> int:
        return len(self._characters) + 2

    def encode(self, text: str) -> tuple[npt.NDArray[np.int32], int]:
        """Turn text into ids, and count the unknown."""
        ids = np.fromiter((self._ids.get(c, 0) for c in text), dtype=np.int32, count=len(text))
        return ids, int((ids == 0).sum())

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; `<unk>` is shown as �."""
        known = "�\n" + self._characters
        return "".join(known[int(i)] for i in ids)


@dataclass(frozen=True)
class TokenChoice:
    """What tokens are, and how many of them there may be.

    Args:
        unit: Bytes, characters, words (what blanks separate, case kept), or sub-words (byte-level
            pair encoding, trained on the training text; needs the package `tokenizers`).
        limit: Most tokens of the vocabulary, the most frequent ones; all others are `<unk>`. The
            number of sub-words.
        min_count: Words that are rarer in the training text are `<unk>`, which so is learned.
    """

    unit: Unit
    limit: int
    min_count: int = 2

    def __post_init__(self) -> None:
        require_one_of(get_args(Unit), tokens=self.unit)
        require_at_least(3, vocab_limit=self.limit)
        require_at_least(1, min_count=self.min_count)

    @property
    def by_subwords(self) -> bool:
        """Whether tokens are sub-words."""
        return self.unit == "subwords"

    def settings(self) -> dict[str, Any]:
        """What decides the vocabulary; plain JSON values."""
        if self.unit == "bytes":
            return {"tokens": self.unit}
        rare = {"min_count": self.min_count} if self.unit == "words" else {}
        return {"tokens": self.unit, "vocab_limit": self.limit, **rare}

    def make(self, train: TextSource) -> Tokens:
        """Return the vocabulary of a training text."""
        with progress(f"counting {self.unit}", train.size, train.unit) as advance:
            return self.make_from(texts_of(train, advance))

    def make_from(self, texts: Iterable[str]) -> Tokens:
        """Return the vocabulary of pieces of the training text that end at line ends."""
        if self.unit == "bytes":
            return Bytes()
        if self.unit == "subwords":
            return SubwordVocabulary.train(texts, self.limit)
        if self.unit == "characters":
            found = _frequent(texts, self.limit - 2)
            return Characters("".join(found))
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.split())
        words = [w for w, n in counts.most_common() if n >= self.min_count]
        own = (END_OF_LINE, UNKNOWN)
        words = [word for word in words if word not in own]
        if not words:
            raise DataError(
                f"no word occurs {self.min_count} times in the training text; lower min_count, or "
                f"use tokens bytes"
            )
        return Vocabulary([*own, *words[: self.limit - len(own)]])

    def read(self, text: str) -> Tokens:
        """Return the vocabulary of which `text` was stored."""
        kinds: dict[str, type[Tokens]] = {
            "bytes": Bytes,
            "characters": Characters,
            "words": Vocabulary,
            "subwords": SubwordVocabulary,
        }
        return kinds[self.unit].from_text(text)


def _frequent(texts: Iterable[str], most: int) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    counts.pop("\n", None)
    return (character for character, _ in counts.most_common(most))
