"""Text of the Long Range Arena: sentiment of IMDB reviews as sequences of bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.base import Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.division import TrainAndTest
from datamodules.core.sequences import TokenSplit, write_sequences
from datamodules.lra import imdb
from datamodules.lra.arena import ArenaTokens
from lit_probattn.base.progress import progress

_NUM_REVIEWS = 50000  # in the release; for the progress bar and the published sizes


class Text(TrainAndTest, ArenaTokens):
    """IMDB reviews as bytes, negative (0) or positive (1).

    Ids: 0 padding, byte + 1 otherwise; bytes that are not UTF-8 are ordinary tokens. Reviews are
    sorted by class, then file name. The cache stores whole reviews, for all lengths and splits.

    Source: Long Range Arena, Text. Departs from the source: by default, validation is part of the
    training split; `test_as_val` gives the papers' protocol, which selects on test data.

    Args:
        split: `held_out` holds out val_fraction of each class of the training split for validation,
            as a pure function of split_seed. `test_as_val` validates on the test split.
        **kwargs: Arguments of HeldOut, ArenaTokens, ArenaData and DataModule.
    """

    task = "text"
    num_classes = 2  # negative and positive
    on_test = "split=test_as_val"

    def __init__(
        self, split: Literal["held_out", "test_as_val"] = "held_out", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.protocol = split
        self.select_on_test = split == "test_as_val"
        half = Published(_NUM_REVIEWS // 2, per_class=_NUM_REVIEWS // 4)
        self.publish(half, half)

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache; the release is fixed."""
        return {"source": "aclImdb", "tokens": "bytes", "classes": list(imdb.CLASSES)}

    def sources(self) -> list[Path]:
        """Return the archive, or the folders of the classes."""
        release = imdb.find_release(self.data_dir)
        if release.is_file():
            return [release]
        return [release / split / name for split in imdb.SPLITS for name in imdb.CLASSES]

    def build(self, writer: CacheWriter) -> None:
        """Read the release."""
        release = imdb.find_release(self.data_dir)
        read = imdb.read_archive if release.is_file() else imdb.read_folder
        with progress("Text: reading the release", _NUM_REVIEWS, "reviews") as advance:
            reviews = read(release, advance)
        for name, entries in reviews.items():
            texts = [np.frombuffer(text, dtype=np.uint8) for _, _, text in entries]
            targets = (target for target, _, _ in entries)
            write_sequences(writer, name, texts, map(len, texts), targets)

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits."""
        length = self._max_length_tokens
        return self.open_parts(partial(TokenSplit.from_cache, cache, max_length=length, shift=1))
