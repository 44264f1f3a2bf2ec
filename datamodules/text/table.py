"""The user's tables with a text, or a pair of texts, and a label in each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from datamodules.core.base import Padded, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.own import OwnSamples, Rows, beginning
from datamodules.core.sequences import TokenSplit, as_targets, ragged_writer
from datamodules.core.tables import TABLES, Table, labels_in, read_table
from datamodules.text.choice import OwnTokens, TokenChoice
from datamodules.text.tokens import Tokens
from lit_probattn.base.arguments import Count
from lit_probattn.base.errors import DataError
from lit_probattn.base.progress import progress

# Usual column names, most likely first.
_TEXT_GUESSES = (
    *("text", "sentence", "review", "content", "document", "body", "message", "comment"),
    *("tweet", "question", "utterance", "description", "title"),
)
_LABEL_GUESSES = (
    *("label", "labels", "class", "target", "category", "sentiment", "intent", "topic"),
    *("rating", "y"),
)
_PAIR_GUESSES = (
    *(("sentence1", "sentence2"), ("text1", "text2"), ("premise", "hypothesis")),
    *(("question", "sentence"), ("question1", "question2"), ("first", "second")),
)
_SHOWN = 70  # characters per text
Texts = tuple[str | None, ...]  # of a row; None for a missing second text


class Encoded(NamedTuple):
    """The tokenised texts of a row.

    Args:
        second: Start of the second text; the length if there is none.
        counted: Number of unknown or truncated tokens, depending on the subclass.
    """

    ids: npt.ArrayLike
    second: int
    counted: int


class TextTable(OwnSamples):
    """Rows of one or two texts and a label, as token sequences.

    A single text is a pair without a second text. A subclass sets `columns`, the value of each
    setting that names a column (one or two texts, then the label), and `choice`, and implements
    `encoded`.
    """

    what = "texts"
    suffixes: tuple[str, ...] = TABLES
    columns: dict[str, str | None]
    choice: TokenChoice

    def encoded(self, tokens: Tokens, texts: Texts) -> Encoded:
        """Return the token sequence of a row."""
        raise NotImplementedError

    # ---- reading -----------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        return {**super().settings(), **self.columns, **self.choice.settings()}

    def sources(self) -> list[Path]:
        """Return the files without duplicates, including the files of given tokens."""
        return list(dict.fromkeys([*super().sources(), *self.choice.files()]))

    def read(self, path: Path, labelled: bool = True, train: Rows | None = None) -> Rows:
        """Read a table."""
        table = read_table(path, 2 if labelled else 1)
        given = table.like(self.columns, {} if train is None else train.columns)
        texts = _texts_of(table, given)
        label, labels = labels_in(table, given["label_column"], _LABEL_GUESSES, labelled)
        columns = {**texts, **({"label_column": label} if label else {})}
        _require_different(columns)
        notes = list(table.notes)
        if None in (next(iter(self.columns.values())), self.columns["label_column"]):
            listed = f"column{'s' if len(texts) > 1 else ''} "
            listed += " and ".join(map(repr, texts.values()))
            source = f"labels from {label!r}" if labels else "no labels"
            notes.append(
                f"{path.name}: texts from {listed}, {source}; "
                f"{', '.join(self.columns)} select others"
            )
        values: list[Any] = [table.strings(name) for name in texts.values()]
        values += [[None] * len(table.locations)] * (len(self.columns) - 1 - len(texts))
        locations = [table.location(row) for row in range(len(table.locations))]
        return Rows(list(zip(*values, strict=True)), labels, locations, notes, columns=columns)

    def aligned(self, rows: Rows, train: Rows, path: Path) -> Rows:
        """Return the rows; raises DataError unless they have as many texts as those of training."""
        found, expected = (
            len(part.values[0]) - part.values[0].count(None) for part in (rows, train)
        )
        if found != expected:
            raise DataError(
                f"{path}: {found} text{'s' if found > 1 else ''} in each row, but the file of "
                f"training has {expected}; name the columns of the texts as in that file"
            )
        return rows

    def key(self, value: Texts) -> bytes:
        """Return the stripped texts as bytes."""
        parts = [(text or "").strip() for text in value]
        return "\x1f".join(parts).encode("utf-8", "surrogatepass")

    # ---- the cache ---------------------------------------------------------------------------

    def store(
        self, writer: CacheWriter, parts: dict[str, list[Any]], targets: dict[str, list[int]]
    ) -> dict[str, Any]:
        """Write the sequences, with given tokens or tokens learned from the training split."""

        def texts() -> Iterator[str]:
            for row in parts["train"]:
                yield from (self.cleaned(text) for text in row if text is not None)

        tokens = self.choice.write(writer, texts)
        counts = {
            name: self._write(writer, name, part, targets[name], tokens)
            for name, part in parts.items()
        }
        return {"counts": counts}

    def store_new(
        self, writer: CacheWriter, name: str, values: list[Any], targets: list[int]
    ) -> dict[str, Any]:
        """Write the sequences of new texts, with the tokens of the training data."""
        tokens = TokenChoice.read(self.cache)
        return {"counts": {name: self._write(writer, name, values, targets, tokens)}}

    def cleaned(self, text: str) -> str:
        """Return a text as it is tokenised."""
        return text

    def _write(
        self,
        writer: CacheWriter,
        name: str,
        part: list[Texts],
        targets: list[int],
        tokens: Tokens,
    ) -> int:
        """Write the sequences of a split to a cache; return the sum of `counted`."""
        seconds: list[int] = []
        count = 0
        with (
            progress(f"tokens of {name}", len(part), "texts") as advance,
            ragged_writer(writer, name) as append,
        ):
            for texts in part:
                advance(1)
                found = self.encoded(tokens, texts)
                append(found.ids)
                seconds.append(found.second)
                count += found.counted
        if len(self.columns) > 2:
            writer.add(f"{name}_seconds", np.array(seconds, dtype=np.int32))
        writer.add(f"{name}_targets", as_targets(targets))
        return count

    # ---- texts -------------------------------------------------------------------------------

    def decode(self, ids: Any) -> str:
        """Convert the ids of a batch to text."""
        raise NotImplementedError

    def shown(self, name: str, index: int) -> str:
        """Return the beginnings of the texts of a sample, decoded from its ids."""
        sample = self.split(name)[index]
        second = getattr(sample, "second", len(sample.values))
        parts = (sample.values[:second], sample.values[second:])
        return " | ".join(beginning(self.decode(ids), _SHOWN) for ids in parts if len(ids))


def _texts_of(table: Table, given: Mapping[str, str | None]) -> dict[str, str]:
    """Return the column of each text, as given or by usual names, by setting."""
    texts = [setting for setting in given if setting != "label_column"]
    found: dict[str, str] = {}
    if len(texts) > 1 and not any(given[setting] for setting in texts):
        lower = {name.strip().lower(): name for name in table.columns}
        pairs = (pair for pair in _PAIR_GUESSES if set(pair) <= lower.keys())
        found = {s: lower[name] for s, name in zip(texts, next(pairs, ()), strict=False)}
    if not found:
        found[texts[0]] = table.column(given[texts[0]], texts[0], _TEXT_GUESSES)
        for setting in texts[1:]:
            if given[setting] is not None:
                found[setting] = table.column(given[setting], setting, ())
    return found


def _require_different(columns: dict[str, str]) -> None:
    """Raise a DataError if two settings select the same column."""
    for name in columns.values():
        settings = [setting for setting, column in columns.items() if column == name]
        if len(settings) > 1:
            raise DataError(
                f"{' and '.join(settings)} are both {name!r}; set two different columns"
            )


class LabelledTexts(OwnTokens, Padded, TextTable):
    """Texts and their class, from a CSV, TSV, JSON lines or Parquet file.

    Ids: 0 padding, then the tokens; a line of the text ends with `<eos>` (a newline if tokens
    are bytes or characters). The vocabulary is learned from the training split. `classes` maps
    class numbers to labels.

    Args:
        text_column: Column of the texts. Default: the first usual name, which is reported.
        label_column: Column of the labels, words or numbers. Default: the first usual name, which
            is reported.
        max_length: Longer texts are truncated to this number of tokens; the model's max_seq_len.
        **kwargs: Arguments of OwnTokens, Padded and OwnSamples.
    """

    task = "own_texts"
    max_seq_len: int

    def __init__(
        self,
        *,
        text_column: str | None = None,
        label_column: str | None = None,
        max_length: Count = 1024,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.columns = {"text_column": text_column, "label_column": label_column}
        self.max_seq_len = max_length

    @cached_property
    def vocabulary(self) -> Tokens:
        """Tokens and their ids, which are one less than the ids in a batch."""
        return TokenChoice.read(self.cache)

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding table: the vocabulary and the padding."""
        return len(self.vocabulary) + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the class map and the digest of the vocabulary, for checkpoints."""
        return {**super().state_dict(), "vocabulary": self.vocabulary.digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise a DataError if a checkpoint has other classes or another vocabulary."""
        super().load_state_dict(state_dict)
        if state_dict.get("vocabulary") != self.vocabulary.digest:
            raise DataError(
                f"the checkpoint was trained with another vocabulary of {self.choice.unit} than "
                f"that of {self.files['train']}, so ids would denote other tokens; use the files "
                "of its training, and set new_path to other texts"
            )

    def cleaned(self, text: str) -> str:
        """Return a text as whole lines, each ended by a newline."""
        return text.strip().replace("\r\n", "\n").replace("\r", "\n") + "\n"

    def encoded(self, tokens: Tokens, texts: Texts) -> Encoded:
        """Return the tokens of a text; unknown ones are counted."""
        ids, unknown = tokens.encode(self.cleaned(str(texts[0])))
        return Encoded(ids, len(ids), unknown)

    def open_split(self, cache: Cache, name: str) -> Split:
        """Open one split in a cache."""
        return TokenSplit.from_cache(cache, name, self.max_seq_len, shift=1)

    def decode(self, ids: Any) -> str:
        """Convert the ids of a batch to text without padding."""
        return self.vocabulary.decode([int(i) - 1 for i in ids if i > 0])

    def size_lines(self) -> Iterator[str]:
        """Yield lines about the splits, and the share of unknown tokens."""
        yield f"tokens: {self.choice.unit}, vocabulary {len(self.vocabulary)}"
        yield from super().size_lines()
        for name, unknown in {**self.facts["counts"], **self.new_facts.get("counts", {})}.items():
            total = int(self.splits[name].lengths.sum())
            share = 100 * unknown / max(1, total)
            yield f"<unk> in {name}: {unknown} of {total} tokens ({share:.2f} %)"
