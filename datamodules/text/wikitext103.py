"""WikiText-103 and other text in its layout, for language models."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any, Literal

from datamodules.core.files import DAMAGED
from datamodules.text.choice import VocabLimit, of_running_text
from datamodules.text.releases import WIKITEXT
from datamodules.text.source import ParquetText, PlainText, TextSource
from datamodules.text.stream import TextStream
from lit_probattn.base.arguments import with_defaults
from lit_probattn.base.errors import DataError, MissingDataError

Corpus = Literal["wikitext-103", "wikitext-2", "other"]
_MEMBERS = {"train": "wiki.train.tokens", "val": "wiki.valid.tokens", "test": "wiki.test.tokens"}
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.parquet$")


@with_defaults(test_stride=1)
class WikiText103(TextStream):
    """Text as one stream of words per split, with `<eos>` at every line end.

    Source: MGK, ICML 2022, appendix A.1.2 and its code: unmodified words, none dropped,
    vocabulary by frequency, columns in training, sliding windows in evaluation.
    Departs from the source: evaluation segments come from one stream instead of ten columns,
    so that each token counts once and the result does not depend on the batch size.

    Supported files: see `datamodules.text.releases.WIKITEXT`.

    Args:
        corpus: Determines the folders to search and the published numbers to compare with;
            `other` is any text in `data_dir`, without a comparison.
        vocab_file: Use this vocabulary, one word per line in the order of the ids, including
            `<eos>`. Other words become `<unk>`. Default: built from the training text.
        subwords: Number of byte-level sub-words to learn from the training text, instead of words.
        tokenizer_file: Use the sub-words of this tokenizer.json, which must include `<eos>`.
        **kwargs: Arguments of TextStream; a `test_stride` of 1 is the sliding window of the papers.
    """

    task = "wikitext103"
    title = "WikiText"

    def __init__(
        self,
        *,
        corpus: Corpus = "wikitext-103",
        vocab_file: str | None = None,
        subwords: VocabLimit | None = None,
        tokenizer_file: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._named: dict[str, Any] = {"vocab_file": vocab_file, "subwords": subwords}
        self._named["tokenizer_file"] = tokenizer_file
        self.choice = of_running_text(**self._named)
        super().__init__(**kwargs)
        self.corpus = self.title = corpus

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        return {"corpus": self.corpus, **super().settings()}

    def find(self) -> dict[str, TextSource]:
        """Find the files of the release."""
        return find_release(self.data_dir, self.corpus)

    @property
    def published_counts(self) -> dict[str, int]:
        """Published counts of the corpus; empty for sub-words and other vocabularies."""
        published = {} if self.choice.by_subwords else dict(WIKITEXT[self.corpus].counts)
        if self.choice.file is not None:
            published.pop("words", None)
        return published


def find_release(data_dir: Path, corpus: Corpus) -> dict[str, TextSource]:
    """Find the text of the splits train, val and test.

    Raises:
        MissingDataError: No complete set of files, or a missing Parquet shard.
        DataError: An archive is corrupt or a different one; shards belong to different sets.
    """
    files = WIKITEXT[corpus].find(data_dir)
    if "archive" in files:
        return _archived(files["archive"][0])
    return {name: _source(paths) for name, paths in files.items()}


def _archived(path: Path) -> dict[str, TextSource]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
    except DAMAGED as error:
        raise DataError(f"{path} is not a zip archive or is corrupt: {error}") from None
    found: dict[str, TextSource] = {}
    for name, wanted in _MEMBERS.items():
        member = next((m for m in members if m.rpartition("/")[2] == wanted), None)
        if member is None:
            shown = ", ".join(map(repr, members[:8]))
            raise DataError(
                f"{path}: missing {wanted}; it contains {shown}. Expected the word-level archive "
                f"{path.name}, not the raw one"
            )
        found[name] = PlainText((path,), member)
    return found


def _source(paths: list[Path]) -> TextSource:
    if paths[0].suffix != ".parquet":
        return PlainText(tuple(paths))
    numbers = [_SHARD.search(path.name) for path in paths]
    present = {int(match[1]) for match in numbers if match}
    totals = {int(match[2]) for match in numbers if match}
    if len(totals) > 1:
        raise DataError(f"{paths[0].parent}: shards of different sets: {[p.name for p in paths]}")
    missing = sorted(set(range(max(totals, default=0))) - present)
    if missing:
        shown = ", ".join(f"{number:05d}" for number in missing)
        raise MissingDataError(
            f"{paths[0].parent}: found {paths[0].name}, but missing shard {shown}"
        )
    return ParquetText(tuple(paths))
