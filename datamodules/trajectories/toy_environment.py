"""A point pushed to the origin: a NumPy environment for tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.trajectories.environments import Environment

# Reference returns: uniform actions, and the best linear policy found.
TOY = Environment("Toy", 5, 2, (28.0, 14.0), (0.3, 29.4), version=None, max_steps=31)
_LIMIT = 1.5


class ToyEnvironment:
    """A point in the plane, with gymnasium's interface.

    A two-dimensional action accelerates the point; the reward of a step is 1 minus its distance
    from the origin. An episode terminates if the point leaves a square, and is truncated after 31
    steps. Observations (5,) are the position, the velocity, and the distance.
    """

    def __init__(self) -> None:
        self.data = SimpleNamespace(qpos=np.zeros(2), qvel=np.zeros(2))
        self._step = 0

    @property
    def unwrapped(self) -> ToyEnvironment:
        """The environment itself."""
        return self

    def reset(self, seed: int | None = None) -> tuple[npt.NDArray[np.float64], dict[str, Any]]:
        """Start an episode; return the observation and an empty dict."""
        rng = np.random.default_rng(seed)
        self.data.qpos[:], self.data.qvel[:] = rng.uniform(-1, 1, 2), rng.uniform(-0.2, 0.2, 2)
        self._step = 0
        return self._observation(), {}

    def step(
        self, action: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.float64], float, bool, bool, dict[str, Any]]:
        """Apply an action; return observation, reward, terminated, truncated, and an empty dict."""
        position, velocity = self.data.qpos, self.data.qvel
        velocity *= 0.8
        velocity += 0.15 * np.clip(np.asarray(action, dtype=np.float64), -1, 1)
        position += velocity
        self._step += 1
        observation = self._observation()
        terminated = bool(np.abs(position).max() > _LIMIT)
        truncated = not terminated and self._step == TOY.max_steps
        return observation, float(1 - observation[4]), terminated, truncated, {}

    def _observation(self) -> npt.NDArray[np.float64]:
        position = self.data.qpos
        return np.concatenate([position, self.data.qvel, [np.hypot(*position)]])

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
