"""Running text in the tokens of a pre-trained encoder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from datamodules.core.files import expand
from datamodules.text.pretrained_tokeniser import PretrainedTokeniser
from datamodules.text.vocabulary import Tokens, VocabularyChoice

__all__ = ["PretrainedChoice", "PretrainedPieces"]


class PretrainedPieces(Tokens):
    """Tokens of a `PretrainedTokeniser`; the counterpart of `Vocabulary`.

    The separator ends a line: `[SEP]` or `</s>`.
    """

    what = "tokeniser"

    def __init__(self, tokeniser: PretrainedTokeniser) -> None:
        self.tokeniser = tokeniser
        self.end_of_line = tokeniser.separator

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read the tokeniser's files; a DataError if they are missing or not usable."""
        return cls(PretrainedTokeniser.read(path))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `text` gives."""
        return cls(PretrainedTokeniser.from_text(text))

    @property
    def text(self) -> str:
        """The stored tokeniser."""
        return self.tokeniser.text

    def __len__(self) -> int:
        return self.tokeniser.vocab_size

    def encode(self, text: str) -> tuple[npt.NDArray[np.int32], int]:
        """Turn lines into ids, and count the unknown."""
        lines = text.removesuffix("\n").split("\n")
        encoded = self.tokeniser.encode_lines(lines)
        ids = np.array([i for line in encoded for i in (*line, self.end_of_line)], dtype=np.int32)
        return ids, int((ids == self.tokeniser.unknown).sum())

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; a separator becomes a newline, other special tokens nothing."""
        lines: list[list[int]] = [[]]
        for token in ids:
            if token == self.end_of_line:
                lines.append([])
            else:
                lines[-1].append(token)
        return "\n".join(map(self.tokeniser.decode, lines))


@dataclass(frozen=True)
class PretrainedChoice(VocabularyChoice):
    """A pre-trained tokeniser in place of the other settings, of which none may be set."""

    tokenizer: str = ""

    @property
    def by_subwords(self) -> bool:
        """Whether tokens are sub-words: they are."""
        return True

    def given(self) -> Tokens:
        """Read the tokeniser."""
        return PretrainedPieces.from_file(expand(self.tokenizer))

    def read(self, text: str) -> Tokens:
        """Return the tokeniser of which `text` was stored."""
        return PretrainedPieces.from_text(text)
