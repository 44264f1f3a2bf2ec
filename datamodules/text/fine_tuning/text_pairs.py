"""Texts, or pairs of them, with labels, for an encoder that reads both as one sequence."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from datamodules.core.base import DataModule, Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.errors import DataError, require_one_of
from datamodules.core.files import expand, not_found
from datamodules.core.own import OwnFiles, OwnSamples, Rows
from datamodules.core.progress import progress
from datamodules.core.sequences import ragged_writer
from datamodules.core.tables import TABLES, labels_of, read_table
from datamodules.text.choice import Kind, TokenChoice
from datamodules.text.fine_tuning.batches import TextPairSplit
from datamodules.text.fine_tuning.encoded import EncodedTexts
from datamodules.text.fine_tuning.pairs import CORPORA, find_corpus, read_corpus
from datamodules.text.labelled import LABEL_GUESSES, TEXT_GUESSES
from datamodules.text.tokens import Tokens

__all__ = ["TextPairs"]

CorpusChoice = Literal["own", "mnli", "sst2", "qnli"]
# Usual names of columns of pairs, the likeliest first.
_PAIR_GUESSES = (
    *(("sentence1", "sentence2"), ("text1", "text2"), ("premise", "hypothesis")),
    *(("question", "sentence"), ("question1", "question2"), ("first", "second")),
)
_SHOWN = 70  # characters of a sample
_Texts = tuple[str, str | None]


class TextPairs(EncodedTexts, OwnSamples):
    """MultiNLI, SST-2, QNLI, or a table of the user's own with one or two columns of text.

    A pair is one sequence, in the manner of the tokeniser. What is too long loses tokens at the end
    of its longer text. Examples of MultiNLI without a label (`-`) are left out. Its validation
    split is the matched one, its test split the mismatched one; the labels of the other corpora's
    test sets are not published, so their test split is that of validation.

    Args:
        path: Folder of a corpus, by default that of its name in data_dir; or a table of one's own:
            a CSV, TSV, JSON lines or Parquet file, or a folder with one for each split.
        corpus: Which corpus, or `own`.
        first_column: Column of the first text, of `own`. None takes the first usual name.
        second_column: Column of the second text. None takes that of a usual pair of names, if
            first_column is None too; otherwise there is none.
        label_column: Column of the labels. None takes the first usual name.
        tokenizer: Folder or file of the tokeniser of pre-trained weights, or the cache of data of
            this kind that one was made for. None makes one of the training texts.
        tokens: What is made: `wordpiece`, or `bpe` of bytes.
        vocab_limit: Most tokens of what is made.
        lower: Whether WordPiece that is made drops case and accents.
        max_length: Tokens of a sequence.
        max_positions: Rows of the model's table of positions (max_seq_len), as pre-trained weights
            have them. None means max_length.
        vocab_size: Rows of the model's embedding table likewise. None means those of the tokeniser.
        bucket: Training batches are cut from so many sorted by length; 1 for no sorting.
        **kwargs: Arguments of OwnSamples; how splits are divided and compared is for `own`.
    """

    task = "text_pairs"
    what = "texts"
    suffixes: tuple[str, ...] = TABLES

    def __init__(
        self,
        path: str = "",
        corpus: CorpusChoice = "own",
        first_column: str | None = None,
        second_column: str | None = None,
        label_column: str | None = None,
        tokenizer: str | None = None,
        tokens: Kind = "wordpiece",
        vocab_limit: int = 8000,
        lower: bool = True,
        max_length: int = 128,
        max_positions: int | None = None,
        vocab_size: int | None = None,
        bucket: int = 50,
        **kwargs: Any,
    ) -> None:
        require_one_of(get_args(CorpusChoice), corpus=corpus)
        columns = {"first_column": first_column, "second_column": second_column}
        columns["label_column"] = label_column
        self.corpus: CorpusChoice = corpus
        self._asked = path
        if corpus == "own":
            super().__init__(path, **kwargs)
        else:
            _refuse_given(corpus, dict(columns))
            _refuse_given(corpus, kwargs)
            self.is_release = True
            if kwargs.get("data_dir") is None:
                kwargs["data_dir"] = str(expand(path)) if path else str(DataModule().data_dir)
            super().__init__(path, allow_overlap=True, **kwargs)
            self.select_on_test = "test" not in CORPORA[corpus].files[0]
        self._columns = columns
        choice = TokenChoice(tokens, vocab_limit, lower=lower, file=tokenizer)
        self.set_encoding(choice, max_length, max_positions, vocab_size, bucket)
        self._left_out: dict[Path, int] = {}
        if corpus != "own":
            self.published = {k: Published(n) for k, n in CORPORA[corpus].sizes.items()}

    # ---- files -------------------------------------------------------------------------------

    @cached_property
    def files(self) -> OwnFiles:
        """The file of each split; a MissingDataError says what a corpus lacks."""
        if self.corpus == "own":
            return super().files
        return OwnFiles(_files_of(self.corpus, self._asked, self.data_dir), {}, 0)

    def settings(self) -> dict[str, Any]:
        """What decides the content of the cache."""
        own = {"corpus": self.corpus, "max_length": self.max_length}
        return {**super().settings(), **own, **self._columns, **self.choice.settings()}

    def must_name(self) -> dict[str, Any]:
        """The files, and what is not the default."""
        given = {**self._columns, "tokenizer": self.choice.file, "max_length": self.max_length}
        named = {name: value for name, value in given.items() if value is not None}
        if self.corpus == "own":
            return {**super().must_name(), **named}
        return {"corpus": self.corpus, **({"path": self._asked} if self._asked else {}), **named}

    def sources(self) -> list[Path]:
        """The files, each once, and those of a given tokeniser."""
        return list(dict.fromkeys([*super().sources(), *self.choice.files()]))

    def read(self, path: Path) -> Rows:
        """Read a file."""
        if self.corpus != "own":
            found, left_out = read_corpus(self.corpus, path)
            self._left_out[path] = left_out
            values, labels, places = (list(column) for column in zip(*found, strict=True))
            return Rows(values, labels, places, notes=[])
        table = read_table(path)
        first, second = self._text_columns(table)
        label = table.column(self._columns["label_column"], "label_column", LABEL_GUESSES)
        if label in (first, second):
            raise DataError(f"label_column is {label!r}, a column of text too; name another")
        notes = list(table.notes)
        if None in (self._columns["first_column"], self._columns["label_column"]):
            texts = first if second is None else f"{first} and {second}"
            notes.append(
                f"{path.name}: texts from {texts}, labels from {label}; first_column, "
                f"second_column and label_column name others"
            )
        firsts = table.strings(first)
        seconds = [None] * len(firsts) if second is None else table.strings(second)
        places = [table.place(row) for row in range(len(firsts))]
        values = list(zip(firsts, seconds, strict=True))
        return Rows(values, labels_of(table, label), places, notes)

    def _text_columns(self, table: Any) -> tuple[str, str | None]:
        first, second = self._columns["first_column"], self._columns["second_column"]
        lower = {name.strip().lower(): name for name in table.columns}
        if first is None and second is None:
            for pair in _PAIR_GUESSES:
                if all(name in lower for name in pair):
                    return lower[pair[0]], lower[pair[1]]
        chosen = table.column(first, "first_column", TEXT_GUESSES)
        if second is None:
            return chosen, None
        other = table.column(second, "second_column", ())
        if other == chosen:
            raise DataError(f"first_column and second_column are both {chosen!r}; name two columns")
        return chosen, other

    def key(self, value: _Texts) -> bytes:
        """Return both texts, without the blanks around them."""
        parts = [(text or "").strip() for text in value]
        return "\x1f".join(parts).encode("utf-8", "surrogatepass")

    def ordered(self, labels: set[str]) -> list[str]:
        """Return labels by class number: a corpus' own order."""
        if self.corpus == "own":
            return super().ordered(labels)
        return list(CORPORA[self.corpus].labels)

    # ---- the cache ---------------------------------------------------------------------------

    def store(
        self, writer: CacheWriter, parts: dict[str, list[Any]], targets: dict[str, list[int]]
    ) -> dict[str, Any]:
        """Make the tokeniser, if none is given, and tokenise."""

        def texts() -> Iterator[str]:
            for pair in parts["train"]:
                yield from (text for text in pair if text is not None)

        tokeniser = self.choice.write(writer, texts)
        cut = {
            name: _write_split(writer, name, pairs, targets[name], tokeniser, self.max_length)
            for name, pairs in parts.items()
        }
        left_out = {path.name: count for path, count in self._left_out.items()}
        return {"cut": cut, "left_out": left_out}

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits."""
        facts = self.facts
        left_out = {name: count for name, count in facts["left_out"].items() if count}
        told = [f"{name}: {n} rows without a label (-) left out" for name, n in left_out.items()]
        self.notes = [*facts["notes"], *told]
        names = ("train", "val", "test")
        return {name: TextPairSplit.from_cache(cache, name, facts["cut"][name]) for name in names}

    # ---- texts -------------------------------------------------------------------------------

    def shown(self, name: str, index: int) -> str:
        """Return the beginnings of the texts of a sample, as the model sees them."""
        sample = self.split(name)[index]
        parts = [sample.values[: sample.second], sample.values[sample.second :]]
        texts = [" ".join(self.decode(part).split()) for part in parts if len(part)]
        return " | ".join(t if len(t) <= _SHOWN else f"{t[:_SHOWN]} …" for t in texts)


def _refuse_given(corpus: str, options: dict[str, Any]) -> None:
    """Take options of own tables out; a DataError for one that would have no effect."""
    names = ("first_column", "second_column", "label_column", "val_path", "test_path")
    usual = {**dict.fromkeys(names), "val_fraction": 0.1, "test_fraction": 0.1}
    usual |= {"split_seed": 0, "allow_overlap": False}
    for name, value in usual.items():
        if options.pop(name, value) != value:
            raise DataError(f"{name} is for corpus own, but corpus is {corpus}; leave it out")


def _files_of(corpus: Any, path: str, root: Path) -> dict[str, Path]:
    """Return the file of each split of a corpus; a MissingDataError says what is missing."""
    release = CORPORA[corpus]
    folder = expand(path) if path else root / release.folder
    found = find_corpus(corpus, folder)
    if found is None:
        names = ", ".join(release.files[0].values())
        raise not_found(
            release.title,
            "the corpus",
            f"{names} in {folder}",
            release.origin,
            f"text_pairs --corpus {corpus}{f' --path {path}' if path else ''}",
            folder if path else root,
        )
    return {"test": found["val"], **found}


def _write_split(
    writer: CacheWriter,
    name: str,
    pairs: list[_Texts],
    targets: list[int],
    tokeniser: Tokens,
    max_length: int,
) -> int:
    """Add the sequences of a split to a cache; return how many lost tokens."""
    seconds: list[int] = []
    num_cut = 0
    with (
        progress(f"tokens of {name}", len(pairs), "texts") as advance,
        ragged_writer(writer, name) as append,
    ):
        for first_text, second_text in pairs:
            advance(1)
            first = tokeniser.encode_plain(first_text)[0]
            second = None if second_text is None else tokeniser.encode_plain(second_text)[0]
            room = max_length - tokeniser.num_special(pair=second is not None)
            before = len(first) + len(second or ())
            first, second = _shortened(first, second, room)
            num_cut += len(first) + len(second or ()) < before
            values, _ = tokeniser.join(first, second)
            append(values)
            seconds.append(len(values) - len(second) - 1 if second is not None else len(values))
    writer.add(f"{name}_seconds", np.array(seconds, dtype=np.int32))
    writer.add(f"{name}_targets", np.array(targets, dtype=np.uint16))
    return num_cut


def _shortened(
    first: list[int], second: list[int] | None, room: int
) -> tuple[list[int], list[int] | None]:
    """Take tokens off the end of the longer text, one at a time, until both fit."""
    if room < 1:
        raise DataError("max_length leaves no room for a text beside special tokens; raise it")
    if second is None:
        return first[:room], None
    kept, other = len(first), len(second)
    while kept + other > room:
        if kept > other:
            kept -= 1
        else:
            other -= 1
    return first[:kept], second[:other]
