"""Text of the Long Range Arena: sentiment of IMDB reviews as sequences of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from datamodules.core.base import Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.division import HeldOut
from datamodules.core.order import choose_per_class
from datamodules.core.sequences import TokenSplit, write_sequences
from datamodules.lra import imdb
from datamodules.lra.arena import ArenaTokens
from lit_probattn.base.errors import DataError
from lit_probattn.base.progress import progress

_NUM_REVIEWS = 50000  # in the release; for the progress bar and the published sizes


class Text(HeldOut, ArenaTokens):
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

    def __init__(
        self, split: Literal["held_out", "test_as_val"] = "held_out", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.protocol = split
        self.select_on_test = split == "test_as_val"
        half = Published(_NUM_REVIEWS // 2, per_class=_NUM_REVIEWS // 4)
        self.published = {"train+val": half, "test": half}
        if self.select_on_test:
            self.published = {"train": half, "val": half, "test": half}

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
        """Open the splits; held-out validation is a subset of the rows of the training split."""

        def part(name: str, rows: npt.NDArray[np.int64] | None = None) -> TokenSplit:
            return TokenSplit.from_cache(cache, name, self._max_length_tokens, shift=1, rows=rows)

        if self.select_on_test:
            return {"train": part("train"), "val": part("test"), "test": part("test")}
        held_out = self._held_out(np.asarray(cache.array("train_targets")))
        return {
            "train": part("train", np.flatnonzero(~held_out)),
            "val": part("train", np.flatnonzero(held_out)),
            "test": part("test"),
        }

    def _held_out(self, targets: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Choose the same fraction of each class; True for validation. Shape of `targets`."""

        def count(target: int, num_rows: int) -> int:
            held_out = round(self.val_fraction * num_rows)
            if not 0 < held_out < num_rows:
                raise DataError(
                    f"val_fraction={self.val_fraction} of {num_rows} reviews of class {target} "
                    f"leaves a split empty"
                )
            return held_out

        return choose_per_class(targets, self.num_classes, self.split_seed, count)
