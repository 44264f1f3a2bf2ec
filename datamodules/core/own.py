"""User-provided data sets: files, classes, splits, and the summary that `check` prints."""

from __future__ import annotations

import logging
import re
import shlex
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from datamodules.core.base import SPLITS, CachedDataModule, DataModule, Split
from datamodules.core.cache import Cache, CacheWriter, ensure_cache
from datamodules.core.division import Divided, divide
from datamodules.core.files import expand, missing
from datamodules.core.new_samples import UNLABELLED, NewSamples, is_labelled, new_spec
from datamodules.core.tables import TABLES
from lit_probattn.base.errors import DataError, MissingDataError
from lit_probattn.base.files import fingerprint

_log = logging.getLogger("datamodules")
# Accepted names of a split's file, `mine_TRAIN.ts` included.
_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
_MOST_CLASSES = 12  # listed by `check`
SHOWN_SAMPLES = 3


class ClassMap:
    """Label of each class number; stored in checkpoints; a mismatch is an error."""

    classes_of = "the data"

    @property
    def classes(self) -> list[str]:
        """Label of each class number."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the class map, for checkpoints."""
        return {"classes": self.classes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise a DataError if the class map of a checkpoint differs from the data's.

        `converted` marks models converted by `convert from_transformers`.
        """
        before, now = list(state_dict["classes"]), self.classes
        if before == now:
            return
        locations = [i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b]
        first = locations[0] if locations else min(len(before), len(now))
        names = [dict(enumerate(classes)).get(first, "missing") for classes in (before, now)]
        remedy = f"use {self.classes_of} that were used for training"
        if state_dict.get("converted"):
            order = f"`convert from_transformers --labels {shlex.join(now)}`"
            remedy += f", or, for the same classes in another order or spelling, {order}"
        raise DataError(
            f"the checkpoint was trained with {len(before)} classes, {self.classes_of} have "
            f"{len(now)}: class {first} was {names[0]} and is now {names[1]}; {remedy}"
        )


def _check_file(file: Path, suffixes: Sequence[str]) -> None:
    if not file.is_file():
        raise missing(file)
    if file.suffix.lower() not in suffixes:
        raise DataError(
            f"{file}: expected a file name ending in {', '.join(suffixes)}, received "
            f"{file.suffix or 'no suffix'}"
        )


def required_path(path: str) -> Path:
    """Return the path of the user's data; raises DataError if it is not set or missing."""
    if not path:
        raise DataError("path is not set; add --data.init_args.path FILE_OR_FOLDER")
    location = expand(path)
    if not location.exists():
        raise missing(location)
    return location


def split_of(name: str) -> str | None:
    """Return the split that the name of a file or folder denotes, or None."""
    last = re.split("[-_.]", name.lower())[-1]
    return next((split for split, names in _NAMES.items() if last in names), None)


def _files_of_splits(folder: Path, suffixes: Sequence[str]) -> dict[str, Path]:
    """Return the file of each split in a folder; a single file is `train`."""
    found = _inside(folder, suffixes)
    if len(found) == 1:
        return {"train": found[0]}
    files = {
        split: folder / name for split, name in by_split(folder, [p.name for p in found]).items()
    }
    if "train" not in files:
        names = ", ".join(path.name for path in found[:5]) or "none"
        raise MissingDataError(
            f"{folder}: expected one file ending in {', '.join(suffixes)}, or train, val and "
            f"test with such a suffix; found {names}"
        )
    return files


def _inside(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in suffixes and p.is_file())


def by_split(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the name of each split's file; raises DataError for duplicates."""
    found: dict[str, str] = {}
    for name in names:
        split = split_of(Path(name).stem)
        if split in found:
            raise DataError(
                f"{folder}: {found[split]} and {name} both denote {split}; remove or rename one"
            )
        if split is not None:
            found[split] = name
    return found


def warn_ignored(folder: Path, names: Iterable[str], used: Iterable[str]) -> None:
    """Warn about names in a folder that denote no split and are therefore ignored."""
    others = sorted(set(names) - set(used))
    if others:
        _log.warning("%s: %s denotes no split and is ignored", folder, ", ".join(others))


def reject_overlap(
    digests: Mapping[str, Sequence[bytes]],
    locations: Mapping[str, Sequence[object]],
    what: str,
    remedy: str,
) -> None:
    """Raise a DataError if two splits contain equal samples.

    Args:
        digests: Digest of each sample, by split.
        locations: File, or file and line, of each sample, by split.
        what: Name of samples, in the plural.
        remedy: What to do.
    """
    seen: dict[bytes, tuple[str, object]] = {}
    pairs: dict[tuple[str, str], list[tuple[object, object]]] = {}
    for name, found in digests.items():
        for digest, location in zip(found, locations[name], strict=True):
            other, where = seen.setdefault(digest, (name, location))
            if other != name:
                pairs.setdefault((other, name), []).append((where, location))
    for (other, name), equal in pairs.items():
        where, location = equal[0]
        raise DataError(
            f"{location} duplicates {where}: {len(equal)} {what} of {name} are also in {other}, "
            f"which inflates scores; {remedy}"
        )


class AtPath(DataModule):
    """Data at a path; the default cache folder depends on the folder that contains the data.

    Args:
        path: A file or folder of a type that the class supports.
        **kwargs: Arguments of the parent class.
    """

    has_task_file = True

    def __init__(self, path: str = "", **kwargs: Any) -> None:
        location = self.folder_of(path)
        if kwargs.get("data_dir") is None and location is not None:
            kwargs["data_dir"] = str(location)
        self.given_path = path
        super().__init__(**kwargs)

    def folder_of(self, path: str) -> Path | None:
        """Return the folder of the data; None if another argument specifies it."""
        location = required_path(path)
        return location if location.is_dir() else location.parent


class Rows(NamedTuple):
    """Samples of a file.

    Args:
        values: The samples.
        labels: Label of each sample; empty if the file has no labels.
        locations: file and line of each sample, for messages.
        notes: Remarks about inferred settings, one line each.
        features: Names of the features of a step, for series; empty if the format has no names.
        steps: Names of the steps, for series of a table with one series per row.
        columns: Column that was read for each setting such as `label_column`, for tables.
    """

    values: list[Any]
    labels: list[str]
    locations: list[str]
    notes: list[str]
    features: Sequence[str] = ()
    steps: Sequence[str] = ()
    columns: Mapping[str, str | None] = MappingProxyType({})


class OwnSamples(NewSamples, AtPath, Divided, ClassMap, CachedDataModule):
    """Labelled samples in the user's files; base of texts and series.

    Classes are numbered in the order of their labels, numeric labels by value. Splits without a
    file are split off by a hash of the content: see `datamodules.core.division`.

    `path` is a file, or a folder with a single file or with one for each split (train, val and test
    in any of their usual spellings).

    Args:
        val_path: File of the validation split. Default: split off from the training file.
        test_path: File of the test split. Default: split off from the training file.
        allow_overlap: Whether two files may contain equal samples; by default, an error is raised.
        **kwargs: Arguments of NewSamples, AtPath, Divided and DataModule.
    """

    what = "samples"
    suffixes: tuple[str, ...] = ()
    reader_version: ClassVar[int] = 1  # increment when the stored data change
    new_facts: Mapping[str, Any] = MappingProxyType({})  # about new samples, as in `facts`
    is_release = False  # whether the files belong to a release, located when they are read

    def __init__(
        self,
        *,
        val_path: str | None = None,
        test_path: str | None = None,
        allow_overlap: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._held_out = {"val": val_path, "test": test_path}
        self.allow_overlap = allow_overlap
        if not self.is_release:
            _ = self.split_off  # raise errors of the path immediately

    def folder_of(self, path: str) -> Path | None:
        """Return the folder of the user's files; files of a release are located elsewhere."""
        return None if self.is_release else super().folder_of(path)

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of `train`, and of `val` and `test` if provided."""
        location = required_path(self.given_path)
        files = {"train": location}
        if location.is_dir():
            files = _files_of_splits(location, self.suffixes)
        for name, given in self._held_out.items():
            if given is not None:
                files[name] = expand(given)
        for file in files.values():
            _check_file(file, self.suffixes)
        if location.is_dir():
            names = [path.name for path in _inside(location, self.suffixes)]
            warn_ignored(location, names, [path.name for path in files.values()])
        return files

    @cached_property
    def split_off(self) -> dict[str, float]:
        """Fraction of each split without a file, which is split off from the training file."""
        return self.missing_shares(self.files)

    # ---- implemented by subclasses -------------------------------------------------------------

    @abstractmethod
    def read(self, path: Path, labelled: bool = True, train: Rows | None = None) -> Rows:
        """Read a file; a DataError names the location of a fault.

        Args:
            labelled: Whether the file must have labels.
            train: The training file, whose columns are preferred to usual names.
        """

    def aligned(self, rows: Rows, train: Rows, path: Path) -> Rows:
        """Return the rows of the file `path` with the features and steps of those of training."""
        return rows

    @abstractmethod
    def key(self, value: Any) -> bytes:
        """Return the content of a sample as bytes, used for splitting and comparison."""

    @abstractmethod
    def store(
        self, writer: CacheWriter, parts: dict[str, list[Any]], targets: dict[str, list[int]]
    ) -> dict[str, Any]:
        """Add the samples of each split to a cache; return facts about them as JSON values."""

    @abstractmethod
    def store_new(
        self, writer: CacheWriter, name: str, values: list[Any], targets: list[int]
    ) -> dict[str, Any]:
        """Add new samples to a cache, with what was learned from training; return facts."""

    @abstractmethod
    def open_split(self, cache: Cache, name: str) -> Split:
        """Open one split in a cache."""

    def ordered(self, labels: set[str]) -> list[str]:
        """Return the label of each class number, given the labels that occur."""
        return _ordered(labels)

    # ---- cache ---------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        return {
            "files": {name: str(path.resolve()) for name, path in self.files.items()},
            "shares": self.split_off,
            "split_seed": self.split_seed if self.split_off else 0,
            "allow_overlap": self.allow_overlap,
            "reader_version": self.reader_version,
        }

    def sources(self) -> list[Path]:
        """Return the files of all splits."""
        return list(self.files.values())

    def build(self, writer: CacheWriter) -> None:
        """Read the files, number the classes and split the samples."""
        files = self.files
        train = self.read(files["train"])
        rows = {
            name: train if name == "train" else self.read(path, train=train)
            for name, path in files.items()
        }
        rows = {name: self.aligned(part, train, files[name]) for name, part in rows.items()}
        notes = list(dict.fromkeys(note for part in rows.values() for note in part.notes))
        for note in notes:
            _log.warning("%s", note)
        found = {label for part in rows.values() for label in part.labels}
        classes = self.ordered(found)
        if len(found) < 2:
            only = next(iter(found))
            raise DataError(f"{files['train']}: only one class, {only!r}; expected at least two")
        splits, moved = self._divided(rows)
        _require_learnable(splits)
        if not self.allow_overlap:
            digests = {
                name: [fingerprint(self.key(value)) for value in part.values]
                for name, part in splits.items()
            }
            locations = {name: part.locations for name, part in splits.items()}
            remedy = "remove them, or set allow_overlap to true"
            reject_overlap(digests, locations, self.what, remedy)
        numbers = {label: number for number, label in enumerate(classes)}
        parts = {name: part.values for name, part in splits.items()}
        targets = {name: [numbers[x] for x in part.labels] for name, part in splits.items()}
        facts = {"classes": classes, "notes": [*notes, *moved]}
        facts |= {"features": list(train.features), "steps": list(train.steps)}
        facts |= self.store(writer, parts, targets)
        writer.add_facts(facts)

    def _divided(self, rows: dict[str, Rows]) -> tuple[dict[str, Rows], list[str]]:
        """Split off the splits without a file; every class keeps samples for training."""
        splits, shares = dict(rows), self.split_off
        if not shares:
            return splits, []
        train = rows["train"]
        keys = [self.key(value) for value in train.values]
        what = str(self.files["train"])
        chosen = divide(what, keys, shares, self.split_seed)
        kept = {label for label, name in zip(train.labels, chosen, strict=True) if name == "train"}
        moved = [i for i, label in enumerate(train.labels) if label not in kept]
        stay = {keys[i] for i in moved}  # equal ones too
        chosen = ["train" if k in stay else name for k, name in zip(keys, chosen, strict=True)]
        for split in ("train", *shares):
            at = [i for i, name in enumerate(chosen) if name == split]
            if not at:
                raise DataError(
                    f"{what}: the classes are too small for a {split} split; provide more "
                    f"{self.what} of each, or a file for each split"
                )
            splits[split] = Rows(
                [train.values[i] for i in at],
                [train.labels[i] for i in at],
                [train.locations[i] for i in at],
                notes=[],
            )
        names = ", ".join(sorted({train.labels[i] for i in moved}))
        return splits, [f"classes too small to split, all in training: {names}"] if moved else []

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits."""
        self.notes = list(self.facts["notes"])
        return {name: self.open_split(cache, name) for name in SPLITS}

    # ---- new samples ---------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Open the splits, once; log the notes on new samples, also if their cache existed."""
        is_first = not self.splits
        super().setup(stage)
        if self.trainer is not None and not self.trainer.is_global_zero:
            return
        if is_first and self.new_path is not None:
            for note in self.new_facts["notes"]:
                _log.warning("%s", note)

    def new_split(self, path: Path) -> tuple[Split, list[str]]:
        """Return the samples of a file, from a cache that is built if necessary, and notes."""
        _check_file(path, self.suffixes)
        spec = new_spec(self, path, self.source_hashes)
        cache = ensure_cache(self.cache_dir, spec, partial(self._build_new, path))
        self.new_facts = cache.facts
        return self.open_split(cache, "test"), cache.facts["notes"]

    def _build_new(self, path: Path, writer: CacheWriter) -> None:
        """Read new samples and number their classes like those of training."""
        file = self.files["train"]
        train = self.read(file)
        rows = self.aligned(self.read(path, labelled=False, train=train), train, path)
        numbers = {label: number for number, label in enumerate(self.classes)}
        for label, location in zip(rows.labels, rows.locations, strict=False):
            if label not in numbers:
                is_table = path.suffix.lower() in TABLES
                other = ", or set label_column to the column of the labels" if is_table else ""
                raise DataError(
                    f"{location}: class {label!r} is missing from the training data; correct "
                    f"it{other}"
                )
        known = {fingerprint(self.key(value)) for value in train.values}
        seen = sum(fingerprint(self.key(value)) in known for value in rows.values)
        count = f"{path.name}: {seen} of {len(rows.values)} {self.what} are also in {file.name}"
        notes = [*rows.notes, *([count] if seen else ())]
        targets = [numbers[label] for label in rows.labels] or [UNLABELLED] * len(rows.values)
        writer.add_facts({"notes": notes, **self.store_new(writer, "test", rows.values, targets)})

    # ---- sizes ---------------------------------------------------------------------------------

    @property
    def classes(self) -> list[str]:
        """Label of each class number."""
        return list(self.facts["classes"])

    @property
    def num_classes(self) -> int:
        """Number of labels that occur."""
        return len(self.classes)

    # ---- report --------------------------------------------------------------------------------

    def shown(self, name: str, index: int) -> str:
        """Format a sample in one line."""
        raise NotImplementedError

    def size_lines(self) -> Iterator[str]:
        """Yield lines about the splits, and three samples."""
        for name, split in self.splits.items():
            yield f"{name}: {len(split)} {self.what}, {length_line(split.lengths, split)}"
            if is_labelled(split.targets):
                yield from class_lines(self.classes, split.targets)
        train = self.splits["train"]
        for index in np.linspace(0, len(train) - 1, min(SHOWN_SAMPLES, len(train))).astype(int):
            label = self.classes[train.targets[index]]
            yield f"sample {index}, {label}: {self.shown('train', index)}"


def _ordered(labels: set[str]) -> list[str]:
    """Sort labels: numbers by value, otherwise alphabetically."""
    try:
        return sorted(labels, key=lambda label: (float(label), label))
    except ValueError:
        return sorted(labels)


def _require_learnable(splits: dict[str, Rows]) -> None:
    known = set(splits["train"].labels)
    for part in splits.values():
        for label, location in zip(part.labels, part.locations, strict=True):
            if label not in known:
                raise DataError(
                    f"{location}: class {label!r} is missing from the training split, so it cannot "
                    "be learned; add samples of it there, or remove it here"
                )


def beginning(text: str, most: int) -> str:
    """Return the first characters of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]} …"


def length_line(lengths: np.ndarray[Any, Any], split: Any = None, what: str = "lengths") -> str:
    """Return a line with minimum, median, 95th percentile and maximum, and the truncated count."""
    low, median, high, most = np.percentile(lengths, (0, 50, 95, 100)).astype(int)
    cut = getattr(split, "num_cut", 0)
    text = f"{what} min {low}, median {median}, p95 {high}, max {most}"
    return f"{text}, truncated {cut}" if cut else text


def class_lines(classes: Sequence[str], targets: np.ndarray[Any, Any]) -> Iterator[str]:
    """Yield one line with the largest classes and their counts."""
    counts = np.bincount(targets, minlength=len(classes))
    shown = np.sort(np.argsort(-counts, kind="stable")[:_MOST_CLASSES])
    rest = len(classes) - len(shown)
    text = ", ".join(f"{classes[i]} {counts[i]}" for i in shown)
    yield f"  classes: {text}" + (f", and {rest} smaller ones" if rest else "")
