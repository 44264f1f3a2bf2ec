"""Generation of a Pathfinder image: parameters, contours of paddles, drawing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image as PilImage
from PIL import ImageDraw

# Increment when the images of a given seed change.
GENERATOR_VERSION = 1

CONTOUR_LENGTHS = {"easy": 6, "intermediate": 9, "hard": 14}
_SIZES: dict[int, dict[str, Any]] = {
    32: {
        "seed_distance": 7,
        "marker_radius": 1.5,
        "paddle_length": 2,
        "paddle_thickness": 0.5,
        "paddle_margins": (1,),
        "continuity": 1.0,
        "distractor_paddles": 20,
        "snake_contrast": 2.0,
        "paddle_contrast": 0.75,
    },
    128: {
        "seed_distance": 20,
        "marker_radius": 3.0,
        "paddle_length": 5,
        "paddle_thickness": 1.5,
        "paddle_margins": (2, 3),
        "continuity": 1.8,
        "distractor_paddles": 35,
        "snake_contrast": 0.9,
        "paddle_contrast": 1.0,
    },
}
IntArray = npt.NDArray[np.int64]
Point = tuple[int, int]
Window = tuple[slice, slice]
RETRIALS = 2  # per paddle
_FREE = 0.3  # mask values up to this are free for the start of a contour
_CROSSING = 1.8  # masks overlap if their sum reaches this
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GeneratorSettings:
    """Settings that determine the images; lengths in pixels.

    Args:
        contour_length: Number of paddles of a target.
        padding: Width of the empty border.
        seed_distance: Distance between the starts of the two targets.
        paddle_margins: Margins around paddles; one is drawn for each image.
        continuity: Straightness of contours; at least 1.
        distractor_paddles: Total number of paddles of all distractors.
        snake_contrast: Brightness of distractors.
        paddle_contrast: Brightness of targets relative to distractors.
        antialias: Supersampling factor for drawing shapes.
    """

    contour_length: int
    side: int
    padding: int
    seed_distance: int
    marker_radius: float
    paddle_length: int
    paddle_thickness: float
    paddle_margins: tuple[int, ...]
    continuity: float
    distractor_paddles: int
    snake_contrast: float
    paddle_contrast: float
    antialias: int
    seed: int

    @classmethod
    def published(cls, side: int, difficulty: str, seed: int) -> GeneratorSettings:
        """Return the parameters of Pathfinder32 or Pathfinder128 (Path-X)."""
        length = CONTOUR_LENGTHS[difficulty]
        return cls(
            contour_length=length, side=side, padding=1, antialias=2, seed=seed, **_SIZES[side]
        )

    @property
    def distractor_length(self) -> int:
        """Number of paddles of a distractor."""
        return self.contour_length // 3

    @property
    def num_distractors(self) -> int:
        """Number of distractors to attempt."""
        return self.distractor_paddles // self.distractor_length


class Draws:
    """Random numbers from a generator's raw output, which NumPy keeps stable across versions."""

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64DXSM(np.random.SeedSequence(key))

    def below(self, count: int) -> int:
        """Return a uniform integer in 0..count-1."""
        return (int(self._bits.random_raw()) >> 32) * count >> 32

    def unit(self) -> float:
        """Return a uniform number in [0, 1)."""
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53

    def angle(self) -> float:
        """Return a uniform angle of whole degrees, in radians."""
        return (self.below(360) - 180) * math.pi / 180


@dataclass
class Contour:
    """A contour under construction.

    Args:
        pivot: The point from which the last paddle was drawn.
        angle: Direction of the last paddle.
        tip: End point of the last paddle.
        window: Slices of the last paddle's bounding box.
        pending: Mask of the last paddle, not yet part of the common mask.
    """

    start: Point
    pivot: Point
    angle: float
    tip: Point
    window: Window
    pending: FloatArray


class Canvas:
    """Image and mask; `margin` is the clearance around paddles in pixels."""

    def __init__(self, settings: GeneratorSettings, margin: int, draws: Draws) -> None:
        self.settings, self.margin, self.draws = settings, margin, draws
        reach = settings.paddle_length + math.ceil(settings.paddle_thickness) + 3 * margin
        self.border = max(reach, settings.seed_distance) + 2
        full = settings.side + 2 * self.border
        self._visible = slice(self.border, self.border + settings.side)
        self._inside = np.zeros((full, full))
        self._inside[self._visible, self._visible] = 1
        self.image = np.zeros((full, full))
        self.mask = self._inside.copy()
        empty = slice(self.border + settings.padding, full - self.border - settings.padding)
        self.mask[empty, empty] = 0

    @property
    def pixels(self) -> FloatArray:
        """The image without border, (side, side)."""
        return self.image[self._visible, self._visible]

    @property
    def free_part(self) -> float:
        """Fraction of the image that is free."""
        return float((self.mask[self._visible, self._visible] <= _FREE).mean())

    def contains(self, point: Point) -> bool:
        """Whether a point is inside the image."""
        return all(self._visible.start <= at < self._visible.stop for at in point)

    def seed(self, contrast: float, edge: int = 1) -> Contour | None:
        """Draw the first paddle of a contour at a free position, `edge` pixels from the edge."""
        for _ in range(1 + RETRIALS):
            angle = self.draws.angle()
            free = self._free_starts(self._paddle(angle), edge)
            if not len(free):
                return None
            y, x = free[self.draws.below(len(free))].tolist()
            contour = self.first_paddle((y, x), angle, contrast)
            if contour is not None:
                return contour
        return None

    def first_paddle(self, start: Point, angle: float, contrast: float) -> Contour | None:
        """Draw a paddle at `start` if its end and the pivot behind it are inside the image."""
        length = self.settings.paddle_length
        end = translate(start, angle, length)
        pivot = translate(end, angle + math.pi, length + self.margin)
        if not (self.contains(end) and self.contains(pivot)):
            return None
        window, pending = self._lay(self._paddle(angle), start, contrast)
        return Contour(start, pivot, angle, end, window, pending)

    def extend(self, contour: Contour, contrast: float) -> bool:
        """Draw the next paddle and close the previous one; return False if impossible."""
        length = self.settings.paddle_length
        pivot = translate(contour.pivot, contour.angle, length + 2 * self.margin)
        points, angles = _circle(length + self.margin)
        chances = self._chances(pivot, contour.angle, points, angles)
        if chances[-1] < 1e-4:
            return False
        for _ in range(1 + RETRIALS):
            chosen = int(np.searchsorted(chances, self.draws.unit() * chances[-1], side="right"))
            y, x = points[chosen].tolist()
            tip, angle = (pivot[0] + y, pivot[1] + x), float(angles[chosen])
            piece = self._paddle(angle - math.pi if angle >= 0 else angle + math.pi)
            window = _window(tip, piece)
            if (self.mask[window] + piece.mask * self._inside[window]).max() < _CROSSING:
                self.close(contour)
                contour.window, contour.pending = self._lay(piece, tip, contrast)
                contour.pivot, contour.angle, contour.tip = pivot, angle, tip
                return True
        return False

    def close(self, contour: Contour) -> None:
        """Add the last paddle of a contour to the common mask."""
        part = self.mask[contour.window]
        np.maximum(part, contour.pending, out=part)

    def _chances(
        self, pivot: Point, angle: float, points: IntArray, angles: FloatArray
    ) -> FloatArray:
        """Return cumulative unnormalised weights of the points around a pivot where a paddle can
        end.

        Straight continuations are most likely: the weight is cos² of the turn times `continuity`.
        """
        full = len(self.mask)
        ends = (points + pivot) @ (full, 1)  # index in the flattened array
        around = disc_offsets(self.margin) @ (full, 1)
        taken = self.mask.take(ends[:, None] + around).max(axis=1)
        turn = np.abs(angles - angle)
        turn = np.minimum(turn, 2 * math.pi - turn) * self.settings.continuity
        weights = np.cos(np.minimum(turn, math.pi / 2)) ** 2
        chances: FloatArray = np.cumsum((1 - taken) * weights * self._inside.take(ends))
        return chances

    def _free_starts(self, piece: Paddle, edge: int) -> IntArray:
        """Return the points (num_points, 2), `edge` pixels from the edge, where a paddle fits."""
        first, last = self._visible.start + edge, self._visible.stop - edge
        side, reach = last - first, piece.half
        part = slice(first - reach, last + reach)
        inside = self._inside[part, part] > 0
        occupied = (self.mask[part, part] > _FREE) & inside
        inner = slice(reach, reach + side)
        rim = inside.copy()
        rim[inner, inner] = False
        occupied |= rim
        blocked = occupied[inner, inner].copy()
        for y, x in (piece.core + reach).tolist():
            blocked |= occupied[y : y + side, x : x + side]
        return np.argwhere(~blocked) + first

    def _paddle(self, angle: float) -> Paddle:
        s = self.settings
        return paddle(angle, s.paddle_length, s.paddle_thickness, self.margin, s.antialias)

    def _lay(self, piece: Paddle, start: Point, contrast: float) -> tuple[Window, FloatArray]:
        """Draw a paddle; return its window and its mask there."""
        window = _window(start, piece)
        part = self.image[window]
        np.maximum(part, piece.brightness * contrast, out=part)
        return window, piece.mask * self._inside[window]


def _window(start: Point, piece: Paddle) -> Window:
    y, x = (slice(at - piece.half, at + piece.half + 1) for at in start)
    return y, x


@lru_cache(maxsize=16)
def _circle(radius: int) -> tuple[IntArray, FloatArray]:
    """Return pixels at distance `radius` from the origin, (num_points, 2), and their angles."""
    around = np.arange(0, 2 * math.pi, 1 / radius)
    points = np.stack([np.sin(around), np.cos(around)], axis=1) * radius
    pixels = np.unique(np.floor(points).astype(np.int64), axis=0)
    return pixels, np.arctan2(pixels[:, 0], pixels[:, 1]).astype(np.float64)


@dataclass(frozen=True)
class Paddle:
    """A paddle that starts at the centre of a small square.

    Args:
        brightness: Brightness 0..1. Shape (2 · half + 1, 2 · half + 1).
        mask: Brightness dilated by the margin.
        half: Distance from the centre to the edge in pixels.
        core: Offsets from the start, (num_offsets, 2), of the pixels covered by the mask.
    """

    brightness: FloatArray
    mask: FloatArray
    half: int
    core: IntArray


@lru_cache(maxsize=4096)
def paddle(angle: float, length: int, thickness: float, margin: int, antialias: int) -> Paddle:
    """Draw a paddle in the direction `angle`; the mask is dilated by `margin` pixels.

    `thickness` is a whole number of pixels on the supersampled grid (factor `antialias`).
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
    """Draw a disc; return the brightness 0..1 of the whole image, (side, side)."""
    grid = np.arange(side * antialias)
    y, x = (grid[:, None] - centre[0] * antialias, grid - centre[1] * antialias)
    disc = (x**2 + y**2 <= (radius * antialias) ** 2) * np.uint8(255)
    return _shrink(disc, side)


def translate(point: tuple[int, int], angle: float, distance: float) -> tuple[int, int]:
    """Return the pixel at a distance and angle from a point, rounded up as in the source."""
    y, x = point[0] + distance * math.sin(angle), point[1] + distance * math.cos(angle)
    return math.ceil(y), math.ceil(x)


@lru_cache(maxsize=64)
def disc_offsets(radius: int) -> IntArray:
    """Return the offsets of the pixels within a radius, (num_offsets, 2)."""
    span = np.arange(-radius, radius + 1)
    inside = span[:, None] ** 2 + span**2 <= radius**2
    return np.argwhere(inside) - radius


def _grow(image: npt.NDArray[np.uint8], offsets: IntArray) -> npt.NDArray[np.uint8]:
    """Return the largest value in the neighbourhood of each pixel."""
    reach = int(np.abs(offsets).max())
    padded = np.pad(image, reach)
    side = len(image)
    grown = np.zeros_like(image)
    for y, x in offsets + reach:
        np.maximum(grown, padded[y : y + side, x : x + side], out=grown)
    return grown


def _shrink(image: npt.NDArray[np.uint8], side: int) -> FloatArray:
    small = PilImage.fromarray(image).resize((side, side), PilImage.Resampling.LANCZOS)
    return np.asarray(small, dtype=np.float64) / 255
