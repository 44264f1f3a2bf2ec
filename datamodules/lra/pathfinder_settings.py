"""Parameters of Pathfinder's generator."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONTOUR_LENGTHS", "GENERATOR_VERSION", "GeneratorSettings"]

# A change of the pictures that a seed means needs a new number.
GENERATOR_VERSION = 1
CONTOUR_LENGTHS = {"easy": 6, "intermediate": 9, "hard": 14}


@dataclass(frozen=True)
class GeneratorSettings:
    """What decides the pictures; the defaults are those of Pathfinder32.

    Args:
        contour_length: Paddles of a target.
        side: Pixels of a side.
        padding: Pixels at the edge that stay empty.
        seed_distance: Pixels between the starts of the two targets.
        marker_radius: Pixels.
        paddle_length: Pixels.
        paddle_thickness: Pixels.
        paddle_margins: Room around paddles in pixels; one value is drawn for each picture.
        continuity: How straight contours are; 1 is the least.
        distractor_paddles: The number of distractors is this, divided by their length.
        snake_contrast: Brightness of distractors.
        paddle_contrast: Factor on it for targets.
        antialias: How much finer the grid is on which shapes are drawn.
        seed: Seed of the whole set, not negative.
    """

    contour_length: int = 14
    side: int = 32
    padding: int = 1
    seed_distance: int = 7
    marker_radius: float = 1.5
    paddle_length: int = 2
    paddle_thickness: float = 0.5
    paddle_margins: tuple[int, ...] = (1,)
    continuity: float = 1.0
    distractor_paddles: int = 20
    snake_contrast: float = 2.0
    paddle_contrast: float = 0.75
    antialias: int = 2
    seed: int = 0

    @classmethod
    def published(cls, side: int, difficulty: str, seed: int) -> GeneratorSettings:
        """Return the parameters of Pathfinder32 or Pathfinder128 (Path-X)."""
        length = CONTOUR_LENGTHS[difficulty]
        if side == 32:
            return cls(contour_length=length, seed=seed)
        return cls(
            contour_length=length,
            side=128,
            seed_distance=20,
            marker_radius=3.0,
            paddle_length=5,
            paddle_thickness=1.5,
            paddle_margins=(2, 3),
            continuity=1.8,
            distractor_paddles=35,
            snake_contrast=0.9,
            paddle_contrast=1.0,
            seed=seed,
        )

    @property
    def distractor_length(self) -> int:
        """Paddles of a distractor."""
        return self.contour_length // 3

    @property
    def num_distractors(self) -> int:
        """Distractors that are tried."""
        return self.distractor_paddles // self.distractor_length
