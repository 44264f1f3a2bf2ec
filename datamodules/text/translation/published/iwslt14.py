"""IWSLT'14 German–English, from its archive or prepared before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from datamodules.core.errors import MissingDataError
from datamodules.core.files import not_found
from datamodules.text.translation.coder import Method
from datamodules.text.translation.data import Translation
from datamodules.text.translation.files import Lines, Pair, Release, find_plain, shown_name
from datamodules.text.translation.preparation import is_prepared

__all__ = ["IWSLT14", "find_release"]

_ARCHIVE = "de-en.tgz"
_PREPARED = "iwslt14.tokenized.de-en"
_TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
_TITLE = "IWSLT'14"
_HELD_OUT_EVERY = 23


class IWSLT14(Translation):
    """Talks of TED in German and English; lower-cased words of Moses, cut by joint BPE.

    Source: the preparation script of fairseq for IWSLT'14, which MGK and FiSH use: tags taken off,
    Moses' words, pairs of 1 to 175 words with a ratio up to 1.5, lower case, every 23rd pair for
    validation, dev2010, dev2012 (TEDX) and tst2010 to tst2012 together for the test, 10,000 merges
    learned from both languages.
    Departs from the source: as far as sacremoses does, and in the order of merges of equal count.

    Files that are found: see `find_release`.

    Args:
        source_language: `de` or `en`.
        target_language: The other one.
        merges: Merges of pair encoding.
        lower: Whether words are lower-cased.
        max_ratio: See Translation.
        max_words: See Translation.
        **kwargs: Arguments of Translation.
    """

    task = "iwslt14"
    title = _TITLE
    default_tokens: Method = "moses_bpe"

    def __init__(
        self,
        source_language: str = "de",
        target_language: str = "en",
        merges: int = 10000,
        lower: bool = True,
        max_ratio: float | None = 1.5,
        max_words: int | None = 175,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path="",
            source_language=source_language,
            target_language=target_language,
            merges=merges,
            lower=lower,
            max_ratio=max_ratio,
            max_words=max_words,
            empty_lines="drop",
            **kwargs,
        )

    @property
    def published_counts(self) -> dict[str, int]:
        """Pairs by the script, as printed by those who ran it."""
        return {"train": 160239, "val": 7283, "test": 6750}

    def identity(self) -> dict[str, Any]:
        """What names the text."""
        return {"release": self.task}

    def place(self) -> Path:
        """Return the archive, or a folder."""
        return find_release(self.data_dir)

    def wanted(self, name: str) -> bool:
        """Whether a file of the archive is needed."""
        return name.startswith(("train.tags", "IWSLT14.TED"))

    def find(self, folder: Path) -> Release:
        """Find the text: files of the release, or text that was prepared before."""
        prepared = find_plain(_TITLE, folder, *self.languages)
        if prepared is not None:
            return replace(prepared, cleaned=is_prepared(prepared.splits["train"].source))
        places = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
        for place in places:
            if any(place.glob("train.tags.*")):
                splits = {name: self._pair(place, name) for name in ("train", "test")}
                return Release(splits, held_out_every=_HELD_OUT_EVERY)
        raise MissingDataError(f"{shown_name(folder)}: expected train.tags.de-en.de and .en in it")

    def _pair(self, folder: Path, split: str) -> Pair:
        names = ["train.tags.de-en.{}"]
        if split == "test":
            names = [f"IWSLT14.{part}.de-en.{{}}.xml" for part in _TESTS]
        sides = []
        for language in self.languages:
            paths = tuple(folder / name.format(language) for name in names)
            for path in paths:
                if not path.is_file():
                    raise MissingDataError(
                        f"{_TITLE}: {shown_name(path)} is missing; the release has "
                        f"train.tags.de-en.{{de,en}} and IWSLT14.*.de-en.{{de,en}}.xml side by side"
                    )
            sides.append(Lines(paths, "tags" if split == "train" else "segments"))
        return Pair(*sides)


def find_release(data_dir: Path) -> Path:
    """Return the release: an archive or a folder.

    Looked for in `data_dir` and its folder `iwslt14`, in this order: `de-en.tgz` as the workshop
    gives it, its folder `de-en/`, and the folder `iwslt14.tokenized.de-en/` that the preparation
    script of fairseq makes; also `data_dir` itself, with the files of one of them.

    Raises:
        MissingDataError: There is none.
    """
    for folder in (data_dir, data_dir / "iwslt14"):
        if (folder / _ARCHIVE).is_file():
            return folder / _ARCHIVE
        for place in (folder / "de-en", folder / _PREPARED, folder):
            if any(place.glob("train.tags.de-en.*")) or (
                any(place.glob("train.de")) and any(place.glob("train.en"))
            ):
                return place
    raise not_found(
        _TITLE,
        "the release is",
        f"{_ARCHIVE}, its folder de-en/, or {_PREPARED}/, in it or in its folder iwslt14",
        "Source: IWSLT 2014, the German–English archive of WIT3 (texts 2014-01)",
        "iwslt14",
        data_dir,
    )
