"""Readers of binary files: archives, pictures, caches, checkpoints.

Formats with checksums must give the original data or an error. JPEG pictures, plain pickles and
Parquet pages have none: there an edit may change a value, and only the form of the answer is held.
"""

from __future__ import annotations

import functools
import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image as PilImage

from datamodules.core.cache import CacheSpec, CacheWriter, ensure_cache, open_cache
from datamodules.images.samples import open_image
from datamodules.lra import cifar, imdb
from datamodules.lra.pathfinder_release import Entry, images
from datamodules.text.source import ParquetText, PlainText, TextSource
from datamodules.text.wikitext103 import find_release
from lit_probattn.base.errors import DataError
from lit_probattn.training.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from tests.datamodules.lra.files import cifar_batch, pathfinder_picture, python2_pickle
from tests.fuzzing.mutations import Edit, apply, edits
from tests.fuzzing.targets import Target, one_line


def _silent(_: int) -> None:
    """No progress."""


# ---- caches and checkpoints -----------------------------------------------------------------

_SPEC = CacheSpec("fuzzed", {"count": 7, "name": "x"})
_ARRAYS = {"a": np.arange(7), "b": np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)}


def _build(writer: CacheWriter) -> None:
    for name, array in _ARRAYS.items():
        writer.add(name, array)


def check_cache(changes: list[Edit], folder: Path) -> str:
    """Arrays are those that were written, whichever file was edited."""
    ensure_cache(folder, _SPEC, _build)
    files = sorted((folder / _SPEC.name).iterdir())
    path = files[changes[0].place % len(files)]
    path.write_bytes(apply(path.read_bytes(), changes))
    try:
        cache = open_cache(folder, _SPEC)
    except DataError as error:
        return one_line(error, folder / _SPEC.name)
    for name, array in _ARRAYS.items():
        np.testing.assert_array_equal(cache.array(name), array)
    return "accepted"


_WEIGHTS = {"w": torch.arange(60.0).reshape(5, 12), "b": torch.ones(3, dtype=torch.int64)}


@functools.cache
def _checkpoint() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "step-00000003.ckpt"
        save_checkpoint({"global_step": 3, "state_dict": _WEIGHTS, "note": "x"}, path)
        return path.read_bytes()


def check_checkpoint_file(changes: list[Edit], folder: Path) -> str:
    """Weights are those that were saved, and the error names the file."""
    path = folder / "step-00000003.ckpt"
    path.write_bytes(apply(_checkpoint(), changes))
    try:
        loaded = load_checkpoint(path)
    except CheckpointError as error:
        return one_line(error, path)
    assert loaded["global_step"] == 3
    assert all(torch.equal(loaded["state_dict"][name], w) for name, w in _WEIGHTS.items())
    return "accepted"


# ---- pictures -------------------------------------------------------------------------------


@functools.cache
def _picture(kind: str) -> bytes:
    stream = io.BytesIO()
    mode = "L" if kind == "PNG" else "RGB"
    PilImage.fromarray(pathfinder_picture(32, 1, 5)).convert(mode).save(stream, format=kind)
    return stream.getvalue()


def check_png(changes: list[Edit], folder: Path) -> str:
    """Pathfinder's pictures have checksums: pixels are the original's."""
    path = folder / "sample_0.png"
    path.write_bytes(apply(_picture("PNG"), changes))
    try:
        found = list(images([Entry("0.npy:1", path, 1)], 32, _silent))
    except DataError as error:
        return one_line(error, path)
    if not found:
        assert path.stat().st_size == 0
        return "skipped"
    np.testing.assert_array_equal(found[0][0], pathfinder_picture(32, 1, 5))
    return "accepted"


def check_jpeg(changes: list[Edit], folder: Path) -> str:
    """A picture in RGB, or an error that names the file."""
    path = folder / "n01_0.JPEG"
    path.write_bytes(apply(_picture("JPEG"), changes))
    try:
        picture = open_image(path)
    except DataError as error:
        return one_line(error, path)
    assert picture.mode == "RGB"
    assert np.asarray(picture).shape == (picture.height, picture.width, 3)
    return "accepted"


@functools.cache
def _pickle() -> bytes:
    return python2_pickle(cifar_batch(2, 1))


def check_cifar(changes: list[Edit], folder: Path) -> str:
    """Pictures and labels of the right form, or an error; no code runs."""
    content = apply(_pickle(), changes)
    try:
        data, labels = cifar._parse("test_batch", content)
    except DataError as error:
        return one_line(error)
    assert data.dtype == np.uint8
    assert data.shape[1:] == (3, 32, 32)
    assert len(data) == len(labels) > 0
    assert labels.max() < 10
    return "accepted"


# ---- archives -------------------------------------------------------------------------------

_REVIEWS = {
    f"aclImdb/{split}/{name}/{number}_7.txt": f"{split} {name} {number}".encode()
    for split in ("train", "test")
    for name in ("neg", "pos")
    for number in (0, 1)
}


@functools.cache
def _archive(kind: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{kind}") as archive:
        for name, content in _REVIEWS.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def _check_reviews(kind: str) -> Callable[[list[Edit], Path], str]:
    def check(changes: list[Edit], folder: Path) -> str:
        """Reviews are those of the archive."""
        path = folder / f"aclImdb_v1.tar.{kind}"
        path.write_bytes(apply(_archive(kind), changes))
        try:
            reviews = imdb.read_archive(path, _silent)
        except DataError as error:
            return one_line(error, path)
        found = {
            f"aclImdb/{split}/{imdb.CLASSES[target]}/{name}": text
            for split, entries in reviews.items()
            for target, name, text in entries
        }
        assert found == _REVIEWS
        return "accepted"

    return check


_TEXT = "".join(f" word{i} and <unk> \n" for i in range(40))


@functools.cache
def zip_content() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103/wiki.{name}.tokens", f"{name}\n{_TEXT}")
    return stream.getvalue()


def _text(source: TextSource) -> str:
    return "".join(block.text for block in source.blocks())


def check_zip(changes: list[Edit], folder: Path) -> str:
    """Texts are those of the archive."""
    path = folder / "wikitext-103-v1.zip"
    path.write_bytes(apply(zip_content(), changes))
    try:
        found = find_release(folder, "wikitext-103")
        texts = {name: _text(source) for name, source in found.items()}
    except DataError as error:
        return one_line(error, path)
    expected = {"train": "train", "val": "valid", "test": "test"}
    assert texts == {name: f"{word}\n{_TEXT}" for name, word in expected.items()}
    assert all(isinstance(source, PlainText) for source in found.values())
    return "accepted"


@functools.cache
def parquet_content() -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"text": _TEXT.splitlines(keepends=True)}), stream, row_group_size=16)
    return stream.getvalue()


def check_parquet(changes: list[Edit], folder: Path) -> str:
    """Lines of text, or an error that names the file."""
    path = folder / "train-00000-of-00001.parquet"
    path.write_bytes(apply(parquet_content(), changes))
    try:
        text = _text(ParquetText((path,)))
    except DataError as error:
        return one_line(error, path)
    assert isinstance(text, str)
    return "accepted"


def targets() -> Iterator[Target]:
    """All of them."""

    def target(name: str, check: Any, *words: bytes) -> Target:
        return Target(name, edits(words or [b"\x00\x00\x00\x00", b"\xff\xff\xff\xff"]), check)

    yield target("cache", check_cache, b"null", b"[]", b"{}", b"-1", b'"', b"1e999", b"\x93NUMPY")
    yield target("checkpoint", check_checkpoint_file, b"PK\x03\x04", b"PK\x05\x06", b"\x00\x00")
    yield target("png", check_png, b"IDAT", b"IEND", b"\x00\x00\x00\x0d", b"tRNS", b"PLTE")
    yield target(
        "jpeg", check_jpeg, b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xc0", b"\xff\xdb"
    )
    yield target("cifar", check_cifar, b"cos\nsystem\n", b"R", b".", b"\x80\x04", b"\x8e", b"O")
    for kind in ("gz", "xz", "bz2"):
        yield target(f"tar.{kind}", _check_reviews(kind))
    yield target("zip", check_zip, b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06")
    yield target("parquet", check_parquet, b"PAR1", b"\x15\x00", b"\x00\x00\x00")
