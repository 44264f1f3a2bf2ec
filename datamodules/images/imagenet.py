"""ImageNet, ILSVRC 2012: images in class folders, with timm's augmentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from timm.data import create_transform

from datamodules.core.base import DataModule, Published, Split
from datamodules.core.files import expand
from datamodules.core.loaders import EvaluationOrders, TrainingOrders
from datamodules.core.order import TrainingOrder, choose_per_class
from datamodules.core.own import ClassMap
from datamodules.core.report import compare_size
from datamodules.images.batches import ImageCollate, Mixing, RequestOrder
from datamodules.images.files import ImageFiles, find_root, read_train, read_val
from datamodules.images.samples import ImageSplit, open_image, posterize_to_black
from lit_probattn.base.arguments import (
    NotNegative,
    OnlyWith,
    Probability,
    Range,
    WholeNumber,
)
from lit_probattn.base.errors import DamagedError, DataError
from lit_probattn.base.files import digest

_CROP_SCALE = (0.08, 1.0)  # smallest and largest fraction of an image in a random crop
_PER_LINE = 8  # classes per line of the report
_RECIPE = OnlyWith(augmentation="recipe")


def _leaves_colours(policy: str | None) -> bool:
    """Whether timm's colour jitter applies beside a policy."""
    return not policy or "3a" in policy


def _augmentation(image_size: int, **options: Any) -> Any:
    """Return timm's transform of training images; raises DataError for an unknown policy."""
    try:
        transform = create_transform(
            image_size, is_training=True, interpolation="bicubic", **options
        )
    except (AssertionError, ValueError) as error:
        raise DataError(
            "auto_augment must be a policy of timm, such as rand-m9-mstd0.5-inc1, augmix-m5-w4 or "
            f"3a, received {options['auto_augment']!r} ({error})"
        ) from None
    return posterize_to_black(transform)


class ImageNet(ClassMap, DataModule):
    """Images and their classes; `inputs` are float32 (B, 3, S, S), normalised.

    Files are `train/<wnid>/*.JPEG` and `val/<wnid>/*.JPEG` in data_dir or its folder `imagenet`; or
    all validation images in `val` itself, with the ground-truth file of the development kit.
    Classes are numbered in the order of their folder names. The map from numbers to names is stored
    in every checkpoint, and a checkpoint with another map is rejected. The published test images
    have no labels: test is the validation folder.

    The augmentation of an image is a function of (seed, epoch, sample), and the mixing of a batch
    of (seed, step): see `datamodules.images.samples` and `datamodules.images.batches`.

    Source: FiSH, NeurIPS 2022, table 5: the recipe of DeiT and Swin, by timm.
    Departs from the source: partners of mixup and cutmix are neighbours in the global batch.

    Args:
        image_size: S. Evaluation resizes the shorter side to S / 0.875 and crops the centre.
        augmentation: `recipe`; or `none`: training images are transformed like evaluation images.
        auto_augment: timm's name of a policy; None disables it. As in timm, a policy other than
            `3a` disables colour jitter.
        color_jitter: Strength of brightness, contrast and saturation jitter.
        erase: Probability that a rectangle is replaced by noise.
        flip: Probability of a horizontal flip.
        mixup: Parameter of mixup; 0 disables it.
        cutmix: Parameter of cutmix; 0 disables it.
        mix_probability: Probability that a batch is mixed.
        mix_switch: Probability of cutmix if mixup is also enabled.
        held_out_per_class: Training images of each class that are held out for validation, so that
            selection does not use test images. 0, as in the source, validates on the test images.
        ground_truth: Path of the file with the classes of a flat validation folder.
        verify: Let `check` read every image and list the corrupt ones.
        **kwargs: Arguments of DataModule.
    """

    task = "imagenet"
    classes_of = "the folders"
    num_features = 3  # red, green and blue
    max_seq_len: int

    def __init__(
        self,
        image_size: Annotated[int, Range(8)] = 224,
        augmentation: Literal["recipe", "none"] = "recipe",
        auto_augment: Annotated[str | None, _RECIPE] = "rand-m9-mstd0.5-inc1",
        color_jitter: Annotated[
            NotNegative, OnlyWith(augmentation="recipe", auto_augment=_leaves_colours)
        ] = 0.4,
        erase: Annotated[Probability, _RECIPE] = 0.25,
        flip: Annotated[Probability, _RECIPE] = 0.5,
        mixup: NotNegative = 0.8,
        cutmix: NotNegative = 1.0,
        mix_probability: Probability = 1.0,
        mix_switch: Annotated[
            Probability, OnlyWith(mixup=Range(above=0), cutmix=Range(above=0))
        ] = 0.5,
        held_out_per_class: WholeNumber = 0,
        ground_truth: str | None = None,
        verify: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.image_size, self.verify = image_size, verify
        self.max_seq_len = image_size**2
        self.held_out_per_class = held_out_per_class
        self.select_on_test = held_out_per_class == 0
        train = "train" if self.select_on_test else "train+val"
        self.published = {train: Published(1281167), "test": Published(50000, per_class=50)}
        self.ground_truth = None if ground_truth is None else expand(ground_truth)
        self.mixing: Mixing | None = None
        if (mixup or cutmix) and mix_probability:
            self.mixing = Mixing(mixup, cutmix, mix_probability, mix_switch, self.seed)
        self._augment: Any = self._evaluation_transform()
        if augmentation == "recipe":
            self._augment = _augmentation(
                image_size,
                auto_augment=auto_augment,
                color_jitter=color_jitter,
                re_prob=erase,
                re_mode="pixel",
                scale=_CROP_SCALE,
                hflip=flip,
            )
        self._hashes: dict[str, str] = {}

    # ---- sizes, determined by the folders ------------------------------------------------------

    @property
    def classes(self) -> list[str]:
        """Folder name of each class number."""
        return list(self._folders["train"].classes)

    @property
    def num_classes(self) -> int:
        """Number of class folders of the training split."""
        return len(self._folders["train"].classes)

    @property
    def provenance(self) -> dict[str, Any]:
        """Data settings that are stored with a result; plain JSON values."""
        return {
            "classes_sha256": digest("\n".join(self.classes)),
            "held_out_per_class": self.held_out_per_class,
        }

    @property
    def source_hashes(self) -> dict[str, str]:
        """SHA-256 of names and sizes of the training and validation images."""
        if not self._hashes:
            self._hashes = {name: files.digest for name, files in self._folders.items()}
        return dict(self._hashes)

    def name_of(self, split: str, index: int) -> str:
        """Return the path of an image, relative to the folder of its split."""
        files: ImageFiles = self.split(split).files
        return files.path(index).relative_to(files.folder).as_posix()

    # ---- report --------------------------------------------------------------------------------

    def size_lines(self) -> Iterator[str]:
        """Yield the number of images and the counts per class of each split."""
        for name, split in self.splits.items():
            counts = np.bincount(split.targets, minlength=self.num_classes)
            yield (
                f"{name}: {len(split)} images, {self.num_classes} classes, per class min "
                f"{counts.min()}, median {int(np.median(counts))}, max {counts.max()}"
            )
            pairs = [f"{c} {n}" for c, n in zip(self.classes, counts, strict=True)]
            for first in range(0, len(pairs), _PER_LINE):
                yield f"  {'  '.join(pairs[first : first + _PER_LINE])}"

    def compare_sizes(self) -> Iterator[tuple[str, bool]]:
        """Yield the number of classes and, if `verify` is set, the corrupt images."""
        yield compare_size("classes", 1000, self.num_classes)
        for name, files in self._folders.items() if self.verify else ():
            damaged = 0
            for index in range(len(files)):
                try:
                    open_image(files.path(index))
                except DamagedError as error:
                    damaged += 1
                    yield str(error).split(". Replace it with")[0], False
            yield f"{name}: {len(files)} images read, {damaged} corrupt", damaged == 0

    # ---- splits --------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """List the images and check the folders before training starts."""
        self._folders  # noqa: B018

    def load_splits(self) -> dict[str, Split]:
        """Open the splits."""
        train, val = self._folders["train"], self._folders["val"]
        test = val
        if self.held_out_per_class:
            held_out = self._held_out(train)
            val = train.part(np.flatnonzero(held_out))
            train = train.part(np.flatnonzero(~held_out))
        return self.split_objects(train, val, test)

    def split_objects(
        self, train: ImageFiles, val: ImageFiles, test: ImageFiles
    ) -> dict[str, Split]:
        """Return the splits of three file lists, with augmented training images."""
        return {
            "train": ImageSplit(train, self._augment, self.image_size, self.seed),
            "val": self.evaluated(val),
            "test": self.evaluated(test),
        }

    def evaluated(self, files: ImageFiles) -> ImageSplit:
        """Return a split whose images are resized and cropped for evaluation."""
        return ImageSplit(files, self._evaluation_transform(), self.image_size)

    def _evaluation_transform(self) -> Any:
        return create_transform(self.image_size, interpolation="bicubic", crop_pct=0.875)

    def collate(self) -> ImageCollate:
        """Return the function that collates a training batch."""
        return ImageCollate(self.mixing)

    def collate_of(self, name: str) -> ImageCollate:
        """Return the function that collates an evaluation batch, without mixing."""
        return ImageCollate()

    @cached_property
    def _folders(self) -> dict[str, ImageFiles]:
        """Files of `train` and `val`, listed once: the model needs sizes before `setup`."""
        root = find_root(self.data_dir)
        train = read_train(root)
        return {"train": train, "val": read_val(root, train.classes, self.ground_truth)}

    def _held_out(self, files: ImageFiles) -> npt.NDArray[np.bool_]:
        """Choose images of each class as a function of their number; True for validation."""

        def count(target: int, num_rows: int) -> int:
            if num_rows <= self.held_out_per_class:
                raise DataError(
                    f"held_out_per_class={self.held_out_per_class} leaves class "
                    f"{files.classes[target]}, which has {num_rows} images, none for training"
                )
            return self.held_out_per_class

        return choose_per_class(files.targets, 0, count)

    def _loader(
        self,
        split: Split,
        order: TrainingOrders | EvaluationOrders,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        if not isinstance(order, TrainingOrder):
            return super()._loader(split, order, collate)
        if self.mixing is not None and order.micro_batch_size % 2:
            raise DataError(
                "mixup and cutmix mix pairs, so a micro-batch must be even: "
                f"batch_size={self.batch_size} over world_size={order.micro_steps.world_size} and "
                f"accumulate_grad_batches={order.micro_steps.accumulation} gives "
                f"{order.micro_batch_size}"
            )
        requests: Any = RequestOrder(order)
        return super()._loader(split, requests, collate)
