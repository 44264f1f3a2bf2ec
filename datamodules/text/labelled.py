"""Texts with labels in a table of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

from datamodules.core.base import Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.errors import DataError, require_at_least, require_one_of
from datamodules.core.own import OwnSamples, Rows
from datamodules.core.sequences import TokenSplit, write_sequences
from datamodules.core.tables import TABLES, labels_of, read_table
from datamodules.text.choice import TokenChoice, Unit
from datamodules.text.tokens import Tokens

__all__ = ["LABEL_GUESSES", "TEXT_GUESSES", "LabelledTexts"]

# Usual names of columns, the likeliest first.
TEXT_GUESSES: tuple[str, ...] = (
    "text",
    "sentence",
    "review",
    "content",
    "document",
    "body",
    "message",
    "comment",
)
TEXT_GUESSES += ("tweet", "question", "utterance", "description", "title")
LABEL_GUESSES: tuple[str, ...] = (
    "label",
    "labels",
    "class",
    "target",
    "category",
    "sentiment",
    "intent",
    "topic",
)
LABEL_GUESSES += ("rating", "y")
_SHOWN = 70  # characters of a sample


class LabelledTexts(OwnSamples):
    """Texts and their class, from a CSV, TSV, JSON lines or Parquet file.

    Ids: 0 padding, then the tokens; a line of the text ends with `<eos>` (a newline where tokens
    are bytes or characters). The vocabulary is that of the training split. `classes` maps class
    numbers to labels.

    Args:
        text_column: Column of the texts. None takes the first usual name, and says which.
        label_column: Column of the labels, words or numbers. None likewise.
        tokens: What a token is: bytes, characters, words (as blanks separate them), or subwords
            (byte-level pair encoding; needs the package `tokenizers`).
        vocab_limit: Most tokens of the vocabulary, the most frequent ones; the number of sub-words.
        min_count: Words that are rarer in the training split become `<unk>`.
        max_length: Texts are cut off after so many tokens; the model's max_seq_len.
        **kwargs: Arguments of OwnSamples.
    """

    task = "own_texts"
    what = "texts"
    suffixes = TABLES
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
        self.text_column, self.label_column = text_column, label_column
        self._choice = TokenChoice(tokens, vocab_limit, min_count)
        self.max_seq_len = max_length
        self._vocabulary: Tokens | None = None

    @property
    def vocabulary(self) -> Tokens:
        """Tokens and their ids, which are one less than those of a batch."""
        if self._vocabulary is None:
            self._vocabulary = Tokens.from_text(self.facts["vocabulary"])
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding table: the vocabulary and the padding."""
        return len(self.vocabulary) + 1

    def settings(self) -> dict[str, Any]:
        """What decides the content of the cache."""
        columns = {"text_column": self.text_column, "label_column": self.label_column}
        return {**super().settings(), **columns, **self._choice.settings()}

    def must_name(self) -> dict[str, Any]:
        """The files, and what is not the default."""
        given = {"text_column": self.text_column, "label_column": self.label_column}
        named = {name: value for name, value in given.items() if value is not None}
        return {**super().must_name(), **named, **self._choice.settings()}

    def read(self, path: Path) -> Rows:
        """Read a table."""
        table = read_table(path)
        text = table.column(self.text_column, "text_column", TEXT_GUESSES)
        label = table.column(self.label_column, "label_column", LABEL_GUESSES)
        if text == label:
            raise DataError(f"text_column and label_column are both {text!r}; name two columns")
        notes = list(table.notes)
        if None in (self.text_column, self.label_column):
            notes.append(
                f"{path.name}: texts from column {text!r}, labels from {label!r}; text_column and "
                f"label_column name others"
            )
        texts = table.strings(text)
        places = [table.place(row) for row in range(len(texts))]
        return Rows(texts, labels_of(table, label), places, notes)

    def key(self, value: str) -> bytes:
        """Return the text itself, without the blanks around it."""
        return value.strip().encode("utf-8", "surrogatepass")

    def store(
        self, writer: CacheWriter, parts: dict[str, list[Any]], targets: dict[str, list[int]]
    ) -> dict[str, Any]:
        """Make the vocabulary of the training split, and tokenise."""
        lines = {name: [_lines(text) for text in texts] for name, texts in parts.items()}
        vocabulary = self._choice.make_from(lines["train"])
        unknown = {}
        for name, texts in lines.items():
            encoded = [vocabulary.encode(text) for text in texts]
            ids = [tokens for tokens, _ in encoded]
            unknown[name] = [sum(count for _, count in encoded), sum(map(len, ids))]
            write_sequences(writer, name, ids, map(len, ids), targets[name])
        return {"vocabulary": vocabulary.text, "unknown": unknown}

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits."""
        self.notes = list(self.facts["notes"])
        part = partial(TokenSplit.from_cache, cache, shift=1)
        return {name: part(name, self.max_seq_len) for name in ("train", "val", "test")}

    def decode(self, ids: Any) -> str:
        """Turn ids of a batch into text, without padding."""
        return self.vocabulary.decode([int(i) - 1 for i in ids if i > 0])

    def shown(self, name: str, index: int) -> str:
        """Return the beginning of a text, as the model sees it."""
        ids = self.splits[name][index].values[: 4 * _SHOWN]
        text = " ".join(self.decode(ids).split())
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"

    def size_lines(self) -> Iterator[str]:
        """Yield what a report says of the splits, and how much is unknown."""
        yield f"tokens: {self._choice.unit}, vocabulary {len(self.vocabulary)}"
        yield from super().size_lines()
        for name in self.splits:
            unknown, all_tokens = self.facts["unknown"][name]
            share = unknown / max(1, all_tokens)
            yield f"<unk> in {name}: {unknown} of {all_tokens} tokens ({100 * share:.2f} %)"


def _lines(text: str) -> str:
    """Return a text as whole lines, each ended by a newline."""
    return text.strip().replace("\r\n", "\n").replace("\r", "\n") + "\n"
