"""Tokenisation settings: tokens read from a file or learned from the training text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np

from datamodules.core.base import DataModule
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.files import expand
from datamodules.text import learn
from datamodules.text.source import TextSource
from datamodules.text.token_files import files_of_encoder, read_encoder, read_subwords, read_words
from datamodules.text.tokens import Tokens
from lit_probattn.base.arguments import Count, OnlyWith, Range, check_argument
from lit_probattn.base.errors import DataError
from lit_probattn.base.progress import progress

Unit = Literal["bytes", "characters", "words", "subwords"]
Kind = Literal["wordpiece", "bpe"]
LEARNED = ("characters", "words", "subwords")  # units whose number can be limited
VocabLimit = Annotated[int, Range(3)]
_ARRAY = "tokeniser"
_READ: dict[str, Callable[[Path], Tokens]] = {
    "words": read_words,
    "subwords": read_subwords,
}


@dataclass(frozen=True)
class TokenChoice:
    """Type and number of tokens.

    Args:
        unit: Bytes, characters, words (separated by whitespace, case kept), subwords (byte-level
            BPE with an end-of-line token), or for encoders wordpiece (BERT) or bpe (RoBERTa).
        limit: Maximum number of tokens, most frequent first; None keeps every word.
        min_count: Words with a lower count in the training text are `<unk>`; None keeps every word,
            and has `<unk>` only if the text contains it.
        lower: Whether WordPiece removes case and accents.
        file: File or folder with a tokeniser, or a cache that contains one.
    """

    unit: Unit | Kind
    limit: int | None = 8000
    min_count: int | None = 2
    lower: bool = True
    file: str | None = None

    def __post_init__(self) -> None:
        check_argument("tokens", self.unit, Unit | Kind)
        if self.unit in get_args(Kind) and self.file is not None:
            usual = (("tokens", self.unit, "wordpiece"), ("vocab_limit", self.limit, 8000))
            for name, given, default in (*usual, ("lower", self.lower, True)):
                if given != default:
                    raise DataError(
                        f"{name} applies to learned tokenisers, but tokenizer={self.file} is set; "
                        f"unset one of them ({name} defaults to {default!r})"
                    )

    @property
    def by_subwords(self) -> bool:
        """Whether tokens are sub-words."""
        return self.unit not in ("words", "bytes", "characters")

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the tokens; for a file its content, not its path."""
        if self.file is not None:
            return {"tokeniser": self.given.digest}
        found = {"tokens": self.unit, "vocab_limit": self.limit, "min_count": self.min_count}
        found["lower"] = self.lower
        needed = {"words": 3, "bytes": 1}.get(self.unit, 2)
        names = [*found][:needed] + (["lower"] if self.unit == "wordpiece" else [])
        return {name: found[name] for name in names}

    def files(self) -> list[Path]:
        """Return the files from which the tokens are read; none if they are learned."""
        if self.file is None:
            return []
        if self._is_cache:
            return [self._cached]
        return [self._path] if self.unit in _READ else files_of_encoder(self._path)

    @property
    def _path(self) -> Path:
        return expand(str(self.file))

    @property
    def _cached(self) -> Path:
        return self._path / f"{_ARRAY}.npy"

    @property
    def _is_cache(self) -> bool:
        return self.unit in get_args(Kind) and self._cached.is_file()

    @cached_property
    def given(self) -> Tokens:
        """The tokens read from the file."""
        if self._is_cache:
            found = Tokens.from_text(np.load(self._cached).tobytes().decode())
            if "mask" not in found.special:
                raise DataError(
                    f"{self._path}: this cache has tokens of running text, without the special "
                    "tokens of an encoder; set tokenizer to a cache of text_pairs, "
                    "question_answering or pretraining_text"
                )
            return found
        return _READ.get(self.unit, read_encoder)(self._path)

    def make(self, train: TextSource) -> Tokens:
        """Return the tokens, read from the file or learned from the training text."""
        if self.file is not None:
            return self.given
        with progress(f"counting {self.unit}", train.size, train.unit) as advance:
            return self.make_from(_texts_of(train, advance))

    def make_from(self, texts: Iterable[str]) -> Tokens:
        """Return the tokens; `texts` are whole lines of the training text."""
        if self.file is not None:
            return self.given
        if self.unit == "bytes":
            return learn.as_bytes()
        if self.unit == "words":
            known = self.min_count is not None
            return learn.learn_words(texts, self.limit, self.min_count or 1, known)
        limit = self.limit or 8000
        if self.unit == "characters":
            return learn.learn_characters(texts, limit)
        if self.unit == "subwords":
            return learn.learn_subwords(texts, limit)
        if self.unit == "bpe":
            return learn.learn_byte_pairs(texts, limit)
        return learn.learn_pieces(texts, limit, self.lower)

    # ---- caches ------------------------------------------------------------------------------

    def write(self, writer: CacheWriter, texts: Callable[[], Iterable[str]]) -> Tokens:
        """Write the tokens to a cache and return them."""
        return self.store(writer, self.make_from(texts()).text)

    @staticmethod
    def store(writer: CacheWriter, text: str) -> Tokens:
        """Write tokens, given as `text`, to a cache and return them."""
        writer.add_text(_ARRAY, text)
        return Tokens.from_text(text)

    @staticmethod
    def read(cache: Cache) -> Tokens:
        """Read the tokens of a cache."""
        return Tokens.from_text(cache.text(_ARRAY))


class OwnTokens(DataModule):
    """The user's texts, whose tokens are learned from the training split.

    Args:
        tokens: Type of tokens: bytes, characters, words (separated by whitespace), or subwords
            (byte-level pair encoding).
        vocab_limit: Maximum size of the vocabulary, most frequent tokens first; the number of
            sub-words.
        min_count: Words with a lower count in the training split become `<unk>`.
        **kwargs: Arguments of the parent class.
    """

    def __init__(
        self,
        *,
        tokens: Unit = "bytes",
        vocab_limit: Annotated[VocabLimit, OnlyWith(tokens=LEARNED)] = 8000,
        min_count: Annotated[Count, OnlyWith(tokens="words")] = 2,
        **kwargs: Any,
    ) -> None:
        self.choice = TokenChoice(tokens, vocab_limit, min_count)
        super().__init__(**kwargs)


def of_running_text(
    vocab_file: str | None = None,
    subwords: int | None = None,
    tokenizer_file: str | None = None,
    tokenizer: str | None = None,
) -> TokenChoice:
    """Return the choice for at most one of four settings; default: all words."""
    given = {"vocab_file": vocab_file, "subwords": subwords, "tokenizer_file": tokenizer_file}
    given["tokenizer"] = tokenizer
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise DataError(f"{' and '.join(chosen)} are set: expected at most one vocabulary")
    if tokenizer is not None:
        return TokenChoice("wordpiece", file=tokenizer)
    if subwords is not None or tokenizer_file is not None:
        return TokenChoice("subwords", subwords, file=tokenizer_file)
    return TokenChoice("words", None, None, file=vocab_file)


def _texts_of(source: TextSource, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the blocks of a text; `advance` is called with the amount read."""
    position = 0
    for block in source.blocks():
        yield block.text
        advance(block.position - position)
        position = block.position
