"""Videos of episodes as GIF files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lit_probattn.base.files import replacing
from lit_probattn.rollouts.environments import Environment, make_environment, use_a_renderer

SIZE = 240  # side length in pixels
EVERY = 3  # steps between frames
MOST_PICTURES = 340


class Filmed:
    """An environment that records a frame every few steps.

    Args:
        environment: an environment with render mode `rgb_array`.
        every: number of steps between frames.
        most: maximum number of frames.
    """

    def __init__(self, environment: Any, every: int = EVERY, most: int = MOST_PICTURES) -> None:
        self.environment, self.every, self.most = environment, every, most
        self.frames: list[np.ndarray] = []
        self._steps = 0

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode and its recording."""
        found: tuple[Any, dict[str, Any]] = self.environment.reset(seed=seed)
        self.frames, self._steps = [], 0
        self._look()
        return found

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Apply an action; record a frame if due or if the episode ended."""
        found: tuple[Any, Any, bool, bool, dict[str, Any]] = self.environment.step(action)
        self._steps += 1
        if self._steps % self.every == 0 or found[2] or found[3]:
            self._look()
        return found

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()

    def _look(self) -> None:
        if len(self.frames) < self.most:
            self.frames.append(np.asarray(self.environment.render(), dtype=np.uint8))


def filmed_environment(name: str) -> Filmed | str:
    """Return an environment that can be recorded, or the reason in one line if none can."""
    use_a_renderer()
    environment: Environment | None = None
    try:
        size = {"width": SIZE, "height": SIZE}
        # The camera that follows the body in the models of D4RL's environments.
        environment = make_environment(name, render_mode="rgb_array", camera_name="track", **size)
        film = Filmed(environment)
        film.reset(seed=0)
        return film
    except ValueError:
        raise
    except Exception as error:  # OpenGL libraries raise arbitrary exceptions
        return (
            f"no video: rendering is not available ({type(error).__name__}); MUJOCO_GL=egl or "
            "osmesa requires libEGL or libOSMesa"
        )


def write_gif(path: Path, frames: Sequence[np.ndarray]) -> None:
    """Write frames, (height, width, 3) uint8 each, to a GIF file atomically.

    Raises:
        ValueError: there are no frames.
    """
    if not frames:
        raise ValueError(f"no frames to write to {path.name}: the episode has none")
    first, *others = (
        Image.fromarray(frame).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
        for frame in frames
    )
    with replacing(path) as partial:
        first.save(
            partial,
            format="GIF",
            save_all=True,
            append_images=others,
            duration=40,
            loop=0,
            optimize=True,
        )
