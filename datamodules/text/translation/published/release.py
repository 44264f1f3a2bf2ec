"""Base of published translation data, located by the table of releases instead of a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from datamodules.core.files import Release, is_archive
from datamodules.text.translation.coder import Method
from datamodules.text.translation.data import Translation
from datamodules.text.translation.files import Lines, Pair, ParallelText
from lit_probattn.base.arguments import check_argument
from lit_probattn.base.errors import MissingDataError

_Language = Literal["de", "en"]


class PublishedTranslation(Translation):
    """A release of parallel text in `data_dir`; pairs with an empty side are dropped.

    Args:
        **kwargs: Arguments of Translation.
    """

    default_tokens: Method = "moses_bpe"
    sets: tuple[str, ...] = ("path", "empty_lines")
    release: Release

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(path="", empty_lines="drop", **kwargs)
        for name, language in zip(("source", "target"), self.languages, strict=True):
            check_argument(f"{name}_language", language, _Language)

    def text_of(self, files: dict[str, list[Path]]) -> ParallelText:
        """Return the text of the files of a layout."""
        raise NotImplementedError

    @property
    def published_counts(self) -> dict[str, int]:
        """Published numbers of pairs."""
        return dict(self.release.counts)

    def identity(self) -> dict[str, Any]:
        """Return the identity of the text."""
        return {"release": self.task}

    def place(self) -> Path:
        """Return the archive, or the folder to search."""
        found = self.release.find(self.data_dir)
        return found["archive"][0] if "archive" in found else self.data_dir

    def find(self, folder: Path) -> ParallelText:
        """Find the text in a folder or in an extracted archive."""
        if not is_archive(folder):
            return self.text_of(self.release.find(folder))
        found = self.release.files_in([folder])
        if found is None:
            raise MissingDataError(
                f"{self.title}: {folder.name} contains no text; expected {self.release.expected} "
                "in it"
            )
        return self.text_of(found)

    def pair(self, files: dict[str, list[Path]], *parts: str) -> Pair:
        """Return both languages of one or more parts, concatenated."""
        source, target = (
            Lines(tuple(path for part in parts for path in files[f"{part}.{language}"]))
            for language in self.languages
        )
        return Pair(source, target)
