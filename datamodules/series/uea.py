"""Time series of the UEA archive, selected by name, or of the user's `.ts` files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.base import CachedDataModule, Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.division import TrainAndTest
from datamodules.core.sequences import Ragged, write_sequences
from datamodules.series.archive import ARCHIVES, ArchiveSource, find_archive
from datamodules.series.samples import SeriesData, SeriesSplit
from datamodules.series.ts_file import TsFile, read_ts
from lit_probattn.base.arguments import with_defaults
from lit_probattn.base.errors import DataError, prefixed

_READER_VERSION = 1  # part of the cache name; increment when the stored data change


@with_defaults(val_fraction=0.2, split_seed=1337)
class UEA(TrainAndTest, SeriesData, CachedDataModule):
    """Series and their class; `inputs` are float32 (B, N, num_features).

    The archive's training and test files are kept as they are. Series can differ in length; they
    are padded with 0, and `key_mask` marks real steps. Missing values are interpolated within each
    series. Normalisation uses statistics of the training split. Classes are numbered in the order
    of the training file's header; `classes` maps numbers to labels.

    Files are `<data_dir>/<name>/<name>_{TRAIN,TEST}.ts`, or the same below `UEA` or
    `Multivariate_ts`, or directly in data_dir. The values are cached.

    Source: the loaders of mvts and Flowformer, as in FiSH (NeurIPS 2022). Departs from the source:
    by default, validation is part of the training file; `select_on=test` gives the papers'
    protocol, which selects on test data.

    Args:
        name: Name of the archive; any other name refers to your own `.ts` files, univariate or
            multivariate, whose sizes are determined from the files.
        source: `released` reads the files in data_dir; `bundled` the copies of BasicMotions and
            JapaneseVowels in the package aeon.
        select_on: `val` holds out val_fraction of each class of the training file for validation,
            as a pure function of split_seed. `test` trains on the whole training file and validates
            on the test file, as the papers do.
        **kwargs: Arguments of HeldOut, SeriesData and DataModule. A class with at least two series
            has at least one in each part. As in the source, longer test series are truncated.
    """

    task = "uea"
    on_test = "select_on=test"

    def __init__(
        self,
        name: str,
        source: ArchiveSource = "released",
        select_on: Literal["val", "test"] = "val",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.archive, self.source, self.select_on = name, source, select_on
        cached = (self.cache_dir / self.cache_spec.name).is_dir()
        if name not in ARCHIVES and not cached:
            self.sources()  # raises for a name that is neither an archive nor the user's files
        self.select_on_test = select_on == "test"
        size = ARCHIVES.get(name)
        if size is not None:  # the published size is known and unambiguous
            self.publish(Published(size.num_train), Published(size.num_test))

    # ---- sizes, determined by the files --------------------------------------------------------

    @property
    def num_features(self) -> int:
        """Number of dimensions of a series."""
        return int(self.cache.array("train_values").shape[1])

    @property
    def classes(self) -> list[str]:
        """Label of each class number."""
        return list(self.facts["classes"])

    @property
    def num_classes(self) -> int:
        """Number of classes in the training file."""
        return len(self.classes)

    @property
    def max_seq_len(self) -> int:
        """Longest series of the training file, or `max_length`."""
        if self._max_length is not None:
            return self._max_length
        return int(Ragged.open(self.cache, "train", "values").lengths.max())

    @property
    def provenance(self) -> dict[str, Any]:
        """Release and protocol of a result; plain JSON values."""
        return {
            "archive": self.archive,
            "archive_source": self.source,
            "archive_version": self.facts["version"],
            "archive_sha256": self.source_hashes,
            "select_on": self.select_on,
            "val_fraction": None if self.select_on_test else self.val_fraction,
            "split_seed": None if self.select_on_test else self.split_seed,
            "normalization": self.normalization,
            "max_seq_len": self.max_seq_len,
        }

    # ---- cache ---------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache; the release is fixed."""
        return {"archive": self.archive, "source": self.source, "reader_version": _READER_VERSION}

    def sources(self) -> list[Path]:
        """Return both files, and the file with their version if there is one."""
        files = find_archive(self.archive, self.data_dir, self.source)
        return [files.train, files.test, *files.train.parent.glob("VERSION")]

    def build(self, writer: CacheWriter) -> None:
        """Read both files; raises DataError if one is malformed or they are inconsistent."""
        files = find_archive(self.archive, self.data_dir, self.source)
        train, test = read_ts(files.train), read_ts(files.test)
        classes = _common_classes(train, test, files.train, files.test)
        numbers = {label.lower(): number for number, label in enumerate(classes)}
        num_missing = 0
        for name, part in (("train", train), ("test", test)):
            targets = (numbers[label.lower()] for label in part.labels)
            write_sequences(writer, name, part.series, map(len, part.series), targets, "values")
            num_missing += sum(int(np.isnan(case).sum()) for case in part.series)
        facts = {
            "classes": classes,
            "absent": [label for label in train.header.classes if label not in classes],
            "version": files.version,
            "num_missing": num_missing,
        }
        writer.add_facts(facts)

    # ---- splits --------------------------------------------------------------------------------

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits."""
        facts = self.facts
        self.notes = [
            f"archive {self.archive}, {self.source}, version {facts['version']}; "
            f"{self.num_features} dimensions; {facts['num_missing']} missing values, interpolated",
            f"classes: {', '.join(f'{i} = {label}' for i, label in enumerate(self.classes))}",
        ]
        if facts["absent"]:
            self.notes.append(f"classes without series: {', '.join(facts['absent'])}")
        if self.select_on_test:
            self.notes.append("train is the whole training file")
        open_part = partial(SeriesSplit.from_cache, cache, max_length=self.max_seq_len)
        with prefixed(self.archive, DataError, to=DataError):
            return self.open_parts(open_part)


def _common_classes(train: TsFile, test: TsFile, train_path: Path, test_path: Path) -> list[str]:
    """Return the classes of the training series in header order, which must cover the test."""
    sizes = train.header.num_features, test.header.num_features
    if sizes[0] != sizes[1]:
        raise DataError(f"{train_path} has {sizes[0]} dimensions and {test_path} has {sizes[1]}")
    present = {label.lower() for label in train.labels}
    for label, line in zip(test.labels, test.lines, strict=True):
        if label.lower() not in present:
            raise DataError(
                f"{test_path}:{line}: class {label!r} is missing from {train_path}, so it cannot "
                "be learned"
            )
    classes = [label for label in train.header.classes if label.lower() in present]
    if len(classes) < 2:
        raise DataError(f"{train_path}: only one class, {classes[0]!r}; expected at least two")
    return classes
