"""Pictures of Pathfinder: two target contours, distractors, and two markers.

A contour is a chain of paddles. The two targets start near the centre, `seed_distance` apart, and
grow in turns; then come shorter distractors. A marker sits at the start of one target; the other
sits at the end of the same target (label 1) or of the other one (label 0).

Source: the generator of Kim, Linsley et al. (ICLR 2020) with the parameters of the Long Range Arena
(its Pathfinder32 and Pathfinder128). Departs from the source: the random stream is ours; a new
contour's room is tested at its place (one pixel off there); distractors keep clear of the last
paddle of both targets (of one there). Contours of 6, 9 and 14 paddles are easy, intermediate and
hard; the published parameters are those of 14, and the other two follow by the same formulas.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from datamodules.core.errors import DataError
from datamodules.lra.pathfinder_contours import RETRIALS, Canvas, Contour, Draws
from datamodules.lra.pathfinder_drawing import marker
from datamodules.lra.pathfinder_settings import GeneratorSettings

__all__ = ["Picture", "draw_picture"]

_CONTOUR_RETRIALS = 4  # of a distractor
_LEAST_ROOM = 0.01  # part of the picture that must be free for another distractor
_MOST_ATTEMPTS = 100_000  # at the two targets of one picture


@dataclass(frozen=True)
class Picture:
    """One picture.

    Args:
        pixels: Grey values, (side, side).
        label: 1 if the markers are at the two ends of one target.
        margin: Margin of the paddles that was drawn.
    """

    pixels: npt.NDArray[np.uint8]
    label: int
    margin: int


def draw_picture(settings: GeneratorSettings, index: int) -> Picture:
    """Draw picture `index`: a pure function of both, given one version of Pillow.

    Raises:
        DataError: The targets do not fit into the picture, however often they are tried.
    """
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
    pixels = (image * (255 / image.max()) + 0.5).astype(np.uint8)  # stretched to 0..255
    return Picture(pixels, label, margin)


def _draw_targets(
    settings: GeneratorSettings, margin: int, draws: Draws
) -> tuple[Canvas, list[Contour]]:
    """Draw both targets, anew until they fit."""
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
        f"{settings.side} x {settings.side} pixels; none of {_MOST_ATTEMPTS} attempts did"
    )


def _two_seeds(canvas: Canvas, contrast: float) -> list[Contour]:
    """Lay the first paddle of both targets. Returns nothing if they do not fit."""
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
    """Return the canvas with one more distractor, or as it was if none fits."""
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
