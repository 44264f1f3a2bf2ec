"""CIFAR-10: files as Python 2 wrote them, grey values, splits, and pickles that must be refused."""

from __future__ import annotations

import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import Image
from datamodules.lra.image import to_grey
from lit_probattn.base.errors import DataError
from tests.datamodules.lra.files import (
    cifar_batch,
    cifar_files,
    contents,
    python2_pickle,
    write_cifar,
    write_cifar_archive,
)


def image(folder: Path, **options) -> Image:
    return Image(**{"data_dir": str(folder), "batch_size": 5, **options})


# What Python 2 wrote for {"data": array of one picture, "labels": [3]}, up to the picture and on.
BEFORE = (
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\n"
    b"q\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87"
    b"Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00"
)
AFTER = b"tbU\x06labelsq\x08]q\tK\x03au."


def test_what_python_2_wrote_is_read(tmp_path: Path) -> None:
    """Byte strings in place of text, and the old names of NumPy's modules."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    files = {name: BEFORE + bytes([10 * i]) * 3072 + AFTER for i, name in enumerate(names)}
    found = contents(image(write_cifar(tmp_path, files)))
    assert found["train"] + found["val"] == [(bytes([10 * i]) * 1024, 3) for i in range(5)]
    assert found["test"] == [(bytes([50]) * 1024, 3)]


def test_grey_is_luma_of_8_bit_pictures() -> None:
    colours = [(255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255), (10, 200, 30)]
    pictures = np.array(colours, dtype=np.uint8).reshape(-1, 3, 1, 1)
    # floor(255.5 y / 255) with y = 0.2989 r + 0.587 g + 0.114 b, by hand
    assert to_grey(pictures).reshape(-1).tolist() == [255, 0, 76, 149, 29, 124]
    same = np.arange(256, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, axis=1)
    assert to_grey(same).reshape(-1).tolist() == list(range(256)), "grey stays what it is"


def test_splits_are_the_first_90_and_the_last_10_percent(tmp_path: Path) -> None:
    found = contents(image(write_cifar(tmp_path)))
    batches = [cifar_batch(10, seed) for seed in range(5)]
    grey = [to_grey(b[b"data"].reshape(-1, 3, 32, 32)).reshape(10, -1) for b in batches]
    rows = [
        (picture.tobytes(), label)
        for pictures, batch in zip(grey, batches, strict=True)
        for picture, label in zip(pictures, batch[b"labels"], strict=True)
    ]
    assert found["train"] + found["val"] == rows
    assert {name: len(split) for name, split in found.items()} == {
        "train": 45,
        "val": 5,
        "test": 10,
    }
    assert [label for _, label in found["test"]] == [9, *range(9)]


def test_archive_equals_folder(tmp_path: Path) -> None:
    folder = contents(image(write_cifar(tmp_path / "folder")))
    archive = write_cifar_archive(tmp_path / "archive")
    assert contents(image(archive)) == folder
    left = [path.name for path in archive.iterdir() if path.name != ".cache"]
    assert left == ["cifar-10-python.tar.gz"]


def test_black_pixels_are_masked_as_published_or_kept(tmp_path: Path) -> None:
    files = cifar_files()
    black = cifar_batch(10, 0)
    black[b"data"][:, 5] = black[b"data"][:, 1024 + 5] = black[b"data"][:, 2048 + 5] = 0
    write_cifar(tmp_path, files | {"data_batch_1": python2_pickle(black)})
    masks = {}
    for choice in ("non_zero", "all"):
        data = image(tmp_path, key_mask=choice)
        data.setup()
        batch = data.collate()([data.split("train")[index] for index in range(3)])
        assert batch["inputs"].shape == (3, 1024)
        assert batch["inputs"].dtype == torch.int64
        masks[choice] = batch["key_mask"]
    assert masks["all"].all()
    assert (~masks["non_zero"]).nonzero().tolist() == [[0, 5], [1, 5], [2, 5]]
    assert (data.vocab_size, data.num_classes, data.max_seq_len) == (512, 10, 1024)


class Evil:
    """What a hostile pickle would do."""

    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize("write", [write_cifar, write_cifar_archive])
def test_a_forbidden_global_is_refused_unread(tmp_path: Path, write, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = pickle.dumps({"data": Evil(), "labels": [1]}, protocol=2)
    folder = write(tmp_path, cifar_files() | {"data_batch_3": evil})
    with pytest.raises(DataError, match=r"data_batch_3: the file references (posix|nt|os)\.system"):
        image(folder).prepare_data()
    assert not (tmp_path / "harmed").exists()
    assert not list((tmp_path / ".cache").glob("image-*"))


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\neval\n.",
        b"c__builtin__\ngetattr\n.",
        b"cnumpy\nload\n.",
        b"cnumpy.core.multiarray\nfrombuffer\n.",
        b"ccopy_reg\n_reconstructor\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x12ndarray.__reduce__\x93.",
    ],
)
def test_no_other_name_is_known(tmp_path: Path, content: bytes) -> None:
    write_cifar(tmp_path, cifar_files() | {"test_batch": content})
    with pytest.raises(DataError, match=r"test_batch: the file references .* run code"):
        image(tmp_path).prepare_data()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (cifar_batch(4, 0, data=np.zeros((4, 3071), np.uint8)), r"uint8 \(n, 3072\).* \(4, 3071\)"),
        (cifar_batch(4, 0, data=np.zeros((4, 3072), np.float32)), "received float32"),
        (cifar_batch(4, 0, labels=[1, b"2", 0, 3]), r"image 1: expected 0\.\.9, received b'2'"),
        ({b"data": np.zeros((1, 3072), np.uint8)}, "expected a dict with data and labels"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, batch, message: str) -> None:
    write_cifar(tmp_path, cifar_files() | {"data_batch_2": python2_pickle(batch)})
    with pytest.raises(DataError, match=message) as error:
        image(tmp_path).prepare_data()
    assert str(error.value).startswith(str(tmp_path / "cifar-10-batches-py" / "data_batch_2"))


def test_a_link_in_the_archive_is_refused(tmp_path: Path) -> None:
    def link(member: tarfile.TarInfo) -> None:
        if member.name.endswith("test_batch"):
            member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/passwd", 0

    write_cifar_archive(tmp_path, change=link)
    with pytest.raises(DataError, match="test_batch is a duplicate or not a regular file"):
        image(tmp_path).prepare_data()


def test_a_copy_of_another_file_is_refused(tmp_path: Path) -> None:
    files = cifar_files()
    files["data_batch_2"] = files["data_batch_1"]
    with pytest.raises(
        DataError, match=r"data_batch_2: the images duplicate those of data_batch_1"
    ):
        image(write_cifar(tmp_path, files)).prepare_data()
