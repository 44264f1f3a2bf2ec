"""Pathfinder and Path-X of the Long Range Arena: are the two markers on one contour?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from datamodules.core.base import GENERATED, Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.files import expand
from datamodules.core.order import permutation
from datamodules.lra import pathfinder_release as release
from datamodules.lra.arena import ArenaPixels, pixel_split, write_images
from datamodules.lra.pathfinder_contours import GENERATOR_VERSION, GeneratorSettings
from lit_probattn.base.arguments import Count, OnlyWith, Range, WholeNumber
from lit_probattn.base.errors import DataError
from lit_probattn.base.processes import num_useful
from lit_probattn.base.progress import progress

_NUM_PUBLISHED = 200_000


class Pathfinder(ArenaPixels):
    """Images of dashed contours with two markers; 1 if one contour connects them, else 0.

    Ids: the grey value 0..255 of each pixel in row-major order: 1024 pixels at resolution 32,
    16384 at 128 (Path-X). The papers' Pathfinder and Path-X are `hard`.

    Released images are read unchanged from `pathfinder32` or `pathfinder128`. Generated images are
    a function of the seed, independent of the number of processes; they are written and read in the
    format of the release.

    Source: Long Range Arena, Pathfinder. Departs from the source: the assignment of images to
    splits, since both published orders depend on the machine.

    Args:
        difficulty: Contours of 6 (`easy`), 9 (`intermediate`) or 14 (`hard`) paddles.
        resolution: Side length in pixels.
        source: Read the release in `data_dir` (or its folders lra_release,
            lra_release/lra_release), or generate the images.
        num_images: Number of generated images.
        generator_seed: Seed of the generator.
        generated_dir: Folder of generated images, which can be used as `data_dir` later. Default: a
            folder in cache_dir.
        num_processes: Number of generator processes. Default: chosen automatically. Does not affect
            the images.
        split: How the splits of 80, 10 and 10 % are chosen. `shuffled` splits a permutation that is
            a pure function of split_seed (as MGK's base code does); `in_order` splits the images in
            file order (as the benchmark's pipeline does).
        split_seed: Seed of the permutation.
        **kwargs: Arguments of ArenaPixels, ArenaData and DataModule.
    """

    task = "pathfinder"
    num_classes = 2  # not connected, connected
    max_seq_len: int

    def __init__(
        self,
        difficulty: Literal["easy", "intermediate", "hard"],
        resolution: Literal[32, 128] = 32,
        source: Literal["released", "generated"] = "released",
        num_images: Annotated[int, Range(10), GENERATED] = _NUM_PUBLISHED,
        generator_seed: Annotated[WholeNumber, GENERATED] = 0,
        generated_dir: Annotated[str | None, GENERATED] = None,
        num_processes: Annotated[Count | None, GENERATED] = None,
        split: Literal["shuffled", "in_order"] = "shuffled",
        split_seed: Annotated[int, OnlyWith(split="shuffled")] = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.difficulty, self.resolution, self.source = difficulty, resolution, source
        self.num_images = num_images
        self.generator = GeneratorSettings.published(resolution, difficulty, generator_seed)
        default = f"pathfinder-generated-seed{generator_seed}-n{num_images}"
        self._given_dir = expand(generated_dir) if generated_dir else None
        self.generated_dir = self._given_dir or self.cache_dir / default
        self._num_processes = num_processes
        self.protocol, self.split_seed = split, split_seed
        self.max_seq_len = resolution**2
        self.published = _published(_NUM_PUBLISHED)

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        place = {"resolution": self.resolution, "difficulty": self.difficulty}
        if self.source == "released":
            return {"source": "released", **place}
        return {
            "source": "generated",
            **place,
            "generator_version": GENERATOR_VERSION,
            "num_images": self.num_images,
            "generated_dir": self._given_dir and str(self._given_dir),
            "generator": {
                **dataclasses.asdict(self.generator),
                "paddle_margins": list(self.generator.paddle_margins),  # as JSON returns them
            },
        }

    def sources(self) -> list[Path]:
        """Return metadata files and image folder of the release; none for generated data."""
        if self.source == "generated":
            return []
        folder = self._released_folder()
        folders = [path for path in (folder / "imgs",) if path.is_dir()]
        return release.list_metadata(folder) + folders

    def build(self, writer: CacheWriter) -> None:
        """Generate the images if requested, then read them."""
        if self.source == "generated":
            folder = self.generated_dir / f"pathfinder{self.resolution}"
            folder = folder / release.FOLDERS[self.difficulty]
            self._generate(folder)
        else:
            folder = self._released_folder()
        entries = release.read_entries(folder, release.list_metadata(folder))
        with progress("Pathfinder: reading the images", len(entries), "images") as advance:
            images = release.images(entries, self.resolution, advance)
            write_images(writer, "all", images)
        writer.add("num_listed", np.array([len(entries)]))

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits as row subsets."""
        count = len(cache.array("all_targets"))
        num_empty = int(cache.array("num_listed")[0]) - count
        self.published = _published(_NUM_PUBLISHED - num_empty)
        if num_empty:
            self.notes = [
                f"{num_empty} images are empty files and were skipped, as published; 160000, 20000 "
                "and 20000 include them, so the sizes below exclude them"
            ]
        order = np.arange(count)
        if self.protocol == "shuffled":
            order = permutation(count, self.split_seed)
        cuts = _cut(count)
        if any(rows.start == rows.stop for rows in cuts.values()):
            raise DataError(
                f"Pathfinder: {count} images leave a split empty; at least 10 are needed"
            )
        return {
            name: pixel_split(cache, "all", self.max_seq_len, order[rows.start : rows.stop])
            for name, rows in cuts.items()
        }

    def _released_folder(self) -> Path:
        return release.find_release(self.data_dir, self.resolution, self.difficulty)

    def _generate(self, folder: Path) -> None:
        # Imported lazily: reading does not need the generator.
        from datamodules.lra import pathfinder_generator as generator

        processes = num_useful(
            self._num_processes, -(-self.num_images // generator.IMAGES_PER_FILE)
        )
        with progress("Pathfinder: generating", self.num_images, "images") as advance:
            generator.write_images(folder, self.generator, self.num_images, processes, advance)


def _cut(count: int) -> dict[str, range]:
    """Split `count` positions into 80, 10 and 10 %, rounded as in the source."""
    first, second = count * 8 // 10, count * 9 // 10
    return {"train": range(first), "val": range(first, second), "test": range(second, count)}


def _published(count: int) -> dict[str, Published]:
    return {name: Published(len(rows)) for name, rows in _cut(count).items()}
