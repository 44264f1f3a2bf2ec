"""Readers of binary files: archives, pictures, caches, checkpoints.

Formats with checksums must give the original data or an error. JPEG pictures, plain pickles and
Parquet pages have none: there an edit may change a value, and only the form of the answer is held.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
import zipfile
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
from tests.fuzzing.targets import Target, one_line, reader


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


CACHE = Target(
    "cache",
    edits([b"null", b"[]", b"{}", b"-1", b'"', b"1e999", b"\x93NUMPY"]),
    check_cache,
)
_WEIGHTS = {"w": torch.arange(60.0).reshape(5, 12), "b": torch.ones(3, dtype=torch.int64)}


def _checkpoint() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "step-00000003.ckpt"
        save_checkpoint({"global_step": 3, "state_dict": _WEIGHTS, "note": "x"}, path)
        return path.read_bytes()


@reader(
    "checkpoint",
    "step-00000003.ckpt",
    _checkpoint(),
    [b"PK\x03\x04", b"PK\x05\x06", b"\x00\x00"],
    load_checkpoint,
    refuses=CheckpointError,
)
def checkpoint(_: Path, loaded: dict[str, Any]) -> None:
    """Weights are those that were saved."""
    assert loaded["global_step"] == 3
    assert all(torch.equal(loaded["state_dict"][name], w) for name, w in _WEIGHTS.items())


# ---- pictures -------------------------------------------------------------------------------


def _picture(kind: str) -> bytes:
    stream = io.BytesIO()
    mode = "L" if kind == "PNG" else "RGB"
    PilImage.fromarray(pathfinder_picture(32, 1, 5)).convert(mode).save(stream, format=kind)
    return stream.getvalue()


@reader(
    "png",
    "sample_0.png",
    _picture("PNG"),
    [b"IDAT", b"IEND", b"\x00\x00\x00\x0d", b"tRNS", b"PLTE"],
    lambda path: list(images([Entry("0.npy:1", path, 1)], 32, _silent)),
)
def png(path: Path, found: list[Any]) -> None:
    """Pathfinder's pictures have checksums: pixels are the original's; empty files are skipped."""
    assert len(found) == (path.stat().st_size > 0)
    for picture in found:
        np.testing.assert_array_equal(picture[0], pathfinder_picture(32, 1, 5))


@reader(
    "jpeg",
    "n01_0.JPEG",
    _picture("JPEG"),
    [b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xc0", b"\xff\xdb"],
    open_image,
)
def jpeg(_: Path, picture: PilImage.Image) -> None:
    """A picture in RGB."""
    assert picture.mode == "RGB"
    assert np.asarray(picture).shape == (picture.height, picture.width, 3)


@reader(
    "cifar",
    "test_batch",
    python2_pickle(cifar_batch(2, 1)),
    [b"cos\nsystem\n", b"R", b".", b"\x80\x04", b"\x8e", b"O"],
    lambda path: cifar._parse(str(path), path.read_bytes()),
)
def cifar_file(_: Path, found: tuple[Any, Any]) -> None:
    """Pictures and labels of the right form; no code runs."""
    data, labels = found
    assert data.dtype == np.uint8
    assert data.shape[1:] == (3, 32, 32)
    assert len(data) == len(labels) > 0
    assert labels.max() < 10


# ---- archives -------------------------------------------------------------------------------

_REVIEWS = {
    f"aclImdb/{split}/{name}/{number}_7.txt": f"{split} {name} {number}".encode()
    for split in ("train", "test")
    for name in ("neg", "pos")
    for number in (0, 1)
}


def _archive(kind: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{kind}") as archive:
        for name, content in _REVIEWS.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def _check_reviews(_: Path, reviews: dict[str, list[Any]]) -> None:
    """Reviews are those of the archive."""
    found = {
        f"aclImdb/{split}/{imdb.CLASSES[target]}/{name}": text
        for split, entries in reviews.items()
        for target, name, text in entries
    }
    assert found == _REVIEWS


def _reviews(kind: str) -> Target:
    def read(path: Path) -> Any:
        return imdb.read_archive(path, _silent)

    name, words = f"tar.{kind}", [b"\x00\x00\x00\x00", b"\xff\xff\xff\xff"]
    return reader(name, f"aclImdb_v1.{name}", _archive(kind), words, read)(_check_reviews)


GZ, XZ, BZ2 = (_reviews(kind) for kind in ("gz", "xz", "bz2"))
_TEXT = "".join(f" word{i} and <unk> \n" for i in range(40))


def zip_content() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103/wiki.{name}.tokens", f"{name}\n{_TEXT}")
    return stream.getvalue()


def _text(source: TextSource) -> str:
    return "".join(block.text for block in source.blocks())


def _texts(path: Path) -> dict[str, tuple[type, str]]:
    found = find_release(path.parent, "wikitext-103")
    return {name: (type(source), _text(source)) for name, source in found.items()}


@reader(
    "zip",
    "wikitext-103-v1.zip",
    zip_content(),
    [b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"],
    _texts,
)
def zipped(_: Path, texts: dict[str, tuple[type, str]]) -> None:
    """Texts are those of the archive."""
    expected = {"train": "train", "val": "valid", "test": "test"}
    assert texts == {n: (PlainText, f"{word}\n{_TEXT}") for n, word in expected.items()}


def parquet_content() -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"text": _TEXT.splitlines(keepends=True)}), stream, row_group_size=16)
    return stream.getvalue()


@reader(
    "parquet",
    "train-00000-of-00001.parquet",
    parquet_content(),
    [b"PAR1", b"\x15\x00", b"\x00\x00\x00"],
    lambda path: _text(ParquetText((path,))),
)
def parquet(_: Path, text: str) -> None:
    """Lines of text."""
    assert isinstance(text, str)
