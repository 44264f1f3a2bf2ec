"""Texts with labels in a table of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, get_args

from datamodules.core.base import Split
from datamodules.core.cache import Cache
from datamodules.core.errors import require_at_least, require_one_of
from datamodules.core.sequences import TokenSplit
from datamodules.text.choice import TokenChoice, Unit
from datamodules.text.table import Encoded, Texts, TextTable
from datamodules.text.tokens import Tokens

__all__ = ["LabelledTexts"]


class LabelledTexts(TextTable):
    """Texts and their class, from a CSV, TSV, JSON lines or Parquet file.

    Ids: 0 padding, then the tokens; a line of the text ends with `<eos>` (a newline where tokens
    are bytes or characters). The vocabulary is that of the training split. `classes` maps class
    numbers to labels.

    Args:
        text_column: Column of the texts. None takes the first usual name, and says which.
        label_column: Column of the labels, words or numbers. None likewise.
        tokens: What a token is: bytes, characters, words (as blanks separate them), or subwords
            (byte-level pair encoding).
        vocab_limit: Most tokens of the vocabulary, the most frequent ones; the number of sub-words.
        min_count: Words that are rarer in the training split become `<unk>`.
        max_length: Texts are cut off after so many tokens; the model's max_seq_len.
        **kwargs: Arguments of OwnSamples.
    """

    task = "own_texts"
    max_seq_len: int

    def __init__(
        self,
        path: str = "",
        text_column: str | None = None,
        label_column: str | None = None,
        tokens: Unit = "bytes",
        vocab_limit: int = 8000,
        min_count: int = 2,
        max_length: int = 1024,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, **kwargs)
        require_at_least(1, max_length=max_length)
        require_one_of(get_args(Unit), tokens=tokens)
        self.columns = {"text_column": text_column, "label_column": label_column}
        self.choice = TokenChoice(tokens, vocab_limit, min_count)
        self.max_seq_len = max_length

    @cached_property
    def vocabulary(self) -> Tokens:
        """Tokens and their ids, which are one less than those of a batch."""
        return TokenChoice.read(self.cache)

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding table: the vocabulary and the padding."""
        return len(self.vocabulary) + 1

    def must_name(self) -> dict[str, Any]:
        """The files, and what is not the default."""
        named = {name: value for name, value in self.columns.items() if value is not None}
        return {**super().must_name(), **named, **self.choice.settings()}

    def cleaned(self, text: str) -> str:
        """Return a text as whole lines, each ended by a newline."""
        return text.strip().replace("\r\n", "\n").replace("\r", "\n") + "\n"

    def encoded(self, tokens: Tokens, texts: Texts) -> Encoded:
        """Return the tokens of a text; those that are unknown are counted."""
        ids, unknown = tokens.encode(self.cleaned(str(texts[0])))
        return Encoded(ids, len(ids), unknown)

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits."""
        self.notes = list(self.facts["notes"])
        part = partial(TokenSplit.from_cache, cache, shift=1)
        return {name: part(name, self.max_seq_len) for name in ("train", "val", "test")}

    def decode(self, ids: Any) -> str:
        """Turn ids of a batch into text, without padding."""
        return self.vocabulary.decode([int(i) - 1 for i in ids if i > 0])

    def size_lines(self) -> Iterator[str]:
        """Yield what a report says of the splits, and how much is unknown."""
        yield f"tokens: {self.choice.unit}, vocabulary {len(self.vocabulary)}"
        yield from super().size_lines()
        for name, unknown in self.facts["counts"].items():
            total = int(self.splits[name].lengths.sum())
            share = 100 * unknown / max(1, total)
            yield f"<unk> in {name}: {unknown} of {total} tokens ({share:.2f} %)"
