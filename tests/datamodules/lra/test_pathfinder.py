"""Pathfinder: the released folders, splits, bad metadata and pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image as PilImage

from datamodules import Pathfinder
from datamodules.__main__ import main
from lit_probattn.base.errors import DataError, MissingDataError
from tests.datamodules.lra.files import contents, pathfinder_picture, write_pathfinder
from tests.support.helpers import error_of


def pathfinder(folder: Path, **options) -> Pathfinder:
    settings = {"data_dir": str(folder), "difficulty": "hard", "batch_size": 4}
    return Pathfinder(**{**settings, **options})


def expected(count: int, side: int = 32) -> list[tuple[bytes, int]]:
    return [(pathfinder_picture(side, i % 2, i).tobytes(), i % 2) for i in range(count)]


@pytest.mark.parametrize("place", [".", "lra_release", "lra_release/lra_release"])
def test_pictures_are_read_in_the_order_of_the_files(tmp_path: Path, place: str) -> None:
    write_pathfinder(tmp_path / place)
    found = contents(pathfinder(tmp_path, split="in_order"))
    assert found["train"] + found["val"] + found["test"] == expected(40)
    assert [len(split) for split in found.values()] == [32, 4, 4]
    inside = tmp_path / place / "pathfinder32"
    assert contents(pathfinder(inside, split="in_order", cache_dir=str(tmp_path / "c"))) == found


def test_metadata_files_are_sorted_by_number(tmp_path: Path) -> None:
    place = write_pathfinder(tmp_path) / "metadata"
    (place / "1.npy").rename(place / "10.npy")
    (place / "0.npy").rename(place / "9.npy")
    found = contents(pathfinder(tmp_path, split="in_order"))
    assert found["train"] + found["val"] + found["test"] == expected(40)


def test_difficulties_and_resolutions_are_folders(tmp_path: Path) -> None:
    for side, folder, name in (
        (32, "curv_baseline", "easy"),
        (32, "curv_contour_length_9", "intermediate"),
        (128, "curv_contour_length_14", "hard"),
    ):
        write_pathfinder(tmp_path, 10, side, folder)
        data = pathfinder(tmp_path, difficulty=name, resolution=side, split="in_order")
        assert contents(data)["train"] == expected(10, side)[:8]
        assert data.max_seq_len == side**2
    with pytest.raises(MissingDataError) as error:
        pathfinder(tmp_path).prepare_data()
    for part in (
        str(tmp_path / "pathfinder32/curv_contour_length_14"),
        "--difficulty hard --resolution 32",
        "--source generated",
        "nothing is downloaded",
    ):
        assert part in str(error.value)


def test_difficulty_has_no_default(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="difficulty"):
        Pathfinder(data_dir=str(tmp_path))  # type: ignore[call-arg]
    assert "difficulty" in error_of(["prepare", "pathfinder", "--data_dir", str(tmp_path)], main)


def test_shuffled_split_is_a_function_of_its_seed(tmp_path: Path) -> None:
    write_pathfinder(tmp_path)
    found = contents(pathfinder(tmp_path))
    assert contents(pathfinder(tmp_path, seed=5)) == found, "the order's seed is another one"
    assert [len(split) for split in found.values()] == [32, 4, 4]
    everything = found["train"] + found["val"] + found["test"]
    assert everything != expected(40)
    assert sorted(everything) == sorted(expected(40))
    assert contents(pathfinder(tmp_path, split_seed=1)) != found
    assert len(list((tmp_path / ".cache").glob("pathfinder-*"))) == 1, "splits share a cache"


def test_empty_pictures_are_skipped_and_counted(tmp_path: Path, capsys) -> None:
    place = write_pathfinder(tmp_path)
    (place / "imgs" / "0" / "sample_3.png").write_bytes(b"")
    data = pathfinder(tmp_path, split="in_order")
    found = contents(data)
    rows = expected(40)
    assert found["train"] + found["val"] + found["test"] == rows[:3] + rows[4:]
    sizes = {name: split.num_samples for name, split in data.published.items()}
    assert sizes == {"train": 159999, "val": 20000, "test": 20000}
    options = ["pathfinder", "--difficulty", "hard", "--data_dir", str(tmp_path)]
    assert main(["check", *options, "--batch_size", "4"]) == 1
    assert "note: 1 images are empty files" in capsys.readouterr().out


def test_black_pixels_are_masked_as_published_or_kept(tmp_path: Path) -> None:
    write_pathfinder(tmp_path)
    for choice in ("non_zero", "all"):
        data = pathfinder(tmp_path, key_mask=choice)
        data.setup()
        batch = next(iter(data.train_dataloader()))
        assert batch["inputs"].shape == batch["key_mask"].shape == (4, 1024)
        black = batch["inputs"] == 0
        assert black.any()
        assert torch.equal(batch["key_mask"], ~black | torch.tensor(choice == "all"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("imgs/7 sample_2.png 2 1 1.8\n", r".*imgs/7/sample_2\.png is missing"),
        ("\n", r"at least 4 words .* received 0"),
        ("imgs/0 sample_2.png 2 yes 1.8\n", "label must be 0 or 1, received 'yes'"),
        ("/etc passwd 2 1 1.8\n", "outside the release"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    metadata = write_pathfinder(tmp_path) / "metadata" / "0.npy"
    lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
    metadata.write_text("".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(DataError, match=message) as error:
        pathfinder(tmp_path).prepare_data()
    assert str(error.value).startswith(f"{metadata}:3: ")
    assert not list((tmp_path / ".cache").glob("pathfinder-*"))


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (PilImage.new("L", (128, 128)), "has mode L and 128 x 128"),
        (PilImage.new("1", (32, 32)), "has mode 1 and 32 x 32"),
        (None, "is corrupt"),  # its end is missing
    ],
)
def test_a_wrong_picture_is_named(tmp_path: Path, picture, message: str) -> None:
    place = write_pathfinder(tmp_path)
    path = place / "imgs" / "1" / "sample_2.png"
    if picture is None:
        path.write_bytes(path.read_bytes()[:-60])
    else:
        picture.save(path)
    with pytest.raises(DataError, match=message) as error:
        pathfinder(tmp_path).prepare_data()
    assert str(error.value).startswith(f"{place / 'metadata' / '1.npy'}:3: ")


def test_a_picture_that_unpacks_to_too_much_is_named(tmp_path: Path, monkeypatch) -> None:
    place = write_pathfinder(tmp_path)
    path = place / "imgs" / "1" / "sample_2.png"
    PilImage.new("L", (71, 67)).save(path)
    monkeypatch.setattr(PilImage, "MAX_IMAGE_PIXELS", 71 * 67 // 2 - 1)  # twice that is refused
    with pytest.raises(DataError, match=r"sample_2\.png is corrupt .*decompression bomb"):
        pathfinder(tmp_path).prepare_data()


def test_an_empty_list_of_pictures_is_refused(tmp_path: Path) -> None:
    place = write_pathfinder(tmp_path)
    (place / "metadata" / "1.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"1\.npy: the file is empty"):
        pathfinder(tmp_path).prepare_data()
