"""Files of pictures: CIFAR-10, Pathfinder, ImageNet."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from datamodules import Image, ImageNet, Pathfinder
from datamodules.images.samples import open_image
from tests.bad_inputs.cases import Case, data_error, in_code
from tests.datamodules.images.made import picture, write_images
from tests.datamodules.lra.files import (
    cifar_batch,
    cifar_files,
    python2_pickle,
    write_cifar,
    write_cifar_archive,
    write_pathfinder,
)


@in_code
def cifar(folder: Path, content: bytes) -> None:
    """A release with another test file."""
    write_cifar(folder, cifar_files() | {"test_batch": content})
    Image(data_dir=str(folder)).prepare_data()


def _cut_archive(folder: Path) -> None:
    write_cifar_archive(folder)
    path = folder / "cifar-10-python.tar.gz"
    path.write_bytes(path.read_bytes()[:-30])
    Image(data_dir=str(folder)).prepare_data()


def _cifar_cases() -> Iterator[Case]:
    case = partial(Case, "CIFAR-10 (pickles)")
    labels = python2_pickle(cifar_batch(3, 1, labels=[1, 2, 10]))
    few = python2_pickle(cifar_batch(3, 1, labels=[1, 2]))
    yield case("nothing", data_error(lambda f: Image(data_dir=str(f)).prepare_data()))
    yield case("code in the pickle", cifar(b"cos\nsystem\n(S'echo'\ntR."))
    yield case("cut off", cifar(cifar_files()["test_batch"][:-40]))
    yield case("another pickle", cifar(pickle.dumps([1, 2], protocol=2)))
    yield case("a label of 10", cifar(labels))
    yield case("fewer labels than pictures", cifar(few))
    yield case("a damaged archive", data_error(_cut_archive))


@in_code
def pathfinder(folder: Path, change: Callable[[Path], object]) -> None:
    """A release that is changed before it is read."""
    change(write_pathfinder(folder))
    Pathfinder("hard", data_dir=str(folder)).prepare_data()


def _line(text: str) -> Callable[[Path], object]:
    return lambda place: (place / "metadata" / "0.npy").write_text(text)


def _save(name: str, size: tuple[int, int], mode: str) -> Callable[[Path], object]:
    return lambda place: picture(1, mode, size).save(place / "imgs" / "0" / name)


def _pathfinder_cases() -> Iterator[Case]:
    case = partial(Case, "Pathfinder (`.npy` lists, PNG)")
    damage = pathfinder(lambda p: (p / "imgs/0/sample_3.png").write_bytes(b"\x89PNG\r\n\x1a\nxx"))
    yield case("a line of three words", pathfinder(_line("imgs/0 sample_0.png 0\n")))
    yield case("a label of 2", pathfinder(_line("imgs/0 sample_0.png 0 2\n")))
    yield case("a picture outside", pathfinder(_line("../../etc passwd 0 1\n")))
    yield case(
        "an array of NumPy", pathfinder(lambda p: (p / "metadata/0.npy").write_bytes(b"\x93NUMPY"))
    )
    yield case("a picture is missing", pathfinder(lambda p: (p / "imgs/0/sample_3.png").unlink()))
    yield case("a picture is damaged", damage)
    yield case("another size", pathfinder(_save("sample_3.png", (16, 32), "L")))
    yield case("a coloured picture", pathfinder(_save("sample_3.png", (32, 32), "RGB")))


@in_code
def imagenet(folder: Path, change: Callable[[Path], object]) -> None:
    """Folders of pictures that are changed before they are listed."""
    change(write_images(folder))
    data = ImageNet(data_dir=str(folder), image_size=16, batch_size=4, num_workers=0)
    data.setup()
    list(data.val_dataloader())


def _imagenet_cases() -> Iterator[Case]:
    case = partial(Case, "ImageNet (pictures)")
    first = "val/n01/n01_0.JPEG"
    yield case("no folders", data_error(lambda f: ImageNet(data_dir=str(f)).setup()))
    yield case("an empty class folder", imagenet(lambda f: _empty(f / "train/n02")))
    yield case("a class that is not in training", imagenet(lambda f: (f / "val/n09").mkdir()))
    yield case("an empty picture", imagenet(lambda f: (f / first).write_bytes(b"")))
    yield case("a picture cut off", imagenet(lambda f: _cut(f / first)))
    yield case("text instead of a picture", imagenet(lambda f: (f / first).write_text("no")))
    yield case("a picture that is gone", data_error(lambda f: open_image(f / "gone.JPEG")))


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def cases() -> Iterator[Case]:
    """Every reader of pictures."""
    yield from _cifar_cases()
    yield from _pathfinder_cases()
    yield from _imagenet_cases()
