"""Splitting data without predefined splits, by a hash of the content.

The split of a sample depends on its content alone: it does not change when rows are reordered or
added, and equal samples are always in the same split.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from datamodules.core.base import DataModule, Published, Split
from datamodules.core.order import choose_per_class
from lit_probattn.base.arguments import OnlyWith, changed_arguments
from lit_probattn.base.errors import DataError
from lit_probattn.base.files import fingerprint

_log = logging.getLogger("datamodules")
_GIVEN = {
    "val_fraction": "the validation split has files",
    "test_fraction": "the test split has files",
    "split_seed": "every split has files",
}
_HELD_OUT = OnlyWith(split="held_out", select_on="val")  # where there are protocols


class HeldOut(DataModule):
    """Data of which a fraction is held out for validation.

    Args:
        val_fraction: Fraction of the samples that is held out for validation.
        split_seed: Seed of the split.
        **kwargs: Arguments of the parent class.

    Raises:
        DataError: The fraction is not between 0 and 1.
    """

    may_hold_out_none = False
    on_test = ""  # setting that validates on the test split, if there is one

    def __init__(
        self,
        *,
        val_fraction: Annotated[float, _HELD_OUT] = 0.1,
        split_seed: Annotated[int, _HELD_OUT] = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.may_hold_out_none and not 0 <= val_fraction < 1:
            raise DataError(f"val_fraction must be at least 0 and below 1, received {val_fraction}")
        if not self.may_hold_out_none:
            check_shares(val_fraction=val_fraction)
        self.val_fraction, self.split_seed = val_fraction, split_seed

    def held_out(self, targets: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Choose the held-out fraction of each class by the seed; True for validation.

        A class with at least two samples has at least one in each part.

        Raises:
            DataError: No class has two samples.
        """

        def count(_: int, num_rows: int) -> int:
            return min(max(round(self.val_fraction * num_rows), 1), num_rows - 1)

        chosen = choose_per_class(targets, self.split_seed, count)
        if not chosen.any():
            remedy = f"add samples, or set {self.on_test}" if self.on_test else "add samples"
            raise DataError(
                f"{self.data_dir}: no class has two training samples, so none can be held out for "
                f"validation; {remedy}"
            )
        return chosen


class TrainAndTest(HeldOut):
    """Data with a training and a test part, of which validation is held out or the test part."""

    def publish(self, train: Published, test: Published) -> None:
        """Set the published sizes of the splits, given those of both parts."""
        self.published = {"train+val": train, "test": test}
        if self.select_on_test:
            self.published = {"train": train, "val": test, "test": test}

    def open_parts(self, open_part: Callable[..., Split]) -> dict[str, Split]:
        """Return the splits.

        Args:
            open_part: Opens the part `train` or `test`; `rows` are the indices of a subset.
        """
        train, test = open_part("train"), open_part("test")
        if self.select_on_test:
            return {"train": train, "val": test, "test": test}
        held_out = self.held_out(train.targets)
        train, val = (open_part("train", rows=np.flatnonzero(x)) for x in (~held_out, held_out))
        return {"train": train, "val": val, "test": test}


class Divided(HeldOut):
    """Data that hold out fractions for validation and test splits without files.

    Args:
        test_fraction: Fraction of the samples that is held out for the test split.
        **kwargs: Arguments of HeldOut and of the parent class.

    Raises:
        DataError: The fractions leave nothing for training.
    """

    def __init__(self, *, test_fraction: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_shares(test_fraction=test_fraction, val_fraction=self.val_fraction)
        self.shares = {"test": test_fraction, "val": self.val_fraction}

    def missing_shares(self, present: Collection[str]) -> dict[str, float]:
        """Return the fraction of each split that has no files.

        Settings of the division that the present splits leave no use for are one warning each.
        """
        unused: dict[str, float] = {
            f"{name}_fraction": share for name, share in self.shares.items() if name in present
        }
        missing = {name: share for name, share in self.shares.items() if name not in present}
        if not missing:
            unused["split_seed"] = self.split_seed
        for name, value in changed_arguments(type(self), unused).items():
            _log.warning("%s=%s has no effect: %s", name, value, _GIVEN[name])
        return missing


def check_shares(**shares: float) -> None:
    """Raise a DataError unless every fraction is positive and their sum is below 1."""
    for name, share in shares.items():
        if not 0 < share < 1:
            raise DataError(f"{name} must be between 0 and 1, received {share}")
    if sum(shares.values()) >= 1:
        fractions = " and ".join(f"{name}={share}" for name, share in shares.items())
        raise DataError(f"{fractions} leave no samples for training; lower them")


def divide(
    what: str,
    keys: Sequence[bytes],
    shares: Mapping[str, float],
    seed: int,
    unit: str = "samples",
) -> list[str]:
    """Return the split of each key: one of `shares`, or `train`.

    If a split would be empty, the sample with the smallest hash of the largest split is moved to
    it.

    Args:
        what: Name of the data for messages.
        keys: Content of each sample, or a digest of it.
        shares: Expected fraction of each split other than `train`.
        unit: Name of a sample for messages, in the plural.

    Raises:
        DataError: There are fewer distinct keys than splits, or the seed exceeds 64 bits.
    """
    if not -(2**63) <= seed < 2**63:
        raise DataError(f"split_seed must be within 64 bits, received {seed}")
    numbers = [_number(key, seed) for key in keys]
    places = dict.fromkeys(numbers, "train")
    if len(places) <= len(shares):
        names = ", ".join(["train", *shares])
        among = f" among {len(keys)}" if len(keys) > len(places) else ""
        raise DataError(
            f"{what}: {len(places)} different {unit}{among} cannot be split into {names}; provide "
            "more, or a file for each split"
        )
    low = 0.0
    for name, share in shares.items():
        chosen = [number for number in places if low <= number < low + share]
        places.update(dict.fromkeys(chosen, name))
        low += share
    for name in ("train", *shares):
        sizes = Counter(places.values())
        if not sizes[name]:
            largest = max(("train", *shares), key=lambda split: sizes[split])
            places[min(n for n, split in places.items() if split == largest)] = name
    return [places[number] for number in numbers]


def _number(key: bytes, seed: int) -> float:
    """Map a key and the seed to a number in [0, 1)."""
    return int.from_bytes(fingerprint(key, 8, np.int64(seed).tobytes()), "big") / 2**64
