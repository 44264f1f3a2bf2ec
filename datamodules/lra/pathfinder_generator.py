"""Pathfinder's generator: single images, and folders of them in the format of the release.

Several processes write the images, which depend only on the settings.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image as PilImage

from datamodules.lra.pathfinder_contours import (
    GENERATOR_VERSION,
    RETRIALS,
    Canvas,
    Contour,
    Draws,
    GeneratorSettings,
    marker,
)
from lit_probattn.base.errors import ChildError, DataError, prefixed
from lit_probattn.base.files import replace_text
from lit_probattn.base.processes import map_in_processes

_CONTOUR_RETRIALS = 4  # per distractor
_LEAST_ROOM = 0.01  # fraction of the image that must be free for another distractor
_MOST_ATTEMPTS = 100_000  # to draw the two targets of one image
IMAGES_PER_FILE = 1000
_BLOCK = 10  # images per job of a process
_SETTINGS_FILE = "generator.json"


@dataclass(frozen=True)
class GeneratedImage:
    """Grey values (side, side), label, and the paddle margin of the image."""

    pixels: npt.NDArray[np.uint8]
    label: int
    margin: int


def draw_image(settings: GeneratorSettings, index: int) -> GeneratedImage:
    """Draw image `index`; it also depends on Pillow's version. Raises DataError if impossible."""
    draws = Draws(settings.seed, settings.side, settings.contour_length, index)
    label = draws.below(2)
    margin = settings.paddle_margins[draws.below(len(settings.paddle_margins))]
    canvas, targets = _draw_targets(settings, margin, draws)
    for _ in range(settings.num_distractors):
        canvas = _add_distractor(canvas)
    origin = draws.below(2)
    terminal = origin if label else 1 - origin
    image = canvas.pixels
    for y, x in (targets[origin].start, targets[terminal].tip):
        centre = (y - canvas.border, x - canvas.border)
        disc = marker(centre, settings.marker_radius, settings.side, settings.antialias)
        image = np.maximum(image, disc)
    pixels = (image * (255 / image.max()) + 0.5).astype(np.uint8)  # scaled to 0..255
    return GeneratedImage(pixels, label, margin)


def _draw_targets(
    settings: GeneratorSettings, margin: int, draws: Draws
) -> tuple[Canvas, list[Contour]]:
    """Draw both targets, retrying until they fit."""
    contrast = settings.snake_contrast * settings.paddle_contrast
    for _ in range(_MOST_ATTEMPTS):
        canvas = Canvas(settings, margin, draws)
        targets = _two_seeds(canvas, contrast)
        steps = range(settings.contour_length - 1)
        if targets and all(canvas.extend(target, contrast) for _ in steps for target in targets):
            for target in targets:
                canvas.close(target)
            return canvas, targets
    raise DataError(
        f"Pathfinder: two contours of {settings.contour_length} paddles do not fit into "
        f"{settings.side} x {settings.side} pixels after {_MOST_ATTEMPTS} attempts"
    )


def _two_seeds(canvas: Canvas, contrast: float) -> list[Contour]:
    """Draw the first paddle of both targets; returns an empty list if they do not fit."""
    distance, draws = canvas.settings.seed_distance, canvas.draws
    first = canvas.seed(contrast, edge=2 * distance)
    if first is None:
        return []
    for _ in range(1 + RETRIALS):
        angle, around = draws.angle(), draws.angle()
        y, x = distance * math.sin(around), distance * math.cos(around)
        start = (round(first.start[0] + y), round(first.start[1] + x))
        second = canvas.first_paddle(start, angle, contrast)
        if second is not None:
            return [first, second]
    return []


def _add_distractor(canvas: Canvas) -> Canvas:
    """Return the canvas with another distractor, or unchanged if none fits."""
    contrast = canvas.settings.snake_contrast
    for _ in range(1 + _CONTOUR_RETRIALS):
        trial = copy.copy(canvas)
        trial.image, trial.mask = canvas.image.copy(), canvas.mask.copy()
        contour = trial.seed(contrast) if canvas.free_part >= _LEAST_ROOM else None
        steps = range(canvas.settings.distractor_length - 1)
        if contour is not None and all(trial.extend(contour, contrast) for _ in steps):
            trial.close(contour)
            return trial
    return canvas


def write_images(
    folder: Path,
    settings: GeneratorSettings,
    num_images: int,
    num_processes: int,
    advance: Callable[[int], None],
) -> None:
    """Write images 0..num_images-1 to `folder` unless they exist.

    The number of processes does not affect the images. `advance` is called with the number of
    images written or found.

    Raises:
        DataError: The folder contains other files or is not writable, or a process died.
    """
    try:
        _claim(folder, settings, num_images)
    except OSError as error:
        raise DataError(
            f"the folder {folder} is not writable ({error.strerror or error}); set generated_dir"
        ) from error
    (folder / "metadata").mkdir(exist_ok=True)
    files: dict[Path, range] = {}
    for first in range(0, num_images, IMAGES_PER_FILE):
        metadata = folder / "metadata" / f"{first // IMAGES_PER_FILE}.npy"
        indices = range(first, min(first + IMAGES_PER_FILE, num_images))
        if metadata.is_file():
            advance(len(indices))
        else:
            files[metadata] = indices
    blocks = (
        range(index, min(index + _BLOCK, indices.stop))
        for indices in files.values()
        for index in indices[::_BLOCK]
    )
    write = partial(_write_block, folder, settings)
    with (
        prefixed("Pathfinder: generation", ChildError, to=DataError),
        closing(map_in_processes(write, blocks, num_processes)) as written,
    ):
        for metadata, indices in files.items():
            lines: list[str] = []
            while len(lines) < len(indices):
                lines += (block := next(written))
                advance(len(block))
            replace_text(metadata, "".join(lines), durable=True)


def _claim(folder: Path, settings: GeneratorSettings, num_images: int) -> None:
    """Record the settings in the folder, or compare them with the recorded ones."""
    wanted = {"generator_version": GENERATOR_VERSION, "num_images": num_images}
    wanted |= dataclasses.asdict(settings)
    text = json.dumps(wanted, indent=1, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / _SETTINGS_FILE
    if note.is_file():
        if note.read_text() != text:
            raise DataError(
                f"{note}: the folder contains images of other settings; set generated_dir"
            )
    elif any(folder.iterdir()):
        raise DataError(f"{folder} is not empty and was not generated; set generated_dir")
    else:
        replace_text(note, text, durable=True)


def _write_block(folder: Path, settings: GeneratorSettings, indices: range) -> list[str]:
    """Write images to the folder of their metadata file; return their lines in it."""
    number, lines = indices[0] // IMAGES_PER_FILE, []
    place = folder / "imgs" / str(number)
    place.mkdir(parents=True, exist_ok=True)
    for index in indices:
        drawn, row = draw_image(settings, index), index % IMAGES_PER_FILE
        PilImage.fromarray(drawn.pixels).save(place / f"sample_{row}.png")
        words: list[Any] = [f"imgs/{number}", f"sample_{row}.png", row, drawn.label]
        words += [settings.continuity, settings.contour_length, settings.distractor_length]
        words += [settings.paddle_length, settings.paddle_thickness, drawn.margin, 1]
        lines.append(" ".join(map(str, words)) + "\n")
    return lines
