"""Episodes of steps: returns-to-go, observation statistics, cached arrays."""

from __future__ import annotations

import itertools
import json
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.cache import Cache, CacheWriter, Mapped
from datamodules.trajectories.files import Steps

_ARRAYS = ("observations", "actions", "rewards", "returns_to_go", "offsets", "terminated")
_EPS = 1e-6


class Episodes(Mapped):
    """Episodes, stored consecutively.

    Args:
        observations: Recorded observations, (num_steps, obs_dim) float32.
        actions: (num_steps, act_dim) float32.
        rewards: (num_steps,) float32.
        returns_to_go: Undiscounted sum of the rewards from a step (included) to the end of
            its episode, (num_steps,) float64.
        offsets: First step of each episode, and the number of steps, (num_episodes + 1,).
        terminated: Whether an episode terminated instead of being truncated, (num_episodes,).
        moments: Mean and standard deviation + 1e-6 of each entry of the observations over all
            steps, (2, obs_dim) float64.
        notes: Remarks for reports.
    """

    def __init__(
        self,
        observations: npt.NDArray[np.float32],
        actions: npt.NDArray[np.float32],
        rewards: npt.NDArray[np.float32],
        returns_to_go: npt.NDArray[np.float64],
        offsets: npt.NDArray[np.int64],
        terminated: npt.NDArray[np.bool_],
        moments: npt.NDArray[np.float64],
        notes: list[str],
    ) -> None:
        self.observations, self.actions, self.rewards = observations, actions, rewards
        self.returns_to_go, self.offsets, self.terminated = returns_to_go, offsets, terminated
        self.moments, self.notes = moments, notes

    @classmethod
    def from_steps(cls, steps: Steps) -> Episodes:
        """Divide steps into episodes."""
        offsets = np.concatenate([[0], steps.ends + 1]).astype(np.int64)
        to_go = np.empty(len(steps.rewards), dtype=np.float64)
        for first, stop in itertools.pairwise(offsets):
            rewards = steps.rewards[first:stop].astype(np.float64)
            to_go[first:stop] = np.cumsum(rewards[::-1])[::-1]
        observations = steps.observations
        mean = observations.mean(axis=0, dtype=np.float64)
        std = observations.std(axis=0, dtype=np.float64) + _EPS
        arrays = (observations, steps.actions, steps.rewards, to_go, offsets, steps.terminated)
        return cls(*arrays, np.stack([mean, std]), steps.notes)

    @classmethod
    def from_cache(cls, cache: Cache) -> Episodes:
        """Open the episodes in a cache."""
        notes: list[str] = json.loads(cache.array("notes").tobytes())
        arrays = {name: cache.array(name) for name in (*_ARRAYS, "moments")}
        return cls(notes=notes, **arrays)

    def write(self, writer: CacheWriter) -> None:
        """Write the episodes to a new cache."""
        for name in (*_ARRAYS, "moments"):
            writer.add(name, getattr(self, name))
        writer.add("notes", np.frombuffer(json.dumps(self.notes).encode(), dtype=np.uint8))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_steps(self) -> int:
        """Number of steps of all episodes."""
        return len(self.rewards)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of steps of each episode, (num_episodes,)."""
        return np.asarray(np.diff(self.offsets))

    @cached_property
    def returns(self) -> npt.NDArray[np.float64]:
        """Undiscounted return of each episode, (num_episodes,)."""
        return np.asarray(self.returns_to_go[self.offsets[:-1]])

    def standardised(self, rows: Any) -> npt.NDArray[np.float32]:
        """Return the standardised observations of some steps."""
        mean, std = self.moments
        return ((self.observations[rows] - mean) / std).astype(np.float32)
