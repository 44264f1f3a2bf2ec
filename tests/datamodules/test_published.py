"""Sizes and classes of the published data, with which `data check` compares."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import datamodules as of
from datamodules.text.fine_tuning.question_answering import SQUAD
from datamodules.text.fine_tuning.text_pairs import PAIRS

IMAGES = {"train": (45000, None), "val": (5000, None)}
WHOLE = {"train+val": (50000, 5000), "test": (10000, 1000)}
REVIEWS = (25000, 12500)
PIXELS = {"train": (160000, None), "val": (20000, None), "test": (20000, None)}


def of_splits(**sizes: int) -> dict[str, tuple[int, None]]:
    return {name: (size, None) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("cls", "options", "classes", "sizes"),
    [
        (of.ListOps, {}, 10, of_splits(train=96000, val=2000, test=2000)),
        (of.Text, {}, 2, {"train+val": REVIEWS, "test": REVIEWS}),
        (of.Text, {"split": "test_as_val"}, 2, dict.fromkeys(("train", "val", "test"), REVIEWS)),
        (of.Retrieval, {}, 2, of_splits(train=147086, val=18090, test=17437)),
        (of.Image, {}, 10, {**IMAGES, **WHOLE}),
        (of.Pathfinder, {"difficulty": "hard"}, 2, PIXELS),
    ],
)
def test_the_long_range_arena(
    cls: type, options: dict[str, Any], classes: int, sizes: dict[str, tuple[int, int | None]]
) -> None:
    """MGK, ICML 2022, and the benchmark's own tables."""
    data = cls(batch_size=2, **options)
    assert data.num_classes == classes
    assert {name: dataclasses.astuple(size) for name, size in data.published.items()} == sizes


def test_imagenet() -> None:
    """The validation images, 50 of each class, are the test split."""
    published = of.ImageNet(batch_size=2).published
    assert sorted(map(dataclasses.astuple, published.values())) == [(50000, 50), (1281167, None)]


def test_fine_tuning() -> None:
    """GLUE and SQuAD; MNLI's other genres are its test split."""
    assert {name: pairs.counts for name, pairs in PAIRS.items()} == {
        "mnli": {"train": 392702, "val": 9815, "test": 9832},
        "sst2": {"train": 67349, "val": 872},
        "qnli": {"train": 104743, "val": 5463},
    }
    assert {name: version.counts for name, version in SQUAD.items()} == {
        "1.1": {"train": 87599, "val": 10570},
        "2.0": {"train": 130319, "val": 11873},
    }
