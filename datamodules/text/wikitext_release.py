"""Where the files of WikiText lie: every form in which the corpus is passed on."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from datamodules.core.errors import DataError, MissingDataError
from datamodules.core.files import DAMAGED
from datamodules.text.source import ParquetText, PlainText, TextSource

__all__ = ["PUBLISHED", "Corpus", "find_release"]

Corpus = Literal["wikitext-103", "wikitext-2", "other"]

# Words and tokens, `<eos>` included, as published.
PUBLISHED: dict[str, dict[str, int]] = {
    "wikitext-103": {"words": 267735, "train": 103227021, "val": 217646, "test": 245569},
    "wikitext-2": {"words": 33278, "train": 2088628, "val": 217646, "test": 245569},
}

# Our name of a split -> its names in files.
_NAMES = {"train": ("train",), "val": ("valid", "validation"), "test": ("test",)}
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.parquet$")


def find_release(data_dir: Path, corpus: Corpus) -> dict[str, TextSource]:
    """Find the text of the splits train, val and test.

    Looked for in `data_dir` and its folders `<corpus>`, `<corpus>-v1` and `wikitext/<corpus>-v1`,
    in each one in this order: wiki.{train,valid,test}.tokens; {train,valid,test}.txt; the release's
    <corpus>-v1.zip; Parquet shards {train,validation,test}-*.parquet, or in folders of these names.

    Raises:
        MissingDataError: Nothing complete was found; the message says what is expected, and what
            is missing of what was found.
        DataError: An archive is damaged or another one; an archive or file is not usable.
    """
    incomplete: list[str] = []
    for folder in _folders(data_dir, corpus):
        for found in _forms(folder, corpus):
            if len(found) == len(_NAMES):
                return {name: found[name] for name in _NAMES}
            if found:
                have = ", ".join(source.name for source in found.values())
                lack = ", ".join(_NAMES[name][0] for name in _NAMES if name not in found)
                incomplete.append(f"found {have}, but no {lack} beside it")
    raise MissingDataError(_expected(data_dir, corpus, incomplete))


def _folders(data_dir: Path, corpus: Corpus) -> list[Path]:
    if corpus == "other":
        return [data_dir]
    names = ("", corpus, f"{corpus}-v1", f"wikitext/{corpus}-v1")
    return [data_dir / name for name in names]


def _forms(folder: Path, corpus: Corpus) -> Iterator[dict[str, TextSource]]:
    """Yield what there is of the splits, form by form."""
    yield _plain(folder, "wiki.{}.tokens")
    yield _plain(folder, "{}.txt")
    yield _archived(folder / f"{corpus}-v1.zip")
    yield _shards(folder)


def _plain(folder: Path, pattern: str) -> dict[str, TextSource]:
    paths = {name: folder / pattern.format(names[0]) for name, names in _NAMES.items()}
    return {name: PlainText((path,)) for name, path in paths.items() if path.is_file()}


def _archived(path: Path) -> dict[str, TextSource]:
    if not path.is_file():
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
    except DAMAGED as error:
        raise DataError(f"{path} is not a zip archive, or damaged: {error}") from None
    found: dict[str, TextSource] = {}
    for name, names in _NAMES.items():
        wanted = f"wiki.{names[0]}.tokens"
        member = next((m for m in members if m.rpartition("/")[2] == wanted), None)
        if member is None:
            shown = ", ".join(map(repr, members[:8]))
            raise DataError(
                f"{path} has no {wanted}; it has {shown}. Expected the word-level archive "
                f"{path.name}, not the raw one"
            )
        found[name] = PlainText((path,), member)
    return found


def _shards(folder: Path) -> dict[str, TextSource]:
    found: dict[str, TextSource] = {}
    for name, names in _NAMES.items():
        for spelling in names:
            patterns = (f"{spelling}-*.parquet", f"*-{spelling}-*.parquet", f"{spelling}/*.parquet")
            for pattern in patterns:
                paths = sorted(folder.glob(pattern))
                if paths and name not in found:
                    _require_all_shards(paths)
                    found[name] = ParquetText(tuple(paths))
    return found


def _require_all_shards(paths: list[Path]) -> None:
    numbers = [_SHARD.search(path.name) for path in paths]
    present = {int(match[1]) for match in numbers if match}
    totals = {int(match[2]) for match in numbers if match}
    if not totals:
        return
    if len(totals) > 1:
        raise DataError(f"{paths[0].parent}: shards of different sets: {[p.name for p in paths]}")
    missing = sorted(set(range(totals.pop())) - present)
    if missing:
        shown = ", ".join(f"{number:05d}" for number in missing)
        raise MissingDataError(
            f"{paths[0].parent}: beside {paths[0].name}, shard {shown} is missing"
        )


def _expected(data_dir: Path, corpus: Corpus, incomplete: list[str]) -> str:
    release = "wikitext-103" if corpus == "other" else corpus
    text = (
        f"no text of {corpus} in {data_dir}. Expected one of: wiki.train.tokens, "
        f"wiki.valid.tokens and wiki.test.tokens; train.txt, valid.txt and test.txt; "
        f"{release}-v1.zip; Parquet shards train-*.parquet, validation-*.parquet, test-*.parquet"
    )
    if corpus != "other":
        text += (
            f"; in {data_dir} or its folders {corpus}, {corpus}-v1 or wikitext/{corpus}-v1. "
            f"Source: WikiText (Merity et al., 2016), the word-level release; as the data set "
            f"Salesforce/wikitext, folder {corpus}-v1, on the Hugging Face hub. Nothing is "
            f"downloaded"
        )
    return "; ".join([text, *incomplete])
