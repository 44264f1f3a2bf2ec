"""IWSLT'14 German–English, from its archive or prepared before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from datamodules.text import releases
from datamodules.text.translation.files import ParallelText, find_plain
from datamodules.text.translation.preparation import is_prepared
from datamodules.text.translation.published.release import PublishedTranslation

__all__ = ["IWSLT14"]

_HELD_OUT_EVERY = 23


class IWSLT14(PublishedTranslation):
    """Talks of TED in German and English; lower-cased words of Moses, cut by joint BPE.

    Source: the preparation script of fairseq for IWSLT'14, which MGK and FiSH use: tags taken off,
    Moses' words, pairs of 1 to 175 words with a ratio up to 1.5, lower case, every 23rd pair for
    validation, dev2010, dev2012 (TEDX) and tst2010 to tst2012 together for the test, 10,000 merges
    learned from both languages.
    Departs from the source: as far as sacremoses does, and in the order of merges of equal count.

    Files that are found: the archive of the workshop, its folder, or what the preparation script of
    fairseq makes; see `datamodules.text.releases.IWSLT14`.

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
    title = releases.IWSLT14.title
    release = releases.IWSLT14

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
            source_language=source_language,
            target_language=target_language,
            merges=merges,
            lower=lower,
            max_ratio=max_ratio,
            max_words=max_words,
            **kwargs,
        )

    def wanted(self, name: str) -> bool:
        """Whether a file of the archive is needed."""
        return name.startswith((releases.IWSLT14_TRAIN, *releases.IWSLT14_TESTS))

    def text_of(self, files: dict[str, list[Path]]) -> ParallelText:
        """Return the text of the release, or text that was prepared before."""
        if "train.de" in files:
            folder = files["train.de"][0].parent
            prepared = find_plain(self.title, folder, *self.languages)
            assert prepared is not None
            return replace(prepared, cleaned=is_prepared(prepared.splits["train"].source))
        train = self.pair(files, releases.IWSLT14_TRAIN)
        test = self.pair(files, *releases.IWSLT14_TESTS)
        return ParallelText({"train": train, "test": test}, held_out_every=_HELD_OUT_EVERY)
