"""Series of different lengths: missing values, normalisation, samples, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.core.errors import DataError
from datamodules.core.order import FILL

__all__ = [
    "Normalization",
    "Normalizer",
    "SeriesCollate",
    "SeriesSample",
    "SeriesSplit",
    "fill_missing",
]

Normalization = Literal["standardize", "minmax", "per_sample_std", "per_sample_minmax", "none"]
_EPS = float(np.finfo(np.float64).eps)


def fill_missing(series: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Interpolate missing values linearly; before the first and after the last, repeat them.

    Args:
        series: (length, num_features), NaN where missing; at least one value of each feature.
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

    Source: the loaders of mvts and Flowformer (FiSH, section c.5): `standardize` is
    (x − mean) / (std + ε) with mean and std of each feature over all steps of all training series,
    `minmax` is (x − min) / (max − min + ε) over the same; the `per_sample` forms take them from
    the series itself. ε = 2.2e-16; std divides by the number of steps less one.
    Departs from the source: a constant feature gives zeros, not rounding errors divided by ε.

    Args:
        kind: which of them.
        shift, scale: (num_features,) float64; of training series. None where not used.
    """

    kind: Normalization
    shift: npt.NDArray[np.float64] | None = None
    scale: npt.NDArray[np.float64] | None = None

    @classmethod
    def fit(
        cls, kind: Normalization, series: Callable[[], Iterable[npt.NDArray[np.float32]]]
    ) -> Normalizer:
        """Make one; `series` returns the training series, without missing values, anew each time.

        Raises:
            DataError: unknown kind.
        """
        if kind not in get_args(Normalization):
            raise DataError(
                f"normalization must be one of {', '.join(get_args(Normalization))}, got {kind!r}"
            )
        if kind in ("none", "per_sample_std", "per_sample_minmax"):
            return cls(kind)
        return cls(kind, *_shift_and_scale(series, deviation=kind == "standardize"))

    def __call__(self, series: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Normalise one series without missing values, (length, num_features)."""
        if self.kind == "none":
            return series
        shift, scale = self.shift, self.scale
        if shift is None or scale is None:
            deviation = self.kind == "per_sample_std"
            shift, scale = _shift_and_scale(lambda: [series], deviation=deviation)
        return ((series - shift) / scale).astype(np.float32)


def _shift_and_scale(
    series: Callable[[], Iterable[npt.NDArray[np.float32]]], *, deviation: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and deviation, or minimum and range, of each feature; scale ∞ where it is constant."""
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


class SeriesSample(NamedTuple):
    """One series.

    Args:
        values: normalised values, (length, num_features) float32.
        target: class.
        sample_id: index of the sample in its split, or FILL.
    """

    values: npt.NDArray[np.float32]
    target: int
    sample_id: int


class SeriesSplit:
    """The series of one split; a map-style data set.

    Arrays may be memory-mapped: a copy of this object in another process opens the file anew.

    Args:
        values: values of all stored series, one after the other, NaN where missing. Shape
            (num_steps, num_features).
        offsets: where each series begins, and the end of the last. Shape (num_stored + 1,).
        targets: class of each series. Shape (num_stored,).
        max_length: series are cut off after so many steps.
        rows: the stored series that belong to the split.
        normalizer: applied to whole series, before they are cut off.
    """

    def __init__(
        self,
        values: npt.NDArray[np.float32],
        offsets: npt.NDArray[np.int64],
        targets: npt.NDArray[np.integer],
        max_length: int,
        rows: npt.NDArray[np.int64],
        normalizer: Normalizer | None = None,
    ) -> None:
        self._values, self._offsets, self._targets = values, offsets, targets
        self._max_length, self._rows = max_length, rows
        self.normalizer = normalizer or Normalizer("none")

    def __len__(self) -> int:
        return len(self._rows)

    def series(self, index: int) -> npt.NDArray[np.float32]:
        """Return one series without missing values, neither normalised nor cut off."""
        row = self._rows[index]
        return fill_missing(np.asarray(self._values[self._offsets[row] : self._offsets[row + 1]]))

    def __getitem__(self, index: int) -> SeriesSample:
        """Return sample `index`; FILL gives the first one under the id FILL."""
        position = 0 if index == FILL else index
        values = self.normalizer(self.series(position))[: self._max_length]
        return SeriesSample(values, int(self._targets[self._rows[position]]), int(index))

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        if isinstance(self._values, np.memmap):
            state["_values"] = str(self._values.filename)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        if isinstance(state["_values"], str):
            state["_values"] = np.load(state["_values"], mmap_mode="r")
        self.__dict__.update(state)

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Class of each sample, shape (num_samples,)."""
        return self._targets[self._rows]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Steps of each sample before it is cut off, shape (num_samples,)."""
        return np.diff(self._offsets)[self._rows]

    @property
    def num_cut(self) -> int:
        """Samples that are cut off."""
        return int((self.lengths > self._max_length).sum())


@dataclass(frozen=True)
class SeriesCollate:
    """Make a batch of series, padded at the end with 0.

    Args:
        pad_to: `longest` pads to the longest series of the batch, `max` to `max_seq_len`.
        pad_multiple: the padded length is rounded up to a multiple of this, up to `max_seq_len`.
        max_seq_len: largest padded length.
    """

    pad_to: Literal["longest", "max"]
    pad_multiple: int
    max_seq_len: int

    def __call__(self, samples: list[SeriesSample]) -> dict[str, Tensor]:
        """Return `inputs` (B, N, F), `key_mask` (B, N), `target` and `sample_ids` (B,)."""
        lengths = np.array([len(sample.values) for sample in samples])
        length = self.max_seq_len
        if self.pad_to == "longest":
            longest = int(lengths.max())
            length = min(-(-longest // self.pad_multiple) * self.pad_multiple, length)
        shape = (len(samples), length, samples[0].values.shape[1])
        inputs = np.zeros(shape, dtype=np.float32)
        for row, sample in enumerate(samples):
            inputs[row, : len(sample.values)] = sample.values
        return {
            "inputs": torch.from_numpy(inputs),
            "key_mask": torch.from_numpy(np.arange(length) < lengths[:, None]),
            "target": torch.tensor([sample.target for sample in samples]),
            "sample_ids": torch.tensor([sample.sample_id for sample in samples]),
        }
