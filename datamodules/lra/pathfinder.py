"""Pathfinder and Path-X of the Long Range Arena: are the two markers on one contour?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.base import Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.files import expand
from datamodules.core.order import permutation
from datamodules.lra import pathfinder_release as release
from datamodules.lra.arena import ArenaPixels, pixel_split, write_pictures
from datamodules.lra.pathfinder_contours import GENERATOR_VERSION, GeneratorSettings
from lit_probattn.base.errors import DataError, require_at_least, require_one_of
from lit_probattn.base.processes import num_useful
from lit_probattn.base.progress import progress

__all__ = ["Pathfinder"]

_NUM_PUBLISHED = 200_000


class Pathfinder(ArenaPixels):
    """Pictures of dashed contours with two markers; 1 if one contour joins them, else 0.

    Ids: the grey value 0..255 of each pixel, row after row: 1024 of them at resolution 32,
    16384 at 128 (Path-X). The papers' Pathfinder and Path-X are `hard`.

    Released pictures are read from `pathfinder32` or `pathfinder128` as they are. Generated ones
    are written in the same format, the same for a seed whatever the number of processes, and then
    read in the same way.

    Source: Long Range Arena, Pathfinder. Departs from the source: which picture falls into which
    split, since both published orders depend on the machine that made them.

    Args:
        difficulty: Contours of 6 (`easy`), 9 (`intermediate`) or 14 (`hard`) paddles.
        resolution: Pixels of a side.
        source: Read the release in `data_dir` (or its folders lra_release,
            lra_release/lra_release), or generate the pictures.
        num_images: Pictures that are generated.
        generator_seed: Seed of the generator.
        generated_dir: Folder of generated pictures, which can then serve as a `data_dir`. None
            means a folder in cache_dir.
        num_processes: Generating processes; None means as many as are useful. Changes nothing else.
        split: How 80 % are chosen for training, 10 % for validation, 10 % for test. `shuffled`
            cuts after a shuffle, a pure function of split_seed (as MGK's base code does);
            `in_order` cuts in the order of the files (as the benchmark's pipeline does).
        split_seed: Seed of the shuffle.
        **kwargs: Arguments of ArenaPixels, ArenaData and DataModule.
    """

    task = "pathfinder"
    num_classes = 2  # not joined and joined
    max_seq_len: int

    def __init__(
        self,
        difficulty: Literal["easy", "intermediate", "hard"],
        resolution: Literal[32, 128] = 32,
        source: Literal["released", "generated"] = "released",
        num_images: int = _NUM_PUBLISHED,
        generator_seed: int = 0,
        generated_dir: str | None = None,
        num_processes: int | None = None,
        split: Literal["shuffled", "in_order"] = "shuffled",
        split_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_one_of(tuple(release.FOLDERS), difficulty=difficulty)
        require_one_of((32, 128), resolution=resolution)
        require_at_least(10, num_images=num_images)
        require_at_least(1, num_processes=num_processes)
        require_at_least(0, generator_seed=generator_seed)
        self.difficulty, self.resolution, self.source = difficulty, resolution, source
        self.num_images = num_images
        self.generator = GeneratorSettings.published(resolution, difficulty, generator_seed)
        default = f"pathfinder-generated-seed{generator_seed}-n{num_images}"
        self.generated_dir = expand(generated_dir) if generated_dir else self.cache_dir / default
        self._num_processes = num_processes
        self.protocol, self.split_seed = split, split_seed
        self.max_seq_len = resolution**2
        self.published = _published(_NUM_PUBLISHED)

    def must_name(self) -> dict[str, Any]:
        """The difficulty has no default."""
        return {"difficulty": self.difficulty, "resolution": self.resolution}

    def settings(self) -> dict[str, Any]:
        """What decides the content of the cache."""
        place = {"resolution": self.resolution, "difficulty": self.difficulty}
        if self.source == "released":
            return {"source": "released", **place}
        return {
            "source": "generated",
            **place,
            "generator_version": GENERATOR_VERSION,
            "num_images": self.num_images,
            "generator": {
                **dataclasses.asdict(self.generator),
                "paddle_margins": list(self.generator.paddle_margins),  # as JSON returns them
            },
        }

    def sources(self) -> list[Path]:
        """The metadata files of the release and the folder of its pictures, if they are read."""
        if self.source == "generated":
            return []
        folder = self._released_folder()
        pictures = [path for path in (folder / "imgs",) if path.is_dir()]
        return release.list_metadata(folder) + pictures

    def build(self, writer: CacheWriter) -> None:
        """Generate the pictures if asked; read them."""
        if self.source == "generated":
            folder = self.generated_dir / f"pathfinder{self.resolution}"
            folder = folder / release.FOLDERS[self.difficulty]
            self._generate(folder)
        else:
            folder = self._released_folder()
        entries = release.read_entries(folder, release.list_metadata(folder))
        with progress("Pathfinder: reading the pictures", len(entries), "pictures") as advance:
            pictures = release.pictures(entries, self.resolution, advance)
            write_pictures(writer, "all", pictures)
        writer.add("num_listed", np.array([len(entries)]))

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits: choices of rows."""
        count = len(cache.array("all_targets"))
        num_empty = int(cache.array("num_listed")[0]) - count
        self.published = _published(_NUM_PUBLISHED - num_empty)
        if num_empty:
            self.notes = [
                f"{num_empty} pictures are empty files and were skipped, as published; 160000, "
                f"20000 and 20000 count them, so the sizes below are those of the rest"
            ]
        order = np.arange(count)
        if self.protocol == "shuffled":
            order = permutation(count, self.split_seed)
        cuts = _cut(count)
        if any(rows.start == rows.stop for rows in cuts.values()):
            raise DataError(f"Pathfinder: {count} pictures leave a split empty; 10 are the fewest")
        return {
            name: pixel_split(cache, "all", self.max_seq_len, order[rows.start : rows.stop])
            for name, rows in cuts.items()
        }

    def _released_folder(self) -> Path:
        return release.find_release(self.data_dir, self.resolution, self.difficulty)

    def _generate(self, folder: Path) -> None:
        # Imported here: reading needs no generator.
        from datamodules.lra import pathfinder_generator as generator

        processes = num_useful(
            self._num_processes, -(-self.num_images // generator.PICTURES_PER_FILE)
        )
        with progress("Pathfinder: generating", self.num_images, "pictures") as advance:
            generator.write_pictures(folder, self.generator, self.num_images, processes, advance)


def _cut(count: int) -> dict[str, range]:
    """Cut `count` places into 80, 10 and 10 %, rounded as in the source."""
    first, second = count * 8 // 10, count * 9 // 10
    return {"train": range(first), "val": range(first, second), "test": range(second, count)}


def _published(count: int) -> dict[str, Published]:
    return {name: Published(len(rows)) for name, rows in _cut(count).items()}
