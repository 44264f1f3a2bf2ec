"""New samples that `test` and `predict` read with what was learned from the training data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np

from datamodules.core.base import DataModule, Split
from datamodules.core.files import expand
from datamodules.core.loaders import EvaluationLoader
from lit_probattn.base.arguments import OnlyWith, checks_arguments
from lit_probattn.base.errors import DataError, MissingDataError

__all__ = ["UNLABELLED", "NewSamples", "is_labelled"]

UNLABELLED = -1  # target of a sample without a label


class NewSamples(DataModule):
    """Data whose test split can be replaced by new samples after training.

    New samples do not change the training data: vocabulary, classes and normalisation are still
    learned from it. A subclass implements `new_split`.

    Args:
        new_path: File or folder of new samples that `test` and `predict` read in place of the test
            split. `predict` does not need their labels, if they have any.
        **kwargs: Arguments of the parent class.
    """

    @checks_arguments
    def __init__(
        self,
        *,
        new_path: Annotated[str | None, OnlyWith(predict_split="test")] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.new_path: Path | None = None if new_path is None else expand(new_path)
        if self.new_path is not None and not self.new_path.exists():
            raise MissingDataError(f"new_path: {self.new_path}: no such file or folder")

    def new_split(self, path: Path) -> Split:
        """Return the samples at a path; unlabelled ones have the target UNLABELLED."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Open the splits, once.

        Raises:
            DataError: New samples are set for training or validation, which do not read them.
        """
        if self.new_path is not None and stage in ("fit", "validate"):
            raise DataError(f"new_path={self.new_path} is read by test and predict only; remove it")
        is_first = not self.splits
        super().setup(stage)
        if is_first and self.new_path is not None:
            self.splits["test"] = self.new_split(self.new_path)
            self.notes.append(f"test: the samples of {self.new_path}")

    def test_dataloader(self) -> EvaluationLoader:
        """Return this rank's part of the test split.

        Raises:
            DataError: The samples have no labels.
        """
        targets = getattr(self.split("test"), "targets", None)
        if targets is not None and not is_labelled(targets):
            raise DataError(
                f"{self.new_path} has no labels, and test compares predictions with labels: add "
                f"them, or use the command predict"
            )
        return super().test_dataloader()


def is_labelled(targets: np.ndarray[Any, Any]) -> bool:
    """Return whether every sample has a label."""
    return bool((targets != UNLABELLED).all())
