"""Labelled texts or text pairs for an encoder that reads both texts as one sequence."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.base import Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.files import expand
from datamodules.core.own import Rows
from datamodules.text.fine_tuning.batches import TextPairSplit, shortened
from datamodules.text.fine_tuning.corpora import CORPORA, read_corpus
from datamodules.text.fine_tuning.encoded import EncodedTexts
from datamodules.text.releases import PAIRS
from datamodules.text.table import Encoded, Texts, TextTable
from datamodules.text.tokens import Tokens
from lit_probattn.base.arguments import changed_arguments
from lit_probattn.base.errors import DataError

CorpusChoice = Literal["own", "mnli", "sst2", "qnli"]
# Settings of user tables.
_OF_OWN = (
    *("first_column", "second_column", "label_column", "val_path", "test_path", "new_path"),
    *("val_fraction", "test_fraction", "split_seed", "allow_overlap"),
)


class TextPairs(EncodedTexts, TextTable):
    """MultiNLI, SST-2, QNLI, or a user table with one or two text columns.

    A pair is one sequence in the tokeniser's format. Sequences that are too long are truncated at
    the end of the longer text. Examples of MultiNLI without a label (`-`) are skipped. Its
    validation split is the matched one, its test split the mismatched one; since the labels of the
    other corpora's test sets are not published, their test split is the validation split.

    `path` is the folder of a corpus, by default its name in data_dir; or a user table: a CSV, TSV,
    JSON lines or Parquet file, or a folder with one for each split.

    Args:
        corpus: Name of the corpus, or `own`.
        first_column: With `own`, column of the first text. Default: the first usual name.
        second_column: Column of the second text. Default: from a usual pair of names if
            first_column is not set, otherwise no second text.
        label_column: Column of the labels. Default: the first usual name.
        **kwargs: Arguments of EncodedTexts and OwnSamples; those about splitting and overlap apply
            to `own`.
    """

    task = "text_pairs"

    def __init__(
        self,
        *,
        corpus: CorpusChoice = "own",
        first_column: str | None = None,
        second_column: str | None = None,
        label_column: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.columns = {"first_column": first_column, "second_column": second_column}
        self.columns["label_column"] = label_column
        self.corpus: CorpusChoice = corpus
        if corpus != "own":
            for name in changed_arguments(type(self), {**self.columns, **kwargs}):
                if name in _OF_OWN:
                    raise DataError(
                        f"{name} applies to corpus=own, received corpus={corpus}; remove it"
                    )
            self.is_release = kwargs["allow_overlap"] = True
            self.select_on_test = "test" not in PAIRS[corpus].counts
            self.published = {k: Published(n) for k, n in PAIRS[corpus].counts.items()}
        super().__init__(**kwargs)
        self._left_out: dict[Path, int] = {}

    # ---- files -------------------------------------------------------------------------------

    def folder_of(self, path: str) -> Path | None:
        """Return the folder of user tables, or of a corpus if `path` is set."""
        if self.corpus == "own":
            return super().folder_of(path)
        return expand(path) if path else None

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each split; a MissingDataError lists missing files of a corpus."""
        if self.corpus == "own":
            return super().files
        files = PAIRS[self.corpus].find_single(self.data_dir, self.given_path)
        return {"test": files["val"], **files}

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        return {**super().settings(), "corpus": self.corpus, "max_length": self.max_length}

    def read(self, path: Path, labelled: bool = True, train: Rows | None = None) -> Rows:
        """Read a file."""
        if self.corpus == "own":
            return super().read(path, labelled, train)
        rows, self._left_out[path] = read_corpus(CORPORA[self.corpus], path)
        return rows

    def ordered(self, labels: set[str]) -> list[str]:
        """Return labels by class number, in the order of the corpus."""
        return super().ordered(labels) if self.corpus == "own" else [*CORPORA[self.corpus].labels]

    # ---- the cache ---------------------------------------------------------------------------

    def encoded(self, tokens: Tokens, texts: Texts) -> Encoded:
        """Return a pair in the tokeniser's format; truncated ones are counted."""
        first, second = (None if x is None else tokens.encode_plain(x)[0] for x in texts)
        limit = self.max_length - tokens.num_special(pair=second is not None)
        if limit < 1:
            raise DataError("max_length leaves no tokens for text after special tokens; raise it")
        kept, other = shortened(first or [], second or [], limit)
        ids = tokens.join(kept, None if second is None else other)
        is_cut = len(first or ()) + len(second or ()) > limit
        return Encoded(ids, len(ids) if second is None else len(ids) - len(other) - 1, int(is_cut))

    def store(
        self, writer: CacheWriter, parts: dict[str, list[Any]], targets: dict[str, list[int]]
    ) -> dict[str, Any]:
        """Train the tokeniser, unless one is specified, and tokenise."""
        left_out = {path.name: count for path, count in self._left_out.items()}
        return {**super().store(writer, parts, targets), "left_out": left_out}

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits."""
        splits = super().splits_of(cache)
        left_out = {name: count for name, count in self.facts["left_out"].items() if count}
        self.notes += [
            f"{name}: rows without a label (-) skipped: {n}" for name, n in left_out.items()
        ]
        return splits

    def open_split(self, cache: Cache, name: str) -> Split:
        """Open one split in a cache."""
        seconds, num_cut = np.asarray(cache.array(f"{name}_seconds")), cache.facts["counts"][name]
        more = {"seconds": seconds, "num_cut": num_cut}
        return TextPairSplit.from_cache(cache, name, self.max_length, **more)
