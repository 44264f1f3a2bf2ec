"""IMDB reviews: folder and archive, splits, lengths, and archives that must be refused."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from datamodules import Text
from datamodules.lra import imdb
from lit_probattn.base.errors import DataError
from tests.datamodules.lra.files import contents
from tests.support.paths import SHARED_DATA

REVIEWS = {
    f"aclImdb/{split}/{name}/{number}_{rating}.txt": (
        f"{split} {name} {number} ".encode() + bytes([0, 255, 0xC3, 0x28, 10 + number])
    )
    for split in ("train", "test")
    for name, rating in (("pos", 9), ("neg", 2))
    for number in (10, 2, 0, 1, 3, 7, 8, 21, 5, 4)
}
# Present in the official archive, and not labelled reviews.
OTHERS = {
    "aclImdb/README": b"about",
    "aclImdb/train/unsup/0_0.txt": b"no label",
    "aclImdb/train/urls_pos.txt": b"no review",
    "aclImdb/train/labeledBow.feat": b"9 0:9",
}


def write_folder(root: Path) -> Path:
    for name, data in (REVIEWS | OTHERS).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def write_archive(path: Path, extra: Iterable[tarfile.TarInfo] = (), reviews=None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "w:" + {"tgz": "gz"}.get(path.suffix[1:], path.suffix[1:])
    reviews = REVIEWS | OTHERS if reviews is None else reviews
    with tarfile.open(path, mode) as archive:
        for name, data in reviews.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in extra:
            archive.addfile(member)
    return path


reviews_of = partial(contents, shift=1)


def text(folder: Path, **options) -> Text:
    if options.get("split") != "test_as_val":
        options.setdefault("val_fraction", 0.2)
    return Text(data_dir=str(folder), **{"batch_size": 4, **options})


@pytest.mark.parametrize("name", ["v1.tar.gz", "labelled.tar.xz", "x.tar.bz2", "y.tgz"])
def test_archive_equals_folder(tmp_path: Path, name: str) -> None:
    folder = reviews_of(text(write_folder(tmp_path / "folder")))
    archive = write_archive(tmp_path / "archive" / f"aclImdb_{name}")
    assert reviews_of(text(archive.parent)) == folder
    assert [path.name for path in archive.parent.iterdir() if path.name != ".cache"] == [
        archive.name
    ]


def test_order_is_sorted_and_bytes_are_kept(tmp_path: Path) -> None:
    write_folder(tmp_path)  # which may itself be the data_dir
    test = reviews_of(text(tmp_path / "aclImdb", cache_dir=str(tmp_path / "caches")))["test"]
    numbers = ["0", "10", "1", "21", "2", "3", "4", "5", "7", "8"]  # by name: 10_ is before 1_
    expected = [
        (REVIEWS[f"aclImdb/test/{name}/{number}_{rating}.txt"], target)
        for target, (name, rating) in enumerate((("neg", 2), ("pos", 9)))
        for number in numbers
    ]
    assert test == expected


def test_held_out_is_a_part_of_train_by_seed(tmp_path: Path) -> None:
    write_folder(tmp_path)
    whole = text(tmp_path, split="test_as_val")
    everything = reviews_of(whole)
    assert everything["val"] == everything["test"]
    assert len(everything["train"]) == 20
    assert whole.select_on_test
    splits = reviews_of(text(tmp_path))
    assert [target for _, target in splits["val"]] == [0, 0, 1, 1]
    assert sorted(splits["train"] + splits["val"]) == sorted(everything["train"])
    assert not set(splits["val"]) & set(splits["test"])
    assert reviews_of(text(tmp_path)) == splits
    assert reviews_of(text(tmp_path, split_seed=1))["val"] != splits["val"]
    assert not text(tmp_path).select_on_test


def test_lengths_share_one_cache(tmp_path: Path) -> None:
    write_folder(tmp_path)
    long, short = text(tmp_path), text(tmp_path, max_length_tokens=9)
    assert (long.max_seq_len, short.max_seq_len, short.vocab_size) == (4096, 16, 512)
    assert text(tmp_path, max_length_tokens=1000).max_seq_len == 1024
    full, cut = reviews_of(long)["test"], reviews_of(short)["test"]
    assert [review[:9] for review, _ in full] == [review for review, _ in cut]
    assert len(list((tmp_path / ".cache").glob("text-*"))) == 1


def member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = "../../secret" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    return info


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (member("aclImdb/../../escaped.txt"), "outside the archive's folder"),
        (member("/tmp/escaped.txt"), "outside the archive's folder"),
        (member("aclImdb/train/pos/..\\..\\x.txt"), "outside the archive's folder"),
        (member("aclImdb/train/pos/99_9.txt", tarfile.LNKTYPE), "not a regular file"),
        (member("aclImdb/pipe", tarfile.FIFOTYPE), "not a regular file"),
        (member("aclImdb/test/neg/0_2.txt"), "duplicate .* in test/neg"),
        (member("aclImdb/test/neg/77_2.txt"), "test/neg/77_2.txt is empty"),
    ],
)
def test_a_bad_member_is_refused(tmp_path: Path, extra: tarfile.TarInfo, message: str) -> None:
    archive = write_archive(tmp_path / "in" / "aclImdb_v1.tar.gz", [extra])
    with pytest.raises(DataError, match=message):
        text(archive.parent).prepare_data()
    left = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*")}
    left = {parts for parts in left if parts[0] != ".cache"}
    assert left <= {("in",), ("in", "aclImdb_v1.tar.gz")}
    assert not list((tmp_path / ".cache").glob("text-*"))


def test_a_review_that_unpacks_to_too_much_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("datamodules.lra.imdb.MOST_REVIEW_BYTES", 100)
    message = r"test/neg/99_2.txt has 101 bytes; expected at most 100"
    archive = write_archive(
        tmp_path / "in" / "aclImdb_v1.tar.gz",
        reviews={**REVIEWS, "aclImdb/test/neg/99_2.txt": b"a" * 101},
    )
    with pytest.raises(DataError, match=message):
        text(archive.parent).prepare_data()
    (write_folder(tmp_path) / "aclImdb/test/neg/99_2.txt").write_bytes(b"a" * 101)
    with pytest.raises(DataError, match=message):
        text(tmp_path).prepare_data()


def test_only_regular_files_are_reviews(tmp_path: Path) -> None:
    before = reviews_of(text(write_folder(tmp_path)))
    os.mkfifo(tmp_path / "aclImdb/train/pos/99_9.txt")
    assert reviews_of(text(tmp_path)) == before


def test_several_archives_are_ambiguous(tmp_path: Path) -> None:
    for name in ("aclImdb_a.tar.gz", "aclImdb_b.tar.gz"):
        write_archive(tmp_path / name)
    with pytest.raises(DataError, match=r"several archives .*aclImdb_a\.tar\.gz, aclImdb_b"):
        text(tmp_path).prepare_data()
    official = write_archive(tmp_path / "aclImdb_v1.tar.gz")
    assert imdb.find_release(tmp_path) == official


def real_archive() -> Path:
    folder = Path(os.environ.get("LIT_PROBATTN_TEST_DATA", SHARED_DATA))
    archives = sorted(folder.glob("aclImdb*.tar.*")) if folder.is_dir() else []
    if not archives:
        pytest.skip("no IMDB archive in LIT_PROBATTN_TEST_DATA or ../shared/data")
    return archives[0]


def test_real_archive_has_the_expected_layout() -> None:
    """The first members only; the whole archive takes seconds."""
    with tarfile.open(real_archive(), "r|*") as archive:
        names = [entry.name for entry in islice(archive, 200) if entry.isfile()]
    matched = [name for name in names if imdb._MEMBER.fullmatch(name)]
    assert len(matched) > 100


@pytest.mark.slow
def test_real_archive_in_full(tmp_path: Path) -> None:
    data = Text(data_dir=str(real_archive().parent), cache_dir=str(tmp_path), split="test_as_val")
    data.setup()
    for name in ("train", "test"):
        assert np.bincount(data.split(name).targets).tolist() == [12500, 12500]
