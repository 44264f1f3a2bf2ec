"""WMT'14 English–German: the prepared release in BPE pieces, or raw text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datamodules.core.report import compare_size
from datamodules.text.releases import WMT14_CORPORA, WMT14_PIECES, wmt14
from datamodules.text.translation.files import ParallelText
from datamodules.text.translation.published.release import PublishedTranslation
from lit_probattn.base.arguments import with_defaults

_TRAINING_PAIRS = 4_500_000


@with_defaults(
    source_language="en",
    target_language="de",
    merges=32000,
    joint_dictionary=True,
    dictionary_limit=32768,
    max_ratio=1.5,
    max_words=250,
)
class WMT14(PublishedTranslation):
    """News and parliament in English and German; Moses words, segmented by joint BPE.

    Source: the preparation scripts of fairseq's examples for WMT'14 and WMT'16 English–German. The
    prepared release is used unchanged, with a joint dictionary of 32,768 ids counted in its
    training text. Raw text is normalised, tokenised (hyphens included), segmented by 32,000 merges,
    and pairs of more than 250 pieces or with a ratio above 1.5 are dropped; newstest2013 is the
    validation split and newstest2014 the test split.
    Departs from the source: for raw text, wherever sacremoses does, in the order of merges of equal
    count, and in the validation split, for which fairseq's script holds out training text.

    Supported files: the prepared release of WMT'16 or its archive, or raw text, plain or
    SGML; see `datamodules.text.releases.wmt14`.

    Args:
        **kwargs: Arguments of Translation. `merges` applies to raw text, where `max_ratio` and
            `max_words` count pieces.
    """

    task = "wmt14"
    title = "WMT'14"
    cleaning_by_pieces = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.release = wmt14(self.source_language)

    def compare_sizes(self) -> Iterator[tuple[str, bool]]:
        """Yield a line for each published number; the number of training pairs is approximate."""
        found = len(self.split("train"))
        near = abs(found - _TRAINING_PAIRS) <= 0.02 * _TRAINING_PAIRS
        yield compare_size("pairs of train", "about 4.5 million", found, near)
        yield from super().compare_sizes()

    def wanted(self, name: str) -> bool:
        """Whether a file of the archive is needed."""
        return name.startswith(tuple(WMT14_PIECES.values())) or name == "bpe.32000"

    def text_of(self, files: dict[str, list[Path]]) -> ParallelText:
        """Return the pieces of the prepared release, or raw text."""
        if f"{WMT14_PIECES['train']}.en" in files:
            pieces = {split: self.pair(files, stem) for split, stem in WMT14_PIECES.items()}
            codes = next(iter(files.get("codes", [])), None)
            return ParallelText(pieces, codes, cleaned=True)
        corpora = ("train",) if "train.en" in files else WMT14_CORPORA
        splits = {"train": self.pair(files, *corpora)}
        splits["val"], splits["test"] = (
            self.pair(files, f"newstest{year}") for year in (2013, 2014)
        )
        return ParallelText(splits, normalise=True, aggressive=True)
