"""Pictures in class folders of one's own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules import ImageFolder
from lit_probattn.base.errors import DataError

NAMES = ("train", "val", "test")


def write(folder: Path, count: int = 20, seed: int = 0) -> Path:
    """Pictures of two classes in folders, one of them grey, one with transparency."""
    draw = np.random.default_rng(seed)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(0, 255, (20 + number, 30, 3)).astype(np.uint8)
            picture = Image.fromarray(pixels)
            mode = {1: "L", 2: "RGBA"}.get(number, "RGB")
            picture.convert(mode).save(folder / name / f"{seed}-{number}.png")
    return folder


def data(folder: Path, **options: Any) -> ImageFolder:
    made = ImageFolder(path=str(folder), **{"batch_size": 4, "image_size": 16, **options})
    made.prepare_data()
    made.setup()
    return made


def names_of(made: ImageFolder, name: str) -> set[str]:
    files = made._folders[name]
    return {str(files.path(i).relative_to(made.root)) for i in range(len(files))}


def test_class_folders_are_divided_by_content(tmp_path):
    made = data(write(tmp_path / "a"))
    found = [names_of(made, name) for name in NAMES]
    assert sum(map(len, found)) == len(set.union(*found)) == 40
    assert min(map(len, found)) > 0
    assert (made.classes, made.num_classes) == (["cat", "dog"], 2)
    # Names have no part in it, so another order of the files changes nothing.
    for path in list((tmp_path / "a").rglob("*.png")):
        path.rename(path.with_name(f"z{99 - int(path.stem[2:])}-{path.name}"))
    again = data(tmp_path / "a")
    for name, before in zip(NAMES, found, strict=True):
        assert {re.sub(r"z\d+-", "", x) for x in names_of(again, name)} == before


def test_folders_of_splits_are_the_splits(tmp_path):
    for seed, name in enumerate(("train", "valid", "test")):
        write(tmp_path / name, 4 + seed, seed)
    made = data(tmp_path)
    assert [len(made.split(name)) for name in NAMES] == [8, 10, 12]
    batch = next(iter(made.test_dataloader()))
    assert batch["inputs"].shape == (4, 3, 16, 16)
    assert names_of(made, "val") == {
        str(p.relative_to(tmp_path)) for p in tmp_path.glob("valid/*/*")
    }


def test_equal_files_are_in_one_split(tmp_path):
    write(tmp_path, 12)
    for path in list(tmp_path.rglob("*.png")):
        shutil.copy(path, path.with_name(f"copy-of-{path.name}"))
    made = data(tmp_path)
    for name in NAMES:
        found = names_of(made, name)
        assert found == {x.replace("copy-of-", "") for x in found} | {
            str(Path(x).with_name("copy-of-" + Path(x).name)) for x in found if "copy-of" not in x
        }


def test_exchanged_and_added_pictures_are_other_sources(tmp_path):
    folder = write(tmp_path / "a")
    first = data(folder).source_hashes
    assert first
    assert data(folder).source_hashes == first
    for old, new in (("cat", "x"), ("dog", "cat"), ("x", "dog")):
        (folder / old).rename(folder / new)
    exchanged = data(folder).source_hashes
    shutil.copy(folder / "cat/0-3.png", folder / "cat/more.png")
    added = data(folder).source_hashes
    shutil.copytree(folder, tmp_path / "copy")
    assert data(tmp_path / "copy").source_hashes == added
    assert len({str(sorted(hashes.items())) for hashes in (first, exchanged, added)}) == 3
    assert first.keys() == added.keys()


def test_two_folders_of_one_split_are_refused(tmp_path):
    for seed, name in enumerate(("train", "val", "validation", "test")):
        write(tmp_path / name, 3, seed)
    with pytest.raises(DataError, match="val and validation both denote val"):
        data(tmp_path)


def test_a_class_may_be_called_as_a_split(tmp_path):
    folder = write(tmp_path / "a")
    (folder / "dog").rename(folder / "train")
    assert data(folder).classes == ["cat", "train"]
    (folder / "train").rename(folder / "freight_train")
    assert data(folder).classes == ["cat", "freight_train"]


def test_unsorted_images_of_splits_are_not_two_classes(tmp_path):
    """Images in `train` and `test` without class folders: labels would be the splits."""
    folder = write(tmp_path / "a")
    (folder / "dog").rename(folder / "train")
    (folder / "cat").rename(folder / "test")
    with pytest.raises(DataError, match="the folders test, train denote splits, but contain no"):
        data(folder)


def test_folders_beside_those_of_splits_are_named(tmp_path, logged):
    write(tmp_path / "train", 20)
    write(tmp_path / "more", 3, 1)
    data(tmp_path)
    assert "more" in logged.text
    (tmp_path / "test").mkdir()
    with pytest.raises(DataError, match=r"test.*no class folders"):
        data(tmp_path)


def test_files_that_are_not_read_are_reported(tmp_path, logged):
    write(tmp_path / "mine")
    new = write(tmp_path / "new", 3, 1)
    for place in ("mine/cat/kittens/1.png", "mine/dog/1.tif", "mine/.git/x.png", "new/1.png"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        Image.new("RGB", (9, 9)).save(tmp_path / place)
    data(tmp_path / "mine", new_path=str(new)).setup("test")
    assert f"{tmp_path / 'mine'}: 2 files are not read, such as cat/kittens/1.png" in logged.text
    assert f"{new}: 1 files are not read, such as 1.png" in logged.text
