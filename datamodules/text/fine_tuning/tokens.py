"""Which tokeniser texts are read with: that of pre-trained weights, or one of the texts."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.errors import DataError, require_at_least, require_one_of
from datamodules.core.files import expand
from datamodules.text.pretrained_tokeniser import PretrainedTokeniser

__all__ = ["Kind", "TokeniserChoice", "as_bytes"]

Kind = Literal["wordpiece", "bpe"]

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

    def settings(self) -> dict[str, Any]:
        """What decides the tokeniser; plain JSON values."""
        if self.path is not None:
            texts = self._given()
            return {"tokeniser": hashlib.sha256(json.dumps(texts).encode()).hexdigest()}
        return {"tokens": self.kind, "vocab_limit": self.limit, "lower": self.lower}

    def _given(self) -> dict[str, str]:
        """Return the files of a pre-trained tokeniser by name, the one that is read first."""
        place = expand(str(self.path))
        if (place / f"{_ARRAY}.npy").is_file():
            made: dict[str, str] = json.loads(np.load(place / f"{_ARRAY}.npy").tobytes())
            return made
        PretrainedTokeniser.read(place)  # says what is wrong
        folder = place if place.is_dir() else place.parent
        chosen = [name for name in _READ if (folder / name).is_file()]
        names = [chosen[0] if place.is_dir() else place.name, *_BESIDE]
        there = [name for name in names if (folder / name).is_file()]
        return {name: (folder / name).read_text(encoding="utf-8") for name in there}

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
        place = expand(self.path)
        if (place / f"{_ARRAY}.npy").is_file():
            return [place / f"{_ARRAY}.npy"]
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


def _made_of(files: dict[str, str]) -> PretrainedTokeniser:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return PretrainedTokeniser.read(Path(folder) / next(iter(files)))


def as_bytes(text: str) -> npt.NDArray[np.uint8]:
    """Return text as an array of a cache."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
