"""Paddles (short dashes), markers and their masks, as Pathfinder's generator draws them.

Shapes are drawn on a grid that is `antialias` times finer and made smaller by Lanczos resampling. A
paddle has a picture and a mask; the mask is the paddle grown by `margin`, the room that nothing
else may enter. Angles are in radians; the first coordinate is y, the angle 0 points along x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image as PilImage
from PIL import ImageDraw

__all__ = ["FloatArray", "Paddle", "disc_offsets", "marker", "paddle", "translate"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Paddle:
    """A paddle that starts at the centre of a small square.

    Args:
        picture: Brightness 0..1. Shape (2 · half + 1, 2 · half + 1).
        mask: The same, grown by the margin.
        half: Pixels from the centre to the edge.
        core: Offsets from the start, (num_offsets, 2), of the pixels that the mask fills.
    """

    picture: FloatArray
    mask: FloatArray
    half: int
    core: IntArray


@lru_cache(maxsize=4096)
def paddle(angle: float, length: int, thickness: float, margin: int, antialias: int) -> Paddle:
    """Draw a paddle.

    Args:
        angle: Direction from its start to its end.
        length: Pixels from start to end.
        thickness: Width in pixels; a whole number on the finer grid.
        margin: Pixels by which the mask is wider on each side.
        antialias: How much finer the grid is.
    """
    half = length + math.ceil(thickness) + margin
    centre, side = half * antialias, 2 * half * antialias + 1
    end = translate((centre, centre), angle, length * antialias)
    fine = PilImage.new("L", (side, side))
    width = round(thickness * antialias)
    ImageDraw.Draw(fine).line([(centre, centre), (end[1], end[0])], fill=255, width=width)
    line = np.asarray(fine)
    mask = _shrink(_grow(line, disc_offsets(margin * antialias)), 2 * half + 1)
    core = np.argwhere(mask >= 1) - half
    return Paddle(_shrink(line, 2 * half + 1), mask, half, core)


def marker(centre: tuple[int, int], radius: float, side: int, antialias: int) -> FloatArray:
    """Draw a disc. Returns brightness 0..1 of the whole picture, (side, side)."""
    grid = np.arange(side * antialias)
    y, x = (grid[:, None] - centre[0] * antialias, grid - centre[1] * antialias)
    disc = (x**2 + y**2 <= (radius * antialias) ** 2) * np.uint8(255)
    return _shrink(disc, side)


def translate(point: tuple[int, int], angle: float, distance: float) -> tuple[int, int]:
    """Return the pixel at a distance from another, rounded up as in the source."""
    y, x = point[0] + distance * math.sin(angle), point[1] + distance * math.cos(angle)
    return math.ceil(y), math.ceil(x)


@lru_cache(maxsize=64)
def disc_offsets(radius: int) -> IntArray:
    """Return the offsets of the pixels within a radius, (num_offsets, 2)."""
    span = np.arange(-radius, radius + 1)
    inside = span[:, None] ** 2 + span**2 <= radius**2
    return np.argwhere(inside) - radius


def _grow(picture: npt.NDArray[np.uint8], offsets: IntArray) -> npt.NDArray[np.uint8]:
    """Largest value in the neighbourhood of each pixel."""
    reach = int(np.abs(offsets).max())
    padded = np.pad(picture, reach)
    side = len(picture)
    grown = np.zeros_like(picture)
    for y, x in offsets + reach:
        np.maximum(grown, padded[y : y + side, x : x + side], out=grown)
    return grown


def _shrink(picture: npt.NDArray[np.uint8], side: int) -> FloatArray:
    small = PilImage.fromarray(picture).resize((side, side), PilImage.Resampling.LANCZOS)
    return np.asarray(small, dtype=np.float64) / 255
