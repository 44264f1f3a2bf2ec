"""Text to pre-train an encoder on: documents of plain text, cut into sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.base import Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.division import Divided, divide
from datamodules.core.files import expand
from datamodules.core.own import AtPath, length_line
from datamodules.core.sequences import ragged_writer
from datamodules.text.fine_tuning.documents import (
    DIVISIONS,
    Division,
    files_of,
    read_documents,
)
from datamodules.text.fine_tuning.encoded import EncodedTexts
from datamodules.text.fine_tuning.sequences import DocumentSplit, MaskedCollate
from datamodules.text.tokens import Tokens
from lit_probattn.base.arguments import with_defaults
from lit_probattn.base.errors import DataError, require_one_of
from lit_probattn.base.progress import progress

__all__ = ["PretrainingText"]

_SPLITS = ("train", "val", "test")
_AT_ONCE = 4096  # documents that are tokenised together


@with_defaults(val_fraction=0.05, test_fraction=0.05)
class PretrainingText(AtPath, Divided, EncodedTexts):
    """Documents of plain text for masked language models, with or without pairs of parts.

    Words are hidden by the task, anew in every epoch. Documents are divided by a hash of their
    text. The cache's tokeniser serves other data too: give its folder as their `tokenizer`.

    Source: BERT (Devlin et al., 2019): 128 tokens first, then 512 (`max_length`), one table of
    positions for both (`max_positions`). How sequences are made: see `DocumentSplit`.

    Args:
        documents: What a document is: a `line`, what stands between blank lines (`blank_line`),
            what stands under an article's `heading` in WikiText, or a `file`.
        next_sentence: Whether sequences have two parts, of which the second may be from elsewhere.
        **kwargs: Arguments of AtPath (a text file in UTF-8, or a folder of them), Divided
            (split_seed cuts pairs too), EncodedTexts and DataModule.
    """

    task = "pretraining_text"

    def __init__(
        self, *, documents: Division = "blank_line", next_sentence: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        require_one_of(DIVISIONS, documents=documents)
        self.shares = {name: self.shares[name] for name in ("val", "test")}
        self.documents, self.next_sentence = documents, next_sentence

    def folder_of(self, path: str) -> Path | None:
        """The path is that of the text alone."""
        return None

    # ---- the cache ---------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The file or folder of the text."""
        if not self.given_path:
            raise DataError("path must name a text file or a folder of them; none is downloaded")
        return expand(self.given_path)

    def sources(self) -> list[Path]:
        """The text files, and those of a given tokeniser."""
        return [*files_of(self.folder), *self.choice.files()]

    def must_name(self) -> dict[str, Any]:
        """What a command must give to find the cache again."""
        given = {"path": self.given_path or None, "documents": self.documents}
        named = {**given, "tokenizer": self.choice.file}
        return {name: value for name, value in named.items() if value is not None}

    def settings(self) -> dict[str, Any]:
        """What decides the content of the cache."""
        return {
            "path": str(expand(self.given_path).resolve()) if self.given_path else "",
            "documents": self.documents,
            "shares": self.shares,
            "split_seed": self.split_seed,
            **self.choice.settings(),
        }

    def build(self, writer: CacheWriter) -> None:
        """Divide the documents and tokenise their sentences."""
        documents = list(read_documents(files_of(self.folder), self.documents))
        if not documents:
            raise DataError(f"{self.folder}: no document, that is {_DIVISION[self.documents]}")
        keys = ["\n".join(sentences).encode() for sentences in documents]
        splits = divide(f"{self.folder}: its documents", keys, self.shares, self.split_seed)
        parts: dict[str, list[list[str]]] = {name: [] for name in _SPLITS}
        for document, split in zip(documents, splits, strict=True):
            parts[split].append(document)
        train = parts["train"]
        tokeniser = self.choice.write(writer, lambda: (s for part in train for s in part))
        unknown = {
            name: _write_split(writer, name, part, tokeniser) for name, part in parts.items()
        }
        writer.add_facts({"unknown": unknown})

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits; a DataError if one has too little text for a sequence."""
        settings = {
            "max_length": self.max_length,
            "tokeniser": self.tokeniser,
            "pairs": self.next_sentence,
            "seed": self.split_seed,
        }
        return {name: DocumentSplit.from_cache(cache, name, **settings) for name in _SPLITS}

    # ---- sizes and batches -------------------------------------------------------------------

    @property
    def num_classes(self) -> int:
        """Every token of the table is a possible prediction."""
        return self.vocab_size

    @property
    def mask_token(self) -> int:
        """Id of the mask token."""
        return self.tokeniser.mask

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that makes a batch."""
        lengths = self.pad_multiple, self.max_length
        own = self.tokeniser
        special = (own.begin, own.separator, own.padding)
        typed = self.num_token_types == 2
        return MaskedCollate(self.pad_to, *lengths, own.padding, typed, special, self.next_sentence)

    def size_lines(self) -> Iterator[str]:
        """Yield what a report says of the splits."""
        unknown = self.cache.facts["unknown"]
        yield f"tokens: vocabulary {self.vocab_size}, in the manner of {self.tokeniser.pairs}"
        for name in _SPLITS:
            split: Any = self.split(name)
            documents, sentences, tokens = split.sizes
            pairs = f", {int(split.targets.sum())} with a part from elsewhere"
            yield (
                f"{name}: {documents} documents, {sentences} sentences, {tokens} tokens "
                f"({unknown[name]} unknown), {len(split)} sequences"
                f"{pairs if self.next_sentence else ''}, {length_line(split.lengths)}"
            )


_DIVISION = {
    "line": "a line",
    "blank_line": "what stands between blank lines",
    "heading": "what stands under a heading `= Title =`",
    "file": "a file",
}


def _write_split(
    writer: CacheWriter, name: str, documents: list[list[str]], tokeniser: Tokens
) -> int:
    """Add the sentences of a split to a cache; return how many tokens are unknown."""
    ends, unknown = [0], 0
    with (
        progress(f"tokenising {name}", len(documents), "documents") as advance,
        ragged_writer(writer, name) as append,
    ):
        for start in range(0, len(documents), _AT_ONCE):
            some = documents[start : start + _AT_ONCE]
            encoded = iter(tokeniser.encode_lines([s for part in some for s in part]))
            for part in some:
                found = [ids for ids in (next(encoded) for _ in part) if ids]
                for ids in found:
                    append(ids)
                    unknown += ids.count(tokeniser.unknown)
                if found:
                    ends.append(ends[-1] + len(found))
            advance(len(some))
    writer.add(f"{name}_documents", np.array(ends, dtype=np.int64))
    return unknown
