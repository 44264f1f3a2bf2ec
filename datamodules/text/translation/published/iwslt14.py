"""IWSLT'14 German–English, from its archive or from prepared files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from datamodules.text import releases
from datamodules.text.translation.files import ParallelText, find_plain
from datamodules.text.translation.preparation import is_prepared
from datamodules.text.translation.published.release import PublishedTranslation
from lit_probattn.base.arguments import with_defaults

_HELD_OUT_EVERY = 23


@with_defaults(merges=10000, lower=True, max_ratio=1.5, max_words=175)
class IWSLT14(PublishedTranslation):
    """TED talks in German and English; lower-cased Moses words, segmented by joint BPE.

    Source: fairseq's preparation script for IWSLT'14, which MGK and FiSH use: tags removed, Moses'
    words, pairs of 1 to 175 words with a ratio of at most 1.5, lower case, every 23rd pair for
    validation, dev2010, dev2012 (TEDX) and tst2010 to tst2012 concatenated as test, 10,000 merges
    learned jointly from both languages.
    Departs from the source: wherever sacremoses does, and in the order of merges of equal count.

    Supported files: the archive of the workshop, its folder, or the output of fairseq's preparation
    script; see `datamodules.text.releases.IWSLT14`.

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
        """Return the text of the release, or prepared text."""
        if "train.de" in files:
            folder = files["train.de"][0].parent
            prepared = find_plain(self.title, folder, *self.languages)
            assert prepared is not None
            return replace(prepared, cleaned=is_prepared(prepared.splits["train"].source))
        train = self.pair(files, releases.IWSLT14_TRAIN)
        test = self.pair(files, *releases.IWSLT14_TESTS)
        return ParallelText({"train": train, "test": test}, held_out_every=_HELD_OUT_EVERY)
