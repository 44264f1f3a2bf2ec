"""WMT'14 English–German: the prepared release in pieces, or raw text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.core.errors import MissingDataError
from datamodules.core.files import not_found
from datamodules.core.report import compare_size
from datamodules.text.translation.coder import Method
from datamodules.text.translation.data import Translation
from datamodules.text.translation.files import Lines, Pair, Release, shown_name

__all__ = ["WMT14", "find_release"]

_TITLE = "WMT'14"
_TRAINING_PAIRS = 4_500_000
_ARCHIVE = "wmt16_en_de.tar.gz"
_PIECES = ".bpe.32000"
_PREPARED = {
    "train": f"train.tok.clean{_PIECES}",
    "val": f"newstest2013.tok{_PIECES}",
    "test": f"newstest2014.tok{_PIECES}",
}
_FOLDERS = ("", "wmt14", "wmt14_en_de", "wmt16_en_de", "wmt16_en_de_bpe32k")
# Raw text: each corpus by the first of its names that is there.
_CORPORA = (
    ("europarl-v7.de-en",),
    ("commoncrawl.de-en",),
    ("news-commentary-v12.de-en", "news-commentary-v9.de-en"),
)


class WMT14(Translation):
    """News and parliament in English and German; words of Moses, cut by joint BPE.

    Source: the preparations that fairseq's examples of WMT'14 and WMT'16 English–German use. The
    prepared release is taken as it is, with a joint dictionary of 32,768 ids counted in its
    training text. Raw text is normalised, cut into words (hyphens too), cut by 32,000 merges, and
    pairs of more than 250 pieces or a ratio above 1.5 are left out; newstest2013 is the validation
    and newstest2014 the test.
    Departs from the source: raw text as far as sacremoses does, in the order of merges of equal
    count, and in the validation, for which fairseq's script holds out training text.

    Files that are found: see `find_release`.

    Args:
        source_language: `en` or `de`.
        target_language: The other one.
        merges: Merges of pair encoding, for raw text.
        joint_dictionary: Whether both languages have one dictionary.
        dictionary_limit: Largest number of ids of a dictionary.
        max_ratio: See Translation; of raw text, counted in pieces.
        max_words: See Translation; of raw text, counted in pieces.
        **kwargs: Arguments of Translation.
    """

    task = "wmt14"
    title = _TITLE
    default_tokens: Method = "moses_bpe"
    cleaning_by_pieces = True

    def __init__(
        self,
        source_language: str = "en",
        target_language: str = "de",
        merges: int = 32000,
        joint_dictionary: bool = True,
        dictionary_limit: int | None = 32768,
        max_ratio: float | None = 1.5,
        max_words: int | None = 250,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path="",
            source_language=source_language,
            target_language=target_language,
            merges=merges,
            joint_dictionary=joint_dictionary,
            dictionary_limit=dictionary_limit,
            max_ratio=max_ratio,
            max_words=max_words,
            empty_lines="drop",
            **kwargs,
        )

    @property
    def published_counts(self) -> dict[str, int]:
        """Pairs of the two sets of news."""
        return {"val": 3000, "test": 3003}

    def compare_sizes(self) -> Iterator[tuple[str, bool]]:
        """Yield a line for each published number; that of training pairs is a round one."""
        found = len(self.split("train"))
        near = abs(found - _TRAINING_PAIRS) <= 0.02 * _TRAINING_PAIRS
        yield compare_size("pairs of train", "about 4.5 million", found, near)
        yield from super().compare_sizes()

    def identity(self) -> dict[str, Any]:
        """What names the text."""
        return {"release": self.task}

    def place(self) -> Path:
        """Return the archive, or a folder."""
        return find_release(self.data_dir)

    def wanted(self, name: str) -> bool:
        """Whether a file of the archive is needed."""
        known = [f"{stem}.{language}" for stem in _PREPARED.values() for language in self.languages]
        return name in (*known, _PIECES.removeprefix("."))

    def find(self, folder: Path) -> Release:
        """Find the text: pieces of the prepared release, or raw text."""
        places = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
        pieces = self._pairs_of(places, {split: (stem,) for split, stem in _PREPARED.items()})
        if pieces is not None:
            codes = next((p / "bpe.32000" for p in places if (p / "bpe.32000").is_file()), None)
            return Release(pieces, codes, cleaned=True)
        return self._raw(folder, places)

    def _pairs_of(
        self, places: Sequence[Path], names: Mapping[str, tuple[str, ...]]
    ) -> dict[str, Pair] | None:
        """Return the splits of which the file of the first is there; None if it is not."""
        splits: dict[str, Pair] = {}
        for split, stems in names.items():
            sides = [self._side(places, stems, language) for language in self.languages]
            if not splits and not any(sides):
                return None
            if not all(sides):
                have = next(iter(splits.values())).source.name if splits else ""
                have = have or next(side.name for side in sides if side)
                absent = self.languages[0 if not sides[0] else 1]
                raise MissingDataError(
                    f"{_TITLE}: found {have}, but no {' or '.join(stems)}.{absent}"
                )
            splits[split] = Pair(*(side for side in sides if side))
        return splits

    def _side(self, places: Sequence[Path], stems: Sequence[str], language: str) -> Lines | None:
        """Find one language of a split, as plain text or as SGML."""
        role = "src" if language == self.source_language else "ref"
        for stem in stems:
            year = stem.rpartition("newstest")[2]
            names = {
                f"{stem}.{language}": "plain",
                f"{stem}-{role}.{language}.sgm": "segments",
                f"{stem}-deen-{role}.{language}.sgm": "segments",
            }
            for name, form in names.items() if year else [(f"{stem}.{language}", "plain")]:
                for place in places:
                    if (place / name).is_file():
                        return Lines((place / name,), form)  # type: ignore[arg-type]
        return None

    def _raw(self, folder: Path, places: Sequence[Path]) -> Release:
        news = {"val": ("newstest2013",), "test": ("newstest2014",)}
        train = self._pairs_of([folder], {"train": ("train",)})
        if train is None:
            corpora = [self._pairs_of(places, {"train": names}) for names in _CORPORA]
            if None in corpora:
                absent = _CORPORA[corpora.index(None)][0]
                raise MissingDataError(
                    f"{shown_name(folder)}: raw text of {_TITLE} has no {absent}.en and .de; "
                    f"expected it, or train.en and train.de"
                )
            pairs = [corpus["train"] for corpus in corpora if corpus]
            source, target = (
                Lines(tuple(path for pair in pairs for path in getattr(pair, side).paths))
                for side in ("source", "target")
            )
            train = {"train": Pair(source, target)}
        tests = self._pairs_of(places, news)
        if tests is None:
            raise MissingDataError(
                f"{_TITLE}: found {train['train'].source.name}, but no newstest2013 and "
                f"newstest2014 beside it (plain text or .sgm)"
            )
        return Release({**train, **tests}, normalise=True, aggressive=True)


def find_release(data_dir: Path) -> Path:
    """Return the release: an archive or a folder.

    Looked for in `data_dir` and its folders `wmt14`, `wmt14_en_de`, `wmt16_en_de` and
    `wmt16_en_de_bpe32k`, in this order: `wmt16_en_de.tar.gz`; its files
    `train.tok.clean.bpe.32000.{en,de}` and `newstest{2013,2014}.tok.bpe.32000.{en,de}`, with the
    codes `bpe.32000`; raw text, the corpora of WMT'14 (`europarl-v7.de-en.{en,de}`, `commoncrawl`,
    `news-commentary-v12` or `-v9`, in any folder) or `train.{en,de}`, with newstest2013 and
    newstest2014 as plain text or SGML.

    Raises:
        MissingDataError: There is none.
    """
    for folder in (data_dir / name for name in _FOLDERS):
        if (folder / _ARCHIVE).is_file():
            return folder / _ARCHIVE
        if any(folder.glob(f"{_PREPARED['train']}.*")):
            return folder
    for folder in (data_dir / name for name in _FOLDERS):
        news = any(folder.glob("newstest2014*")) or any(folder.glob("*/newstest2014*"))
        if news and (
            any(folder.glob("train.en"))
            or any(folder.glob(f"{_CORPORA[0][0]}.*"))
            or any(folder.glob(f"*/{_CORPORA[0][0]}.*"))
        ):
            return folder
    raise not_found(
        _TITLE,
        "the release is",
        f"{_ARCHIVE}, its files {_PREPARED['train']}.{{en,de}}, or raw text, in it or in its "
        f"folder wmt14",
        "Source: the prepared WMT'16 English–German data of fairseq's example scaling_nmt, or "
        "statmt.org/wmt14",
        "wmt14",
        data_dir,
    )
