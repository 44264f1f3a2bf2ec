"""Series of variable length: missing values, normalisation, samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from datamodules.core.base import Padded
from datamodules.core.own import ClassMap
from datamodules.core.sequences import SequenceSplit
from lit_probattn.base.arguments import Count
from lit_probattn.base.errors import DataError

Normalization = Literal["standardize", "minmax", "per_sample_std", "per_sample_minmax", "none"]
_EPS = float(np.finfo(np.float64).eps)


def fill_missing(series: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Interpolate missing values linearly, with constant extrapolation at both ends.

    Args:
        series: (length, num_features), NaN for missing values; each feature needs at least one
            value.
    """
    missing = np.isnan(series)
    if not missing.any():
        return series
    filled, steps = series.copy(), np.arange(len(series))
    for feature in np.flatnonzero(missing.any(axis=0)):
        known = ~missing[:, feature]
        filled[:, feature] = np.interp(steps, steps[known], series[known, feature])
    return filled


@dataclass(frozen=True)
class Normalizer:
    """Shift and scale of every feature.

    Source: the loaders of mvts and Flowformer, as in FiSH: `standardize` is
    (x − mean) / (std + ε) with mean and std of each feature over all steps of all training series,
    `minmax` is (x − min) / (max − min + ε) over the same; the `per_sample` variants use the
    statistics of the series itself. ε = 2.2e-16; std divides by the number of steps minus one.
    Departs from the source: a constant feature gives zeros, not rounding errors divided by ε.

    Args:
        statistics: Shift and scale of training series, each (num_features,) float64; empty if
            unused.
    """

    kind: Normalization
    statistics: tuple[npt.NDArray[np.float64], ...] = ()

    @classmethod
    def fit(
        cls, kind: Normalization, series: Callable[[], Iterable[npt.NDArray[np.float32]]]
    ) -> Normalizer:
        """Fit to the training series without missing values that each call of `series` returns."""
        if kind in ("none", "per_sample_std", "per_sample_minmax"):
            return cls(kind)
        return cls(kind, _shift_and_scale(series, deviation=kind == "standardize"))

    def state(self) -> dict[str, Any]:
        """Return kind and statistics as plain values, for checkpoints."""
        return {"kind": self.kind, "statistics": [values.tolist() for values in self.statistics]}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Normalizer:
        """Return the normaliser with this `state`."""
        return cls(state["kind"], tuple(map(np.array, state["statistics"])))

    def __call__(self, series: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Normalise one series without missing values, (length, num_features)."""
        if self.kind == "none":
            return series
        deviation = self.kind == "per_sample_std"
        shift, scale = self.statistics or _shift_and_scale(lambda: [series], deviation=deviation)
        return ((series - shift) / scale).astype(np.float32)


def _shift_and_scale(
    series: Callable[[], Iterable[npt.NDArray[np.float32]]], *, deviation: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return mean and deviation, or minimum and range, per feature; scale ∞ if it is constant."""
    count = 0
    total: npt.NDArray[np.float64] | float = 0.0
    low, high = np.array(np.inf), np.array(-np.inf)
    for case in series():
        steps = case.astype(np.float64)
        count, total = count + len(steps), total + steps.sum(axis=0)
        low, high = np.minimum(low, steps.min(axis=0)), np.maximum(high, steps.max(axis=0))
    constant = low == high
    if not deviation:
        return low, np.where(constant, np.inf, high - low + _EPS)
    mean = np.asarray(total) / count
    squares = sum(((case.astype(np.float64) - mean) ** 2).sum(axis=0) for case in series())
    return mean, np.where(constant, np.inf, np.sqrt(squares / max(count - 1, 1)) + _EPS)


class SeriesData(ClassMap, Padded):
    """Base of data sets of series with classes; checkpoints store the training statistics.

    Args:
        normalization: `standardize` and `minmax` by each feature's training statistics, or by the
            statistics of the series itself (`per_sample_std`, `per_sample_minmax`), or `none`.
        max_length: Longer series are truncated. Default: the longest training series.
        **kwargs: Arguments of Padded and of the parent class.
    """

    def __init__(
        self,
        *,
        normalization: Normalization = "standardize",
        max_length: Count | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.normalization: Normalization = normalization
        self._max_length = max_length

    @cached_property
    def _fitted(self) -> Normalizer:
        """Statistics of the training split."""
        train = self.split("train")
        return Normalizer.fit(self.normalization, lambda: map(train.series, range(len(train))))

    def setup(self, stage: str | None = None) -> None:
        """Open the splits, once, and normalise all by the statistics of the training split.

        `load_state_dict` replaces these statistics by those of a checkpoint, until the next call.
        Lightning calls this method before it restores a checkpoint.
        """
        super().setup(stage)
        self._normalize(self._fitted)

    def _normalize(self, normalizer: Normalizer) -> None:
        self.normalizer = normalizer
        for split in self.splits.values():
            split.normalizer = normalizer

    def state_dict(self) -> dict[str, Any]:
        """Return classes and normalisation, for checkpoints."""
        return {**super().state_dict(), "normalizer": self.normalizer.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the statistics of a checkpoint until the next `setup`.

        Raises:
            DataError: The checkpoint has no statistics, or those of another normalisation or number
                of features, or other classes.
        """
        super().load_state_dict(state_dict)
        stored = state_dict.get("normalizer")
        if stored is None:
            raise DataError(
                f"the checkpoint lacks the statistics of normalization={self.normalization}; train "
                "again"
            )
        if stored["kind"] != self.normalization:
            raise DataError(
                f"the checkpoint was trained with normalization={stored['kind']}, received "
                f"{self.normalization}; use that of its training"
            )
        normalizer = Normalizer.of(stored)
        for values in normalizer.statistics:
            if len(values) != self.num_features:
                raise DataError(
                    f"the checkpoint was trained with {len(values)} features per step, the data "
                    f"have {self.num_features}; use data with the features of training"
                )
        self._normalize(normalizer)


class SeriesSplit(SequenceSplit):
    """Series (num_steps, num_features), NaN if missing; `normalizer` applies to whole series."""

    kind = "values"
    normalizer = Normalizer("none")

    def values(self, row: int) -> Any:
        """Return a normalised series, (length, num_features) float32."""
        return self.normalizer(self._whole(row))[: self._max_length]

    def series(self, index: int) -> npt.NDArray[np.float32]:
        """Return sample `index` without missing values, not normalised and not truncated."""
        return self._whole(self._rows[index])

    def _whole(self, row: int) -> npt.NDArray[np.float32]:
        return fill_missing(np.asarray(self._stored[row]))
