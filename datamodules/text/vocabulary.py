"""Vocabularies: words of a training text or of a file, or sub-words by the package `tokenizers`."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from datamodules.core.errors import DataError, MissingDataError
from datamodules.core.files import expand
from datamodules.core.progress import progress
from datamodules.text.source import TextSource

__all__ = ["SubwordVocabulary", "Tokens", "Vocabulary", "VocabularyChoice", "count_words"]
__all__ += ["END_OF_LINE", "UNKNOWN", "texts_of", "tokenizers_package", "without_long_words"]

END_OF_LINE, UNKNOWN = "<eos>", "<unk>"
_MOST_LETTERS = 500  # of a word that is learned from
_LONG_WORD = re.compile(rf"\w{{{_MOST_LETTERS + 1},}}|[^\w\s]{{{_MOST_LETTERS + 1},}}")


class Tokens(ABC):
    """Words or sub-words, and their ids."""

    what: str
    end_of_line: int  # id of `<eos>`

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a file; a DataError if it is missing, not UTF-8, or not usable."""
        try:
            return cls.from_text(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise MissingDataError(f"{cls.what} file {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{cls.what} file {path} is not UTF-8: {error}") from None
        except DataError as error:
            raise DataError(f"{cls.what} file {path}: {error}") from None

    @classmethod
    @abstractmethod
    def from_text(cls, text: str) -> Self:
        """Read what `text` gives."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What is stored, and what `from_text` reads."""

    @property
    def digest(self) -> str:
        """SHA-256 of `text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> tuple[npt.NDArray[np.int32], int]:
        """Turn text into ids; each newline becomes an `<eos>`.

        Returns:
            The ids, shape (num_tokens,), and how many of them stand for unknown words.

        Raises:
            DataError: A word is unknown and there is no `<unk>` to stand for it.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; `<eos>` becomes a newline."""


class Vocabulary(Tokens):
    """Distinct words; a word's id is its place.

    Source: the word-level vocabulary of the Transformer-XL code, which MGK's language models use:
    `<eos>` is id 0, then the words of the training text by decreasing frequency, those of one
    frequency by first occurrence; `<unk>` is a word of the corpus like all others.

    Args:
        words: The words, `<eos>` among them.

    Raises:
        DataError: A word occurs twice, is empty or has blanks in it; or `<eos>` is missing.
    """

    what = "vocabulary"

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
        self.end_of_line = self._ids[END_OF_LINE]

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read one word per line, in the order of the ids."""
        return cls(text.removesuffix("\n").split("\n"))

    @property
    def text(self) -> str:
        """One word per line, in the order of the ids."""
        return "".join(f"{word}\n" for word in self.words)

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> tuple[npt.NDArray[np.int32], int]:
        """Turn lines into ids; words are what `str.split` gives, case kept."""
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


def count_words(texts: Iterable[str]) -> Vocabulary:
    """Return the vocabulary of pieces of text that end between words."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    # The sort behind most_common is stable and the counter remembers first occurrences.
    return Vocabulary([END_OF_LINE, *(w for w, _ in counts.most_common() if w != END_OF_LINE)])


class SubwordVocabulary(Tokens):
    """A trained tokeniser; the counterpart of `Vocabulary`.

    Args:
        text: The tokeniser as `tokenizers` stores it (the content of a tokenizer.json).

    Raises:
        DataError: `tokenizers` is not installed, the text is not a tokeniser, or it has no `<eos>`.
    """

    what = "tokenizer"

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            self._tokenizer = tokenizers_package().Tokenizer.from_str(text)
        except DataError:
            raise
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"not a tokeniser of the package tokenizers: {error}") from None
        end = self._tokenizer.token_to_id(END_OF_LINE)
        if end is None:
            raise DataError(
                f"the tokeniser has no token {END_OF_LINE!r}, which ends every line of text; add it"
            )
        self.end_of_line = end

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read the content of a tokenizer.json."""
        return cls(text)

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> Self:
        """Train byte-level pair encoding of `size` tokens; `<eos>` is id 0, `<unk>` is id 1.

        `texts` are pieces of text that end at line ends. Nothing is learned of words of more than
        500 characters.
        """
        package = tokenizers_package()
        if size < 258:
            raise DataError(
                f"subwords must be at least 258 (the bytes and two more), received {size}"
            )
        tokenizer = package.Tokenizer(package.models.BPE())
        tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_LINE, UNKNOWN],
            initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        lines = (line for text in texts for line in without_long_words(text).split("\n"))
        tokenizer.train_from_iterator(lines, trainer)
        return cls(tokenizer.to_str())

    @property
    def text(self) -> str:
        """The stored tokeniser."""
        return self._text

    def __len__(self) -> int:
        size: int = self._tokenizer.get_vocab_size()
        return size

    def encode(self, text: str) -> tuple[npt.NDArray[np.int32], int]:
        """Turn lines into ids; no sub-word is unknown."""
        encoded = self._tokenizer.encode_batch(text.split("\n"), add_special_tokens=False)
        ids = [i for line in encoded for i in (*line.ids, self.end_of_line)]
        return np.array(ids[:-1], dtype=np.int32), 0  # only a newline ends a line

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; `<eos>` becomes a newline."""
        lines: list[list[int]] = [[]]
        for token in ids:
            if token == self.end_of_line:
                lines.append([])
            else:
                lines[-1].append(token)
        return "\n".join(self._tokenizer.decode(line, False) for line in lines)


def without_long_words(text: str) -> str:
    """Return a text to learn from, without what is cut as one word of more than 500 characters.

    Time to learn grows with the square of the longest word, and base64 or code has some of a
    million. What is cut as one is a run of letters and digits, or of other signs.
    """
    longest = max(map(len, text.split()), default=0)
    return text if longest <= _MOST_LETTERS else _LONG_WORD.sub(" ", text)


def tokenizers_package(
    what: str = "sub-words", otherwise: str = "leave out subwords and tokenizer_file"
) -> Any:
    """Return the package `tokenizers`; a DataError says what needs it, and what to do without."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
        import tokenizers.trainers
    except ImportError:
        raise DataError(
            f"{what} need the package tokenizers, which is not installed: "
            f"pip install 'lit-probattn[text]', or {otherwise}"
        ) from None
    return tokenizers


@dataclass(frozen=True)
class VocabularyChoice:
    """At most one of three settings (or a DataError); without any, the training text's words."""

    vocab_file: str | None = None
    subwords: int | None = None
    tokenizer_file: str | None = None

    def __post_init__(self) -> None:
        chosen = [name for name, value in vars(self).items() if value is not None]
        if len(chosen) > 1:
            raise DataError(f"{' and '.join(chosen)} are set: at most one vocabulary can be used")

    @property
    def by_subwords(self) -> bool:
        """Whether tokens are sub-words."""
        return self.subwords is not None or self.tokenizer_file is not None

    def settings(self) -> dict[str, Any]:
        """What identifies the choice; of a file its content, not its place."""
        given = self.given()
        return {
            "rule": "subwords" if self.by_subwords else "words",
            "subwords": self.subwords,
            "vocabulary": None if given is None else given.digest,
        }

    def given(self) -> Tokens | None:
        """Read the vocabulary of a file, if one is set."""
        if self.vocab_file is not None:
            return Vocabulary.from_file(expand(self.vocab_file))
        if self.tokenizer_file is not None:
            return SubwordVocabulary.from_file(expand(self.tokenizer_file))
        return None

    def make(self, train: TextSource) -> Tokens:
        """Return the vocabulary, from the file or from the training text."""
        given = self.given()
        if given is not None:
            return given
        with progress("counting words", train.size, train.unit) as advance:
            if self.subwords is not None:
                return SubwordVocabulary.train(texts_of(train, advance), self.subwords)
            return count_words(texts_of(train, advance))

    def read(self, text: str) -> Tokens:
        """Return the vocabulary of which `text` was stored."""
        return (SubwordVocabulary if self.by_subwords else Vocabulary).from_text(text)


def texts_of(source: TextSource, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the pieces of a text; `advance` is told how much of it was read."""
    position = 0
    for block in source.blocks():
        yield block.text
        advance(block.position - position)
        position = block.position
