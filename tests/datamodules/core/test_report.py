"""The report on a prepared data set: sources, remarks, and comparison with published sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from datamodules import ListOps
from datamodules.core.base import Published
from datamodules.core.own import ClassMap, class_lines
from datamodules.core.report import compare, data_warnings, describe, outline
from tests.datamodules.core.test_base import synthetic


@pytest.mark.parametrize("count", [8, 9])
def test_up_to_eight_source_files_are_listed_and_more_are_counted(
    count: int, tmp_path: Path, monkeypatch
) -> None:
    sizes = {"num_train": 8, "num_val": 2, "num_test": 2, "min_length": 4, "max_length": 20}
    data = ListOps(**sizes, batch_size=2, num_processes=1, cache_dir=str(tmp_path))
    data.setup()
    cache, facts = data.open(), {"sha256": "0" * 64, "bytes": 5}
    sources = {f"{number}.tsv": facts for number in range(count)}
    other = replace(cache, meta={**cache.meta, "sources": sources})
    monkeypatch.setattr(data, "open", lambda: other)
    lines = list(describe(data))
    listed = [line.split()[-1] for line in lines if line.startswith(f"  sha256 {'0' * 64}")]
    assert listed == (list(sources) if count == 8 else [])
    assert ("  9 source files" in lines) == (count == 9)


def test_selection_on_the_test_split_is_noted() -> None:
    data, note = synthetic(), "note: validation uses the test split, so selection is on test data"
    assert note not in outline(data)
    data.select_on_test = True
    assert note in outline(data)


def test_each_split_has_its_sizes_and_lengths() -> None:
    data = synthetic()
    lines = list(outline(data))
    for name in ("train", "val", "test"):
        lengths = sorted(len(sample.values) for sample in data.splits[name])
        size, mean = len(lengths), sum(lengths) / len(lengths)
        at, rest = divmod(9 * (size - 1), 10)
        p90 = lengths[at] + int(rest / 10 * (lengths[at + 1] - lengths[at]))
        (line,) = [line for line in lines if line.startswith(f"{name}: ")]
        assert line == (
            f"{name}: {size} samples, lengths min {lengths[0]}, median {lengths[size // 2]}, "
            f"mean {mean:.1f}, p90 {p90}, max {lengths[-1]}, truncated 0"
        )


def test_twelve_classes_are_listed_and_more_are_counted() -> None:
    classes = [f"c{number}" for number in range(14)]
    targets = np.repeat(np.arange(14), [5, 1, 2, *[3] * 11])
    assert list(class_lines(classes[:12], targets[targets < 12])) == [
        f"  classes: c0 5, c1 1, c2 2, {', '.join(f'{name} 3' for name in classes[3:12])}"
    ]
    shown = [f"{name} 3" for name in classes[3:]]
    assert list(class_lines(classes, targets)) == [
        f"  classes: c0 5, {', '.join(shown)}, and 2 smaller ones"
    ]


def test_sizes_are_compared_with_those_published_in_total_and_per_class() -> None:
    data = synthetic()
    targets = np.arange(60) % data.num_classes
    data.splits["train"] = SimpleNamespace(targets=targets)
    each = 60 // data.num_classes
    data.published = {
        "train": Published(60, each),
        "val+test": Published(40),
        "test": Published(20),
    }
    lines = dict(compare(data))
    assert list(lines.values()) == [True, True, False]
    ends = [line.partition("; here ")[2] for line in lines]
    assert ends == ["60: equal", "40: equal", "19: DIFFERENT"]
    assert next(iter(lines)).startswith(f"published train: 60 ({each} per class);")
    targets[0] = targets[1]
    assert list(dict(compare(data)).values()) == [False, True, False]
    data.compare_sizes = lambda: [("published words: 5; here 5: equal", True)]
    assert next(compare(data)) == ("published words: 5; here 5: equal", True)


class Four(ClassMap):
    """Data of four classes, of which one split is as given."""

    classes, steps_per_epoch, batch_setting = list("abcd"), 1, ("batch_size", 1)  # type: ignore[assignment]

    def __init__(self, val: list[int]) -> None:
        self.targets = {"val": val, "train": [0, 1, 2, 3, 3], "test": [0, 1, 2, 3, 3]}

    def split(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(targets=np.array(self.targets[name]))


@pytest.mark.parametrize(
    ("val", "told"),
    [
        ([0, 1, 2, 3, 0], []),
        ([0, 1, 2, 2, 0], ["val has 5 samples, none of d"]),
        ([2, 2, 2, 2, 2], ["val has 5 samples, none of a and 2 more classes"]),
        ([0, 1, 2, 3], ["val has 4 samples, so its accuracy has a resolution of 25 %"]),
    ],
)
def test_small_splits_and_absent_classes_are_doubted(val, told) -> None:
    found = list(data_warnings(Four(val)))
    assert found == [f"{note}; provide more samples" for note in told]
