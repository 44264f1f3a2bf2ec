"""Which vocabulary a corpus is read with: words of its training text, of a file, or sub-words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.core.errors import DataError
from datamodules.core.progress import progress
from datamodules.text.source import TextSource
from datamodules.text.subwords import SubwordVocabulary
from datamodules.text.tokenise import Tokens
from datamodules.text.vocabulary import Vocabulary, WordCounter

__all__ = ["VocabularyChoice"]


@dataclass(frozen=True)
class VocabularyChoice:
    """At most one of three settings; without any, the words of the training text.

    Args:
        vocab_file: A file with one word per line.
        subwords: Number of sub-words to train on the training text.
        tokenizer_file: A tokenizer.json.

    Raises:
        DataError: More than one is set.
    """

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
            return Vocabulary.from_file(Path(self.vocab_file).expanduser())
        if self.tokenizer_file is not None:
            return SubwordVocabulary.from_file(Path(self.tokenizer_file).expanduser())
        return None

    def make(self, train: TextSource) -> Tokens:
        """Return the vocabulary, from the file or from the training text."""
        given = self.given()
        if given is not None:
            return given
        with progress("WikiText: counting words", train.size, train.unit) as advance:
            if self.subwords is not None:
                return SubwordVocabulary.train(_texts(train, advance), self.subwords)
            counter = WordCounter()
            for text in _texts(train, advance):
                counter.add(text)
        return counter.vocabulary()

    def read(self, text: str) -> Tokens:
        """Return the vocabulary of which `text` was stored."""
        return SubwordVocabulary(text) if self.by_subwords else Vocabulary.from_text(text)


def _texts(source: TextSource, advance: Callable[[int], None]) -> Iterator[str]:
    position = 0
    for block in source.blocks():
        yield block.text
        advance(block.position - position)
        position = block.position
