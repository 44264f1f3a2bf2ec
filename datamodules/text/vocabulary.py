"""Words and their ids."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.core.errors import DataError, MissingDataError

__all__ = ["END_OF_LINE", "UNKNOWN", "Vocabulary", "WordCounter"]

END_OF_LINE, UNKNOWN = "<eos>", "<unk>"


class Vocabulary:
    """Distinct words; a word's id is its place.

    Source: the word-level vocabulary of the Transformer-XL code, which MGK's language models use:
    `<eos>` is id 0, then the words of the training text by decreasing frequency, those of one
    frequency by first occurrence; `<unk>` is a word of the corpus like all others.

    Args:
        words: The words, `<eos>` among them.

    Raises:
        DataError: A word occurs twice, is empty or has blanks in it; or `<eos>` is missing.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._ids: dict[str, int] = {}
        for number, word in enumerate(self.words):
            if word.split() != [word]:
                raise DataError(f"line {number + 1} is {word!r}: expected one word without blanks")
            first = self._ids.setdefault(word, number)
            if first != number:
                raise DataError(
                    f"{word!r} is in line {first + 1} and again in line {number + 1}; every word "
                    f"has one id, so remove one of the lines"
                )
        if END_OF_LINE not in self._ids:
            raise DataError(f"{END_OF_LINE!r}, which ends every line of text, is missing; add it")

    @classmethod
    def from_file(cls, path: Path) -> Vocabulary:
        """Read a file with one word per line, in the order of the ids.

        Raises:
            DataError: The file is missing, not UTF-8, or not a vocabulary.
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise MissingDataError(f"vocabulary file {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"vocabulary file {path} is not UTF-8: {error}") from None
        try:
            return cls.from_text(text)
        except DataError as error:
            raise DataError(f"vocabulary file {path}: {error}") from None

    @classmethod
    def from_text(cls, text: str) -> Vocabulary:
        """Read what `text` gives."""
        return cls(text.removesuffix("\n").split("\n"))

    @property
    def text(self) -> str:
        """One word per line, in the order of the ids."""
        return "".join(f"{word}\n" for word in self.words)

    @property
    def digest(self) -> str:
        """SHA-256 of `text`; the same for the same words in the same order."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.words)

    @property
    def end_of_line(self) -> int:
        """Id of `<eos>`."""
        return self._ids[END_OF_LINE]

    def encode(self, text: str) -> tuple[npt.NDArray[np.int32], int]:
        """Turn whole lines, each ended by a newline, into ids.

        Words are what `str.split` gives, case kept; each line gets an `<eos>`.

        Returns:
            The ids, shape (num_tokens,), and how many of them stand for words that the vocabulary
            has not and that became `<unk>`.

        Raises:
            DataError: There is such a word and the vocabulary has no `<unk>`.
        """
        words = text.replace("\n", f" {END_OF_LINE} ").split()
        found = map(self._ids.get, words, repeat(-1))
        ids = np.fromiter(found, dtype=np.int32, count=len(words))
        missing = ids == -1
        num_missing = int(missing.sum())
        if num_missing:
            if UNKNOWN not in self._ids:
                word = words[int(missing.argmax())]
                raise DataError(
                    f"{word!r} is not in the vocabulary of {len(self)} words, and neither is "
                    f"{UNKNOWN!r} to stand for it; add {UNKNOWN!r} to the vocabulary or its text"
                )
            ids[missing] = self._ids[UNKNOWN]
        return ids, num_missing

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; `<eos>` becomes a newline."""
        words = ("\n" if i == self.end_of_line else self.words[i] for i in ids)
        return " ".join(words).replace(" \n ", "\n").replace(" \n", "\n").replace("\n ", "\n")


class WordCounter:
    """Counts words, and makes the vocabulary of them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, text: str) -> None:
        """Count the words of a piece of text that ends between words."""
        self._counts.update(text.split())

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary of everything counted."""
        # The sort behind most_common is stable and the counter remembers first occurrences.
        words = (word for word, _ in self._counts.most_common() if word != END_OF_LINE)
        return Vocabulary([END_OF_LINE, *words])
