"""Tokens of encoders in the manner of BERT: which tokeniser, and running text in its tokens."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

import numpy as np
import numpy.typing as npt

from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.errors import DataError, require_at_least, require_one_of
from datamodules.core.files import expand
from datamodules.text.pretrained_tokeniser import Kind, PretrainedTokeniser
from datamodules.text.vocabulary import Tokens, VocabularyChoice

__all__ = ["Kind", "PretrainedChoice", "PretrainedPieces", "TokeniserChoice", "as_bytes"]

# Files of a tokeniser: those that may be read, and those that go with them.
_READ = ("tokenizer.json", "vocab.txt", "vocab.json")
_BESIDE = ("merges.txt", "tokenizer_config.json")
_ARRAY = "tokeniser"


@dataclass(frozen=True)
class TokeniserChoice:
    """A tokeniser's files, or how one is made.

    Args:
        path: Folder or file of a pre-trained tokeniser, or a cache that one was made for. None
            makes one of the training texts.
        kind: What is made: WordPiece as BERT has it, or pairs of bytes as RoBERTa.
        limit: Most tokens of what is made.
        lower: Whether WordPiece drops case and accents.
    """

    path: str | None
    kind: Kind = "wordpiece"
    limit: int = 8000
    lower: bool = True

    def __post_init__(self) -> None:
        require_one_of(get_args(Kind), tokens=self.kind)
        require_at_least(5, vocab_limit=self.limit)
        usual = (("tokens", self.kind, "wordpiece"), ("vocab_limit", self.limit, 8000))
        for name, given, default in (*usual, ("lower", self.lower, True)):
            if self.path is not None and given != default:
                raise DataError(
                    f"{name} is for a tokeniser that is made, but tokenizer={self.path} is given; "
                    f"leave one of them out ({name} is {default!r} then)"
                )

    def given(self) -> PretrainedTokeniser:
        """Read a pre-trained tokeniser; a DataError if it is missing or not usable."""
        if (cached := self._cached()).is_file():
            return _made_of(_stored(cached))
        return PretrainedTokeniser.read(expand(str(self.path)))

    def settings(self) -> dict[str, Any]:
        """What decides the tokeniser; plain JSON values."""
        if self.path is not None:
            texts = self._given()
            return {"tokeniser": hashlib.sha256(json.dumps(texts).encode()).hexdigest()}
        return {"tokens": self.kind, "vocab_limit": self.limit, "lower": self.lower}

    def _given(self) -> dict[str, str]:
        """Return the files of a pre-trained tokeniser by name, the one that is read first."""
        if (cached := self._cached()).is_file():
            return _stored(cached)
        place = expand(str(self.path))
        PretrainedTokeniser.read(place)  # says what is wrong
        folder = place if place.is_dir() else place.parent
        chosen = [name for name in _READ if (folder / name).is_file()]
        names = [chosen[0] if place.is_dir() else place.name, *_BESIDE]
        there = [name for name in names if (folder / name).is_file()]
        return {name: (folder / name).read_text(encoding="utf-8") for name in there}

    def _cached(self) -> Path:
        """Return where the tokeniser is if `path` is a cache."""
        return expand(str(self.path)) / f"{_ARRAY}.npy"

    def write(self, writer: CacheWriter, texts: Callable[[], Iterable[str]]) -> PretrainedTokeniser:
        """Add the tokeniser to a cache, and return it.

        Args:
            texts: Returns the training texts.
        """
        if self.path is not None:
            files = self._given()
        else:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    PretrainedTokeniser.train(
                        texts(), Path(folder), self.limit, self.kind, lower_case=self.lower
                    )
                except DataError as error:  # which calls the setting by another name
                    raise DataError(str(error).replace("vocab_size", "vocab_limit")) from None
                found = {path.name: path.read_text("utf-8") for path in Path(folder).iterdir()}
            names = [name for name in (*_READ, *_BESIDE) if name in found]
            files = {name: found[name] for name in names}
        writer.add(_ARRAY, as_bytes(json.dumps(files)))
        return _made_of(files)

    def files(self) -> list[Path]:
        """Return the files that are read; none where the tokeniser is made."""
        if self.path is None:
            return []
        if (cached := self._cached()).is_file():
            return [cached]
        place = expand(self.path)
        folder = place if place.is_dir() else place.parent
        return [folder / name for name in self._given()]

    @staticmethod
    def digest(cache: Cache) -> str:
        """Return what tells the tokeniser of a cache from others."""
        return hashlib.sha256(cache.array(_ARRAY).tobytes()).hexdigest()

    @staticmethod
    def read(cache: Cache) -> PretrainedTokeniser:
        """Return the tokeniser of a cache."""
        return _made_of(json.loads(cache.array(_ARRAY).tobytes()))


def _stored(path: Path) -> dict[str, str]:
    """Return the files that a cache keeps."""
    files: dict[str, str] = json.loads(np.load(path).tobytes())
    return files


def _made_of(files: dict[str, str]) -> PretrainedTokeniser:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return PretrainedTokeniser.read(Path(folder) / next(iter(files)))


def as_bytes(text: str) -> npt.NDArray[np.uint8]:
    """Return text as an array of a cache."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)


# ---- running text ------------------------------------------------------------------------------


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
        """Read the tokeniser of a file, a folder or a cache; see `TokeniserChoice.given`."""
        return cls(TokeniserChoice(str(path)).given())

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
