"""ImageNet: folders, decoding, bad files, the class map."""

from __future__ import annotations

import os
import re
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import ImageNet
from datamodules.__main__ import main
from datamodules.core.order import FILL
from datamodules.images.samples import open_image
from lit_probattn.base.errors import DamagedError, DataError, MissingDataError
from tests.datamodules.images.made import CLASSES, imagenet, picture, write_images
from tests.support.orders import global_batch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_images(tmp_path / "data")


def test_splits_and_batches(root: Path):
    data = imagenet(root)
    assert (data.num_classes, data.classes, data.num_features) == (3, list(CLASSES), 3)
    assert data.split("train").targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.split("val").targets.tolist() == data.split("test").targets.tolist()
    assert data.steps_per_epoch == 3
    batch = next(iter(data.train_dataloader()))
    assert batch["inputs"].shape == (4, 3, 16, 16)
    assert batch["inputs"].dtype == torch.float32
    assert batch["sample_ids"].tolist() == global_batch(12, 4, 0, 0, 0).tolist()
    assert batch["target"].tolist() == [i // 4 for i in batch["sample_ids"].tolist()]
    (first, second) = data.val_dataloader()
    assert second["sample_ids"].tolist() == [4, 5]
    assert set(first) == {"inputs", "key_mask", "target", "sample_ids"}


def test_evaluation_is_the_centre_of_the_resized_picture(root: Path):
    """Every pixel by torchvision's own steps, normalised by hand."""
    from torchvision.transforms import functional as tv

    split = imagenet(root).split("val")
    read = Image.open(split.files.path(3)).convert("RGB")
    small = tv.resize(read, 18, tv.InterpolationMode.BICUBIC)  # 16 / 0.875, rounded down
    pixels = tv.to_tensor(tv.center_crop(small, 16))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (pixels - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(split[3].image, expected, rtol=0, atol=1e-5)


def test_training_without_augmentation_sees_what_evaluation_sees(root: Path):
    data = imagenet(root, augmentation="none")
    source = data.split("val").files.path(2)
    shutil.copy(source, data.split("train").files.path(7))
    assert torch.equal(data.split("train")[7].image, data.split("val")[2].image)


def test_fill_up_rows_read_no_file(root: Path):
    split = imagenet(root).split("val")
    shutil.rmtree(root / "val")
    sample = split[FILL]
    assert (sample.sample_id, sample.image.shape) == (FILL, (3, 16, 16))


# ---- kinds of pictures -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA", "LA", "1", "I;16"])
def test_grey_cmyk_palette_and_transparent_pictures(tmp_path: Path, mode: str):
    path = tmp_path / ("a.JPEG" if mode in ("L", "CMYK") else "a.png")
    source = picture(3, "L" if mode == "I;16" else mode if mode != "LA" else "L")
    if mode == "I;16":
        source = Image.fromarray(np.asarray(source).astype(np.uint16) * 257)
    elif mode == "LA":
        source = picture(3, "RGBA").convert("LA")
    source.save(path)
    with Image.open(path) as stored:
        assert stored.mode in ((mode, "I") if mode == "I;16" else (mode,))  # "I" in old releases
    read = open_image(path)
    assert (read.mode, read.size) == ("RGB", (40, 30))
    values = np.asarray(read)
    assert values.std() > 20
    grey = mode in ("L", "LA", "1", "I;16")
    assert (values[..., 0] == values[..., 2]).all() == grey
    if mode == "I;16":
        assert (values[..., 0] == np.asarray(picture(3, "L"))).all()


def test_a_png_with_a_wrong_checksum_is_damaged(tmp_path: Path):
    path = tmp_path / "a.png"
    picture(3).save(path)
    raw = bytearray(path.read_bytes())
    raw[raw.rindex(b"IEND") - 5] ^= 1  # the last byte of the checksum of the pixels
    path.write_bytes(raw)
    with pytest.raises(DamagedError, match=r"a\.png"):
        open_image(path)


def test_cmyk_keeps_its_colours(tmp_path: Path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "red.JPEG")
    red = np.asarray(open_image(tmp_path / "red.JPEG")).reshape(-1, 3).mean(0)
    assert red[0] > 230
    assert red[1:].max() < 30


def test_transparent_pixels_are_white(tmp_path: Path):
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert (np.asarray(open_image(tmp_path / "a.png")) == 255).all()


# ---- bad files -------------------------------------------------------------------------------


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b""}[kind])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_picture_is_one_line_with_its_name(root, num_workers):
    path = root / "val" / "n02" / "n02_1.JPEG"
    damage(path, "cut")
    data = imagenet(root, num_workers=num_workers)
    with pytest.raises(DataError, match="truncated") as caught:
        list(data.val_dataloader())
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "EPS"])
def test_pictures_of_other_formats_are_refused(tmp_path: Path, kind):
    """By content and not by name: an EPS would start Ghostscript."""
    path = tmp_path / "n01_0.JPEG"
    Image.new("RGB", (8, 8)).save(path, format=kind)
    with pytest.raises(DamagedError, match="unsupported image format"):
        open_image(path)


def test_check_lists_every_damaged_picture(root: Path, capsys):
    damage(root / "train" / "n01" / "n01_0.JPEG", "cut")
    damage(root / "train" / "n03" / "n03_2.JPEG", "empty")
    options = ["--data_dir", str(root), "--batch_size", "4"]
    assert main(["check", "imagenet", *options, "--verify", "true"]) == 1
    printed = capsys.readouterr().out
    for line in (
        "train: 12 images, 3 classes, per class min 4, median 4, max 4",
        "  n01 4  n02 4  n03 4",
        "published classes: 1000; here 3: DIFFERENT",
        "published train: 1281167; here 12: DIFFERENT",
        "published test: 50000 (50 per class); here 6: DIFFERENT",
        "train: 12 images read, 2 corrupt",
        "val: 6 images read, 0 corrupt",
        "selection is on test data",
    ):
        assert line in printed
    assert printed.count("unreadable image") == 2
    assert main(["check", "imagenet", *options]) == 1
    assert "damaged" not in capsys.readouterr().out


def test_missing_folders_are_named(tmp_path: Path):
    (tmp_path / "train").mkdir()
    with pytest.raises(MissingDataError, match=r"found only .*train"):
        imagenet(tmp_path)
    (tmp_path / "val").mkdir()
    (tmp_path / "train" / "n01.tar").touch()
    with pytest.raises(DataError, match=r"no class folders; unpack each archive .*n01\.tar"):
        imagenet(tmp_path)


def test_only_regular_files_are_pictures(root: Path):
    before = imagenet(root)
    os.mkfifo(root / "train" / before._folders["train"].classes[0] / "x.JPEG")
    (root / "train" / before._folders["train"].classes[0] / "y.JPEG").symlink_to("/dev/zero")
    after = imagenet(root)
    assert len(after._folders["train"]) == len(before._folders["train"])


# ---- class map and held-out pictures -----------------------------------------------------------


def test_class_map_is_saved_and_compared(root: Path):
    state = imagenet(root).state_dict()
    assert state == {"classes": ["n01", "n02", "n03"]}
    imagenet(root).load_state_dict(state)
    for split in ("train", "val"):
        (root / split / "n02").rename(root / split / "n04")
    with pytest.raises(DataError, match="class 1 was n02 and is now n03"):
        imagenet(root).load_state_dict(state)


def test_held_out_pictures_are_not_trained_on(root: Path):
    data = imagenet(root, held_out_per_class=1)
    assert not data.select_on_test
    assert imagenet(root).select_on_test
    train, val = (data.split(name).files for name in ("train", "val"))
    assert val.targets.tolist() == [0, 1, 2]
    trained, held = ({f.path(i) for i in range(len(f))} for f in (train, val))
    assert len(trained) == 9
    assert len(trained | held) == 12
    assert len(data.split("test")) == 6
    with pytest.raises(DataError, match="leaves class n01, which has 4 images, none"):
        imagenet(root, held_out_per_class=4)


# ---- the flat validation folder ----------------------------------------------------------------


def flatten(root: Path) -> list[str]:
    """Move the validation pictures into one folder, classes in turn; returns their classes."""
    labels = []
    for number in range(6):
        name = CLASSES[(number * 2) % 3]
        source = root / "val" / name / f"{name}_{number // 3}.JPEG"
        source.rename(root / "val" / f"ILSVRC2012_val_{number + 1:08d}.JPEG")
        labels.append(name)
    for name in CLASSES:
        (root / "val" / name).rmdir()
    return labels


def write_kit(folder: Path, labels: list[str]) -> None:
    """Write the development kit's files; numbers are not in the order of the names."""
    from scipy.io import savemat

    folder.mkdir(parents=True, exist_ok=True)
    numbers = {"n01": 2, "n02": 3, "n03": 1, "n99": 4}
    kinds = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("num_children", "f8")]
    rows = [(n, name, 5 if name == "n99" else 0) for name, n in numbers.items()]
    savemat(folder / "meta.mat", {"synsets": np.array(rows, dtype=kinds)})
    text = "\n".join(str(numbers[label]) for label in labels)
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text(text + "\n")


@pytest.mark.parametrize("form", ["kit", "names", "table"])
def test_flat_validation_folder(root: Path, form: str):
    before = imagenet(root).split("val")
    expected = {before[i].image.sum().item(): before[i].target for i in range(6)}
    labels = flatten(root)
    if form == "kit":
        write_kit(root / "ILSVRC2012_devkit_t12" / "data", labels)
    elif form == "names":
        (root / "ILSVRC2012_validation_ground_truth.txt").write_text("\n".join(labels))
    else:
        rows = [f"ILSVRC2012_val_{i + 1:08d},{name} 1 2 3 4" for i, name in enumerate(labels)]
        text = "\n".join(["ImageId,PredictionString", *reversed(rows)])
        (root / "LOC_val_solution.csv").write_text(text)
    found = imagenet(root).split("val")
    assert {found[i].image.sum().item(): found[i].target for i in range(6)} == expected


def test_ground_truth_that_does_not_fit(root: Path):
    labels = flatten(root)
    with pytest.raises(MissingDataError, match="has no class folders, so a file with the classes"):
        imagenet(root)
    kit = root / "ILSVRC2012_validation_ground_truth.txt"
    write_kit(root, labels[:5])
    with pytest.raises(DataError, match=f"{kit} has 5 lines, but .* has 6 images"):
        imagenet(root)
    write_kit(root, labels)
    (root / "meta.mat").unlink()
    with pytest.raises(MissingDataError, match=r"meta\.mat not found"):
        imagenet(root)
    kit.write_text("\n".join([*labels[:5], "n77"]))
    with pytest.raises(DataError, match=r"1 only in .*val \(n77\)"):
        imagenet(root)
    kit.write_text("\n".join(labels))
    (root / "val" / "ILSVRC2012_val_00000002.JPEG").rename(root / "val" / "extra_00000009.JPEG")
    with pytest.raises(DataError, match="is at position"):
        imagenet(root)
    with pytest.raises(MissingDataError, match="ground-truth file not found"):
        imagenet(root, ground_truth=str(root / "nowhere.txt"))


def test_ground_truth_beside_class_folders_is_refused(root: Path):
    with pytest.raises(DataError, match=r"val has class folders, which contradicts ground_truth="):
        imagenet(root, ground_truth=str(root / "classes.txt"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"color_jitter": 0.3}, "color_jitter=0.3 has no effect with auto_augment=rand-m9"),
        ({"color_jitter": 0.3, "auto_augment": "3a-mstd0.5"}, None),
        ({"color_jitter": 0.3, "auto_augment": None}, None),
        ({"erase": 0.1, "augmentation": "none"}, "erase=0.1 has no effect with augmentation=none"),
        ({"mix_switch": 0.1, "cutmix": 0.0}, "mix_switch=0.1 has no effect with cutmix=0.0"),
        ({"mix_switch": 0.1}, None),
    ],
)
def test_settings_that_timm_would_not_use_are_named(options: dict[str, Any], told: str | None):
    if told is None:
        ImageNet(**options)
        return
    with pytest.warns(UserWarning, match=re.escape(told)):
        ImageNet(**options)


@pytest.mark.parametrize("policy", ["randaugment", "foo", "rand-m9-x1", "augmix-w0.5"])
def test_an_unknown_policy_is_refused(root: Path, policy: str):
    with pytest.raises(DataError, match=f"auto_augment must be .* of timm, .* received '{policy}'"):
        imagenet(root, auto_augment=policy)


def test_exchanged_class_folders_are_other_sources(tmp_path):
    root = write_images(tmp_path / "data")
    first = imagenet(root).source_hashes
    assert set(first) == {"train", "val"}
    for old, new in (("n01", "x"), ("n02", "n01"), ("x", "n02")):
        (root / "val" / old).rename(root / "val" / new)
    second = imagenet(root).source_hashes
    assert second["train"] == first["train"]
    assert second["val"] != first["val"]
    shutil.copyfile(root / "train/n01/n01_0.JPEG", root / "train/n02/n02_0.JPEG")
    assert imagenet(root).source_hashes["train"] != first["train"]


def test_16_bits_with_a_transparent_value(tmp_path):
    grey = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    raw = (tmp_path / "grey.png").read_bytes()
    chunk = b"tRNS" + bytes(2)
    chunk = struct.pack(">I", 2) + chunk + struct.pack(">I", zlib.crc32(chunk))
    place = raw.index(b"IDAT") - 4
    (tmp_path / "clear.png").write_bytes(raw[:place] + chunk + raw[place:])
    found = np.asarray(open_image(tmp_path / "clear.png"))[:, :, 0]
    assert found[0, :4].tolist() == [255, 1, 2, 3]


def _flat(folder: Path, truth: bytes, name: str = "LOC_val_solution.csv") -> ImageNet:
    """Two training classes, four validation images in one folder, and a file with classes."""
    for place in ("train/n01", "train/n02", "val"):
        (folder / place).mkdir(parents=True)
    for number in range(1, 5):
        made = Image.new("RGB", (9, 9), (number, 0, 0))
        made.save(folder / f"train/n0{number % 2 + 1}/{number}.png")
        made.save(folder / f"val/ILSVRC2012_val_{number:08d}.png")
    (folder / name).write_bytes(truth)
    return ImageNet(data_dir=str(folder), image_size=16, batch_size=2)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        (b"%b,n01 1 1 2 2\n%b,n02 1 1 2 2\n", "line 3: .*_00000001 has two classes"),
        (b"%b\n%b\n", "line 2: columns: 1, expected 2"),
        (b"\xff%b,n01\n%b,n02\n", "line 2: not UTF-8"),
    ],
)
def test_a_wrong_table_of_classes(tmp_path, truth, message):
    rows = truth % ((b"ILSVRC2012_val_00000001",) * 2)
    with pytest.raises(DataError, match=message):
        _flat(tmp_path, b"ImageId,PredictionString\n" + rows).setup()


def test_a_list_of_classes_may_start_with_a_byte_order_mark(tmp_path):
    made = _flat(
        tmp_path, b"\xef\xbb\xbfn01\nn02\nn01\nn02\n", "ILSVRC2012_validation_ground_truth.txt"
    )
    made.setup()
    assert made.split("val").targets.tolist() == [0, 1, 0, 1]


def test_a_wrong_development_kit(tmp_path):
    made = _flat(tmp_path, b"1\n2\n1\n2\n", "ILSVRC2012_validation_ground_truth.txt")
    (tmp_path / "meta.mat").write_bytes(b"no")
    with pytest.raises(DataError, match=r"meta\.mat: not"):
        made.setup()
