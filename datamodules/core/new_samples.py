"""New samples that `test` and `predict` read with what was learned from the training data."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.base import CachedDataModule, DataModule, Split
from datamodules.core.cache import CacheSpec
from datamodules.core.files import expand, missing
from datamodules.core.loaders import EvaluationLoader
from lit_probattn.base.errors import DataError, MissingDataError
from lit_probattn.base.files import file_digest

UNLABELLED = -1  # target of a sample without a label


class NewSamples(DataModule):
    """Data whose test split can be replaced by new samples after training.

    New samples do not change the training data: vocabulary, classes and normalisation are still
    learned from it. A subclass implements `new_split`.

    Args:
        new_path: File or folder of new samples that `test` and `predict` read in place of the test
            split. `predict` does not need labels.
        **kwargs: Arguments of the parent class.

    Raises:
        MissingDataError: `new_path` does not exist.
        DataError: `predict_split` is not the test split, which the new samples replace.
    """

    labels_are = "labels"  # their name in messages

    def __init__(self, *, new_path: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if new_path is not None and self.predict_split != "test":
            raise DataError(
                f"new_path={new_path} replaces the test split, but predict_split is "
                f"{self.predict_split}; remove one of them"
            )
        self.new_path: Path | None = None if new_path is None else expand(new_path)
        if self.new_path is not None and not self.new_path.exists():
            raise MissingDataError(f"new_path: {missing(self.new_path)}")

    def new_split(self, path: Path) -> tuple[Split, list[str]]:
        """Return the samples at a path, with the target UNLABELLED for a missing label, and notes.

        It is called before the splits are opened.
        """
        raise NotImplementedError

    def new_digest(self, path: Path) -> str:
        """Return the SHA-256 of the new samples."""
        return file_digest(path)

    @property
    def provenance(self) -> dict[str, Any]:
        """Data settings that are stored with a result; plain JSON values."""
        found: dict[str, Any] = dict(getattr(super(), "provenance", {}))
        if self.new_path is not None:
            found["new_sha256"] = self.new_digest(self.new_path)
        return found

    @cached_property
    def new_samples(self) -> tuple[Any, list[str]] | None:
        """The split of the new samples and notes on them, read once; None without any."""
        return None if self.new_path is None else self.new_split(self.new_path)

    def prepare_data(self) -> None:
        """Build the caches unless valid ones exist. Lightning calls this once per node."""
        super().prepare_data()
        self.new_samples  # noqa: B018

    def has_labels(self) -> bool:
        """Return whether every sample of the test split has a label."""
        return is_labelled(self.split("test").targets)

    def setup(self, stage: str | None = None) -> None:
        """Open the splits, once.

        Raises:
            DataError: New samples are set for training or validation, which do not read them.
        """
        if self.new_path is not None and stage in ("fit", "validate"):
            raise DataError(f"new_path={self.new_path} is read by test and predict only; remove it")
        is_first, new = not self.splits, self.new_samples
        super().setup(stage)
        if is_first and new is not None:
            self.splits["test"], notes = new
            self.notes += [*notes, f"test: the samples of {self.new_path}"]

    @property
    def predicted(self) -> str:
        """What `predict` reads, for messages."""
        return super().predicted if self.new_path is None else self.new_path.name

    def test_dataloader(self) -> EvaluationLoader:
        """Return this rank's part of the test split.

        Raises:
            DataError: The samples have no labels.
        """
        if not self.has_labels():
            raise DataError(
                f"{self.new_path} has no {self.labels_are} to compare predictions with; add them, "
                "or use the command predict"
            )
        return super().test_dataloader()


def new_spec(data: CachedDataModule, path: Path, learned: Any) -> CacheSpec:
    """Return the identity of the cache of new samples.

    Args:
        path: The file of the new samples.
        learned: Identifies what was learned from the training data; a JSON value.
    """
    settings = {**data.settings(), "new_path": str(path.resolve()), "learned": learned}
    return CacheSpec(data.task, settings, lambda: [path])


def is_labelled(targets: np.ndarray[Any, Any]) -> bool:
    """Return whether every sample has a label."""
    return bool((targets != UNLABELLED).all())
