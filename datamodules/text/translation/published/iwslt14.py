"""IWSLT'14 German–English, from its archive or prepared before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from datamodules.text import releases
from datamodules.text.translation.files import ParallelText, find_plain
from datamodules.text.translation.preparation import is_prepared
from datamodules.text.translation.published.release import PublishedTranslation
from lit_probattn.base.arguments import with_defaults

__all__ = ["IWSLT14"]

_HELD_OUT_EVERY = 23


@with_defaults(merges=10000, lower=True, max_ratio=1.5, max_words=175)
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
        **kwargs: Arguments of Translation.
    """

    task = "iwslt14"
    title = releases.IWSLT14.title
    release = releases.IWSLT14

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
