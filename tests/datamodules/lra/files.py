"""Small files in the exact formats of the Long Range Arena release and of CIFAR-10."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
from PIL import Image as PilImage

PAIR_FILES = {
    "train": "new_aan_pairs.train.tsv",
    "val": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}


def contents(data: Any, shift: int = 0) -> dict[str, list[tuple[bytes, int]]]:
    """The bytes (ids less `shift`) and the label of every sample, by the name of the split."""
    data.setup()
    samples = {name: [split[i] for i in range(len(split))] for name, split in data.splits.items()}
    return {
        name: [(bytes((sample.values - shift).tolist()), sample.target) for sample in part]
        for name, part in samples.items()
    }


# ---- Retrieval ----------------------------------------------------------------------------------


def pair_lines(count: int, seed: int, length: int = 30) -> list[bytes]:
    """Pairs whose label says whether both texts use the same letters."""
    rng = np.random.default_rng(seed)
    lines = []
    for row in range(count):
        label, kind = row % 2, int(rng.integers(2))
        texts = []
        for letters in (kind, kind if label else 1 - kind):
            alphabet = np.frombuffer((b"abcdefg ", b'tuvwxyz"')[letters], dtype=np.uint8)
            texts.append(rng.choice(alphabet, length - row % 5).tobytes())
        ids = f"P{row:02}-1000\tW{row:02}-2000".encode()
        lines.append(b"%d.0\t%b\t%b\t%b\n" % (label, ids, *texts))
    return lines


def write_pairs(folder: Path, train: int = 64, val: int = 9, test: int = 11) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate({"train": train, "val": val, "test": test}.items()):
        (folder / PAIR_FILES[split]).write_bytes(b"".join(pair_lines(count, seed)))
    return folder


# ---- Image --------------------------------------------------------------------------------------


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Pickles as Python 2 with protocol 2 did: str is bytes, and NumPy's old module names."""

    dispatch: ClassVar[dict] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_text(self, text: bytes | str) -> None:
        data = text.encode() if isinstance(text, str) else text
        short = len(data) < 256
        head = b"U" + bytes([len(data)]) if short else b"T" + struct.pack("<i", len(data))
        self.write(head + data)
        self.memoize(text)

    dispatch[bytes] = save_text
    dispatch[str] = save_text

    def save_global(self, obj: Any, name: str | None = None) -> None:
        module = {"numpy._core.multiarray": "numpy.core.multiarray"}.get(
            obj.__module__, obj.__module__
        )
        self.write(f"c{module}\n{name or obj.__qualname__}\n".encode())
        self.memoize(obj)

    dispatch[type] = save_global
    dispatch[FunctionType] = save_global


def python2_pickle(value: Any) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(value)
    return stream.getvalue()


def cifar_batch(count: int, seed: int, **changes: Any) -> dict[bytes, Any]:
    """Pictures whose class is their brightness."""
    rng = np.random.default_rng(seed)
    labels = [(row + seed) % 10 for row in range(count)]
    noise = rng.integers(0, 20, size=(count, 3072))
    data = (noise + 1 + 23 * np.array(labels)[:, None]).astype(np.uint8)
    names = [f"picture_{row}.png".encode() for row in range(count)]
    batch = {
        b"batch_label": b"training batch 1 of 5",
        b"labels": labels,
        b"data": data,
        b"filenames": names,
    }
    return batch | {key.encode(): value for key, value in changes.items()}


def cifar_files(per_batch: int = 10, test: int = 10) -> dict[str, bytes]:
    names = [f"data_batch_{number}" for number in range(1, 6)]
    files = {n: python2_pickle(cifar_batch(per_batch, seed)) for seed, n in enumerate(names)}
    files["test_batch"] = python2_pickle(cifar_batch(test, 9))
    meta = {b"label_names": [b"airplane"] * 10, b"num_cases_per_batch": 10000, b"num_vis": 3072}
    return files | {"batches.meta": python2_pickle(meta)}


def write_cifar(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    """Write the folder; returns the data_dir."""
    place = folder / "cifar-10-batches-py"
    place.mkdir(parents=True, exist_ok=True)
    for name, content in (cifar_files() if files is None else files).items():
        (place / name).write_bytes(content)
    return folder


def write_cifar_archive(
    folder: Path,
    files: dict[str, bytes] | None = None,
    change: Callable[[tarfile.TarInfo], None] = lambda member: None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name, content in (cifar_files() if files is None else files).items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            change(member)
            archive.addfile(member, io.BytesIO(content) if member.isfile() else None)
    return folder


# ---- Pathfinder ---------------------------------------------------------------------------------


def pathfinder_picture(side: int, label: int, seed: int) -> np.ndarray:
    """A bright (1) or a dark (0) picture with black parts."""
    rng = np.random.default_rng(seed)
    picture = rng.integers(10, 40, size=(side, side)) + 200 * label
    picture[rng.random((side, side)) < 0.3] = 0
    return picture.astype(np.uint8)


def write_pathfinder(
    folder: Path, count: int = 40, side: int = 32, difficulty: str = "curv_contour_length_14"
) -> Path:
    """Write two metadata files and their pictures; returns the folder of the difficulty."""
    place = folder / f"pathfinder{side}" / difficulty
    (place / "metadata").mkdir(parents=True, exist_ok=True)
    half = count // 2
    for number, rows in enumerate((range(half), range(half, count))):
        (place / "imgs" / str(number)).mkdir(parents=True, exist_ok=True)
        lines = []
        for row, seed in enumerate(rows):
            name, label = f"sample_{row}.png", seed % 2
            picture = PilImage.fromarray(pathfinder_picture(side, label, seed))
            picture.save(place / "imgs" / str(number) / name)
            lines.append(f"imgs/{number} {name} {row} {label} 1.8 14 4 5 1.5 2 1\n")
        (place / "metadata" / f"{number}.npy").write_text("".join(lines))
    return place
