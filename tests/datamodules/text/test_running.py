"""Running text of one's own: a file, or a folder of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datamodules import OwnText
from lit_probattn.base.errors import DataError
from tests.datamodules.text.made import lines

SPLITS = ("train", "val", "test")


def data(path: Path, **options: Any) -> OwnText:
    made = OwnText(path=str(path), **{"segment_len": 7, "batch_size": 4, **options})
    made.setup()
    return made


def text_of(made: OwnText, name: str) -> str:
    return made.decode(made.cache.array(f"{name}_tokens").tolist())


def test_a_file_is_divided_into_pieces_of_whole_lines(tmp_path):
    content = "".join(f"line {i} äö\n" for i in range(400))
    path = tmp_path / "mine.txt"
    path.write_text(content, encoding="utf-8")
    made = data(path)
    found = {name: text_of(made, name).splitlines() for name in SPLITS}
    assert sorted(x for part in found.values() for x in part) == sorted(content.splitlines())
    assert all(part == sorted(part, key=lambda x: int(x.split()[1])) for part in found.values())
    assert len(found["train"]) > 250
    assert min(len(found["val"]), len(found["test"])) > 5


def test_many_files_stay_whole(tmp_path):
    for number in range(25):
        folder = tmp_path / f"part{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_text(f"a{number}\n" * 50)
    made = data(tmp_path)
    found = [set(text_of(made, name).split()) for name in SPLITS]
    assert all(found)
    assert set.union(*found) == {f"a{number}" for number in range(25)}
    assert sum(map(len, found)) == 25  # no file in two splits


def test_equal_files_are_in_one_split(tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"b{number // 3}\n" * 9)
    made = data(tmp_path)
    assert sum(len(set(text_of(made, name).split())) for name in SPLITS) == 20


def test_files_called_as_splits_are_the_splits(tmp_path):
    for name in ("train", "valid", "test"):
        (tmp_path / f"wiki.{name}.txt").write_text(f"{name} text\n" * 20)
    made = data(tmp_path, tokens="words")
    assert text_of(made, "val") == "<unk> text\n" * 20
    assert made.num_unknown == {"train": 0, "val": 20, "test": 20}


def write_splits(folder: Path, *further: str) -> None:
    for name in ("train", "valid", "test", *further):
        (folder / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(300)))


@pytest.mark.parametrize("further", ["README.md", "notes/a.txt"])
def test_a_file_of_no_split_is_named_and_ignored(tmp_path, further, logged):
    write_splits(tmp_path)
    path = tmp_path / further
    path.parent.mkdir(exist_ok=True)
    path.write_text("other text\n")
    made = data(tmp_path)
    assert f"{further} denotes no split" in logged.text
    for name, file in zip(SPLITS, ("train", "valid", "test"), strict=True):
        assert text_of(made, name) == (tmp_path / f"{file}.txt").read_text()
    hashes = made.present_hashes()
    path.write_text("changed\n")
    assert data(tmp_path).present_hashes() == hashes


def test_two_files_of_one_split_are_refused(tmp_path):
    write_splits(tmp_path, "my-val")
    with pytest.raises(DataError, match=r"my-val\.txt and valid\.txt both denote val"):
        data(tmp_path)


@pytest.mark.parametrize("names", [("corpus", "test"), ("wiki.valid", "wiki.test", "part 1")])
def test_a_folder_without_the_training_file_is_refused(tmp_path, names):
    """Divided, the test file would be trained on."""
    for name in names:
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(300)))
    with pytest.raises(DataError, match=r"has (wiki\.)?test\.txt, .*no file of train( and val)?;"):
        data(tmp_path)


def test_a_file_that_is_called_as_a_split_is_divided(tmp_path):
    """The others of its folder belong to no data at this path."""
    write_splits(tmp_path)
    made = data(tmp_path / "train.txt")
    found = [line for name in SPLITS for line in text_of(made, name).splitlines()]
    assert sorted(found) == sorted((tmp_path / "train.txt").read_text().splitlines())
    assert all(text_of(made, name) for name in SPLITS)


@pytest.mark.parametrize("tokens", ["characters", "words", "bytes"])
def test_every_unit_trains_on_any_text(tmp_path, tokens):
    """Words that only the validation text has fail no run."""
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"{x.strip()} only{i}\n" for i, x in enumerate(lines(300, 1))))
    made = data(path, tokens=tokens)
    assert made.vocab_size == len(made.vocabulary) == made.num_classes
    batch = next(iter(made.val_dataloader()))
    assert int(batch["inputs"].max()) < made.vocab_size
    assert (made.num_unknown["val"] > 0) == (tokens == "words")


def test_the_same_text_in_another_place_gives_the_same_splits(tmp_path):
    parts = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "mine.txt"
        path.write_text("".join(lines(300, 1)))
        parts.append(text_of(data(path), "val"))
    assert parts[0] == parts[1]
