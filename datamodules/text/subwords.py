"""Sub-words instead of words, by the optional package `tokenizers`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.errors import DataError, MissingDataError
from datamodules.text.vocabulary import END_OF_LINE, UNKNOWN

__all__ = ["SubwordVocabulary"]


class SubwordVocabulary:
    """A trained tokeniser; the counterpart of `Vocabulary`.

    Args:
        text: The tokeniser as `tokenizers` stores it (the content of a tokenizer.json).

    Raises:
        DataError: `tokenizers` is not installed, the text is not a tokeniser, or it has no `<eos>`.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            self._tokenizer = _package().Tokenizer.from_str(text)
        except DataError:
            raise
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"not a tokeniser of the package tokenizers: {error}") from None
        end = self._tokenizer.token_to_id(END_OF_LINE)
        if end is None:
            raise DataError(
                f"the tokeniser has no token {END_OF_LINE!r}, which ends every line of text; add it"
            )
        self.end_of_line: int = end
        self._unknown: int | None = self._tokenizer.token_to_id(UNKNOWN)

    @classmethod
    def from_file(cls, path: Path) -> SubwordVocabulary:
        """Read a tokenizer.json.

        Raises:
            DataError: It is missing or not usable.
        """
        try:
            return cls(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise MissingDataError(f"tokenizer file {path}: {error.strerror}") from None
        except (UnicodeDecodeError, DataError) as error:
            raise DataError(f"tokenizer file {path}: {error}") from None

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> SubwordVocabulary:
        """Train byte-level pair encoding of `size` tokens; `<eos>` is id 0, `<unk>` is id 1.

        Args:
            texts: Pieces of text that end at line ends.
            size: Number of tokens, at least 258.
        """
        package = _package()
        if size < 258:
            raise DataError(f"subwords must be at least 258 (the bytes and two more), got {size}")
        tokenizer = package.Tokenizer(package.models.BPE())
        tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_LINE, UNKNOWN],
            initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_lines(texts), trainer)
        return cls(tokenizer.to_str())

    @property
    def text(self) -> str:
        """The stored tokeniser."""
        return self._text

    @property
    def digest(self) -> str:
        """SHA-256 of the stored tokeniser."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def __len__(self) -> int:
        size: int = self._tokenizer.get_vocab_size()
        return size

    def encode(self, text: str) -> tuple[npt.NDArray[np.int32], int]:
        """Turn whole lines, each ended by a newline, into ids; each line gets an `<eos>`.

        Returns:
            The ids, shape (num_tokens,), and 0: no sub-word is unknown.
        """
        lines = text.removesuffix("\n").split("\n")
        encoded = self._tokenizer.encode_batch(lines, add_special_tokens=False)
        ids = [i for line in encoded for i in (*line.ids, self.end_of_line)]
        return np.array(ids, dtype=np.int32), 0

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; `<eos>` becomes a newline."""
        lines: list[list[int]] = [[]]
        for token in ids:
            if token == self.end_of_line:
                lines.append([])
            else:
                lines[-1].append(token)
        return "\n".join(self._tokenizer.decode(line, False) for line in lines)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from text.split("\n")


def _package() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise DataError(
            "sub-words need the package tokenizers, which is not installed: "
            "pip install 'lit-probattn[subwords]', or leave out subwords and tokenizer_file"
        ) from None
    return tokenizers
