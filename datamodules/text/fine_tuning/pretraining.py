"""Text for pre-training an encoder: documents of plain text, divided into sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.base import SPLITS, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.division import Divided, divide
from datamodules.core.files import expand
from datamodules.core.own import AtPath, length_line, required_path
from datamodules.core.packing import PackedTraining
from datamodules.core.sequences import ragged_writer
from datamodules.text.fine_tuning.documents import SUFFIXES, Division, read_documents
from datamodules.text.fine_tuning.encoded import EncodedTexts
from datamodules.text.fine_tuning.sequences import DocumentSplit, MaskedCollate
from datamodules.text.source import text_files
from datamodules.text.tokens import Tokens
from lit_probattn.base.arguments import with_defaults
from lit_probattn.base.errors import DataError
from lit_probattn.base.progress import progress

_AT_ONCE = 4096  # documents per tokenisation call


@with_defaults(val_fraction=0.05, test_fraction=0.05)
class PretrainingText(AtPath, Divided, PackedTraining, EncodedTexts):
    """Documents of plain text for masked language models, with or without sentence pairs.

    The task masks tokens, with new masks in every epoch. Documents are split by a hash of their
    text. Other data can use the cache's tokeniser: set their `tokenizer` to its folder.

    Source: BERT (Devlin et al., 2019): 128 tokens first, then 512 (`max_length`), with the same
    position embedding for both (`max_positions`). For the sequences see `DocumentSplit`.

    Args:
        documents: Unit of a document: a `line`, the text between blank lines (`blank_line`), the
            text below an article's `heading` in WikiText, or a `file`.
        next_sentence: Whether sequences have two parts, the second possibly from another document.
        **kwargs: Arguments of AtPath (a UTF-8 text file, or a folder of them), Divided
            (split_seed also determines the pairs), PackedTraining (without pairs only),
            EncodedTexts and DataModule.

    Raises:
        DataError: A setting is out of range, or `pack` is set with `next_sentence`.
    """

    task = "pretraining_text"

    def __init__(
        self, *, documents: Division = "blank_line", next_sentence: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if self.pack and next_sentence:
            raise DataError(
                "pack: true requires next_sentence: false, received true: sentence pairs are "
                "classified one per row; set next_sentence to false here and in the task"
            )
        self.shares = {name: self.shares[name] for name in ("val", "test")}
        self.documents, self.next_sentence = documents, next_sentence

    def folder_of(self, path: str) -> Path | None:
        """Return None: the default cache folder does not depend on the path."""
        return None

    # ---- the cache ---------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """File or folder of the text."""
        return required_path(self.given_path)

    def sources(self) -> list[Path]:
        """Return the text files and the files of a given tokeniser."""
        return [*text_files(self.folder, SUFFIXES), *self.choice.files()]

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        return {
            "path": str(expand(self.given_path).resolve()) if self.given_path else "",
            "documents": self.documents,
            "shares": self.shares,
            "split_seed": self.split_seed,
            **self.choice.settings(),
        }

    def build(self, writer: CacheWriter) -> None:
        """Split the documents and tokenise their sentences."""
        documents = list(read_documents(text_files(self.folder, SUFFIXES), self.documents))
        if not documents:
            raise DataError(
                f"{self.folder}: no documents; a document is {_DIVISION[self.documents]}"
            )
        keys = ["\n".join(sentences).encode() for sentences in documents]
        splits = divide(f"{self.folder}: documents", keys, self.shares, self.split_seed)
        parts: dict[str, list[list[str]]] = {name: [] for name in SPLITS}
        for document, split in zip(documents, splits, strict=True):
            parts[split].append(document)
        train = parts["train"]
        tokeniser = self.choice.write(writer, lambda: (s for part in train for s in part))
        unknown = {
            name: _write_split(writer, name, part, tokeniser) for name, part in parts.items()
        }
        writer.add_facts({"unknown": unknown})

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits; raises DataError if one has too little text for a sequence."""
        settings = {
            "max_length": self.max_length,
            "tokeniser": self.tokeniser,
            "pairs": self.next_sentence,
            "seed": self.split_seed,
        }
        return {name: DocumentSplit.from_cache(cache, name, **settings) for name in SPLITS}

    # ---- sizes and batches -------------------------------------------------------------------

    @property
    def num_classes(self) -> int:
        """Number of rows of the embedding table: every token is a possible prediction."""
        return self.vocab_size

    @property
    def mask_token(self) -> int:
        """Id of the mask token."""
        return self.tokeniser.mask

    def row_budget(self) -> tuple[int, int, bool]:
        """Return tokens per packed row and rows per optimiser step; tokens are not counted."""
        return self.max_length, self.batch_size, False

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that collates a batch."""
        lengths = self.pad_multiple, self.max_length
        own = self.tokeniser
        special = (own.begin, own.separator, own.padding)
        typed = self.num_token_types == 2
        return MaskedCollate(self.pad_to, *lengths, own.padding, typed, special, self.next_sentence)

    def size_lines(self) -> Iterator[str]:
        """Yield lines about the splits."""
        unknown = self.cache.facts["unknown"]
        yield f"tokens: vocabulary {self.vocab_size}, {self.tokeniser.pairs} style"
        for name in SPLITS:
            split = self.split(name)
            documents, sentences, tokens = split.sizes
            pairs = f", {int(split.targets.sum())} with an unrelated second part"
            yield (
                f"{name}: {documents} documents, {sentences} sentences, {tokens} tokens "
                f"({unknown[name]} unknown), {len(split)} sequences"
                f"{pairs if self.next_sentence else ''}, {length_line(split.lengths)}"
            )


_DIVISION = {
    "line": "a line",
    "blank_line": "text between blank lines",
    "heading": "text below a heading `= Title =`",
    "file": "a file",
}


def _write_split(
    writer: CacheWriter, name: str, documents: list[list[str]], tokeniser: Tokens
) -> int:
    """Write the sentences of a split to a cache; return the number of unknown tokens."""
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
