"""Splits by a hash of the content."""

from __future__ import annotations

import random

import numpy as np
import pytest

from datamodules import ImageFolder, LabelledTexts, OwnText
from datamodules.core.division import HeldOut, check_shares, divide
from lit_probattn.base.errors import DataError
from tests.datamodules.images.test_folder import write as write_images

SHARES = {"test": 0.2, "val": 0.1}


def keys(count: int) -> list[bytes]:
    return [f"sample {i}".encode() for i in range(count)]


def test_a_sample_stays_where_it_is_when_others_come_or_the_order_changes():
    before = dict(zip(keys(500), divide("x", keys(500), SHARES, 3), strict=True))
    more = keys(700)
    random.Random(0).shuffle(more)
    after = dict(zip(more, divide("x", more, SHARES, 3), strict=True))
    assert all(after[key] == split for key, split in before.items())
    other = divide("x", keys(500), SHARES, 4)
    assert other != list(before.values())


def test_shares_are_met_and_equal_samples_stay_together():
    found = divide("x", keys(5000) * 2, SHARES, 0)
    assert found[:5000] == found[5000:]
    assert found.count("test") / 10000 == pytest.approx(0.2, abs=0.02)
    assert found.count("val") / 10000 == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_no_split_of_a_few_samples_is_empty(seed):
    assert set(divide("x", keys(3), {"test": 0.01, "val": 0.01}, seed)) == {"train", "val", "test"}
    assert set(divide("x", keys(3), {"test": 0.5, "val": 0.49}, seed)) == {"train", "val", "test"}


def test_too_few_samples_and_wrong_shares_are_refused():
    with pytest.raises(
        DataError, match="x: 2 different samples among 18 cannot be split into train, test"
    ):
        divide("x", keys(2) * 9, SHARES, 0)
    with pytest.raises(DataError, match="val_fraction must be between 0 and 1, received 0"):
        check_shares(val_fraction=0, test_fraction=0.1)
    with pytest.raises(DataError, match=r"val_fraction=0.5 and test_fraction=0.5 leave no samples"):
        check_shares(val_fraction=0.5, test_fraction=0.5)
    for seed in (-(2**63), 2**63 - 1):
        divide("x", keys(9), SHARES, seed)
    for seed in (-(2**63) - 1, 2**63):
        with pytest.raises(DataError, match=f"split_seed must be within 64 bits, received {seed}"):
            divide("x", keys(9), SHARES, seed)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_data_hold_out_some_samples_and_not_all_unless_their_class_may_hold_out_none(share):
    with pytest.raises(DataError, match=rf"val_fraction must be between 0 and 1, received {share}"):
        HeldOut(val_fraction=share)
    may = type("May", (HeldOut,), {"may_hold_out_none": True})
    if share == 0:
        assert may(val_fraction=share).val_fraction == 0
    else:
        with pytest.raises(DataError, match="val_fraction must be at least 0 and below 1"):
            may(val_fraction=share)


@pytest.mark.parametrize(
    ("share", "chosen"), [(0.02, [0, 1, 1]), (0.4, [0, 1, 2]), (0.98, [0, 1, 4])]
)
def test_a_class_of_two_samples_has_one_in_each_part(share, chosen):
    targets = np.repeat([3, 0, 7], [1, 2, 5])
    held_out = HeldOut(val_fraction=share).held_out(targets)
    assert [int(held_out[targets == target].sum()) for target in (3, 0, 7)] == chosen
    with pytest.raises(DataError, match=r"no class has two training samples.*; add samples$"):
        HeldOut(val_fraction=share).held_out(np.arange(4))


def given_files(folder, name):
    """A data module of `name` with a file or folder for each split."""
    folder.mkdir()
    if name == "own_images":
        for number, split in enumerate(("train", "val", "test")):
            write_images(folder / split, count=8, seed=number)
        return ImageFolder, {"path": str(folder)}
    for number, split in enumerate(("train", "val", "test")):
        rows = [f"w{number}x{i} text,{'ab'[i % 2]}" for i in range(9)]
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
        (folder / f"{split}.txt").write_text("\n".join(rows * 9) + "\n")
    if name == "own_text":
        return OwnText, {"path": str(folder), "segment_len": 5}
    return LabelledTexts, {"path": str(folder)}


@pytest.mark.parametrize("name", ["own_texts", "own_text", "own_images"])
def test_settings_of_a_division_that_is_not_made_are_named(name, tmp_path, logged):
    kind, given = given_files(tmp_path / "data", name)
    for settings in ({}, {"val_fraction": 0.3}, {"test_fraction": 0.2, "split_seed": 3}):
        kind(**given, cache_dir=str(tmp_path / "cache"), **settings).setup()
        named = {line.split("=")[0] for line in logged.messages if "has no effect" in line}
        assert named == settings.keys()
        logged.records.clear()


def test_a_fraction_of_a_split_with_a_file_is_named(tmp_path, logged):
    given_files(tmp_path / "data", "own_texts")
    files = {n: str(tmp_path / "data" / f"{n}.csv") for n in ("train", "val")}
    settings = {"val_fraction": 0.3, "test_fraction": 0.2, "split_seed": 3}
    data = LabelledTexts(path=files["train"], val_path=files["val"], **settings)
    assert [line for line in logged.messages if "has no effect" in line] == [
        "val_fraction=0.3 has no effect: the validation split has files"
    ]
    assert data.split_off == {"test": 0.2}
