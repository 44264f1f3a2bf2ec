"""Report on a prepared data set, compared with the published sizes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from datamodules.core.base import CachedDataModule, DataModule
from datamodules.core.new_samples import is_labelled
from datamodules.core.own import ClassMap

# Longer lists of source files are only counted.
_MOST_SOURCES = 8
# Fewer samples give an unreliable score.
_FEW = 5


def describe(data: DataModule) -> Iterator[str]:
    """Yield lines with sizes, classes, lengths and checksums of a DataModule after `setup`."""
    yield from outline(data)
    if isinstance(data, CachedDataModule):
        cache = data.open()
        yield f"cache: {cache.folder} (checksums verified)"
        sources, files = cache.meta["sources"], cache.meta["files"]
        if len(sources) > _MOST_SOURCES:
            yield f"  {len(sources)} source files"
            sources = {}
        for file, facts in {**sources, **files}.items():
            yield f"  sha256 {facts['sha256']}  {facts['bytes']:>11} bytes  {file}"


def outline(data: DataModule) -> Iterator[str]:
    """Yield the lines of `describe` without checksums."""
    name = type(data).__name__
    yield f"{name}: {data.headline}"
    if data.select_on_test:
        yield "note: validation uses the test split, so selection is on test data"
    yield from (f"note: {note}" for note in data.notes)
    setting, value = data.batch_setting
    yield f"steps per epoch: {data.steps_per_epoch} at {setting} {value}"
    yield from data.size_lines()
    yield from (f"warning: {doubt}" for doubt in data_warnings(data))


def data_warnings(data: DataModule) -> Iterator[str]:
    """Yield reasons against training on these data, one line each."""
    setting, value = data.batch_setting
    if data.steps_per_epoch == 0:
        yield (
            f"{len(data.split('train'))} training samples are fewer than one step at {setting} "
            f"{value}; lower {setting}"
        )
    if not isinstance(data, ClassMap):
        return
    for name in ("val", "test"):
        targets, classes = data.split(name).targets, data.classes
        if not is_labelled(targets):
            continue
        counts = np.bincount(targets, minlength=len(classes))
        note = f"{name} has {len(targets)} samples"
        if len(targets) < _FEW:
            note += f", so its accuracy has a resolution of {100 / len(targets):.0f} %"
        absent = [label for label, count in zip(classes, counts, strict=True) if not count]
        if absent:
            more = f" and {len(absent) - 1} more classes" if len(absent) > 1 else ""
            note += f", none of {absent[0]}{more}"
        if absent or len(targets) < _FEW:
            yield f"{note}; provide more samples"


def compare(data: DataModule) -> Iterator[tuple[str, bool]]:
    """Yield a line for each published size, and whether the size found is equal."""
    yield from data.compare_sizes()
    for name, expected in data.published.items():
        targets = np.concatenate([data.split(part).targets for part in name.split("+")])
        counts = np.bincount(targets, minlength=data.num_classes)
        size, per_class = f"{expected.num_samples}", expected.per_class
        equal = per_class is None or bool((counts == per_class).all())
        if per_class is not None:
            size += f" ({per_class} per class)"
        yield compare_size(name, size, len(targets), equal and len(targets) == expected.num_samples)


def compare_size(
    what: str, published: object, found: object, equal: bool | None = None
) -> tuple[str, bool]:
    """Return a line about a published size, and whether the size found is equal (by default ==)."""
    same = published == found if equal is None else equal
    return f"published {what}: {published}; here {found}: {'equal' if same else 'DIFFERENT'}", same
