"""Trajectories of a point that is pushed to the middle: tests, smoke runs; no simulator needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from datamodules.core.errors import require_at_least
from datamodules.trajectories.data import TrajectoryModule
from datamodules.trajectories.environments import Environment
from datamodules.trajectories.episodes import Episodes
from datamodules.trajectories.files import Steps
from datamodules.trajectories.policies import Actor, LinearPolicy
from datamodules.trajectories.toy_environment import TOY

__all__ = ["ToyTrajectories"]


class ToyTrajectories(TrajectoryModule):
    """Episodes of a point in the plane, pushed to the middle by policies from bad to good.

    Episode i is a pure function of (data_seed, i). Everything is made in memory; there is no cache.

    Args:
        num_episodes: Episodes, of at most 31 steps.
        data_seed: Seed of the episodes.
        context_length: Steps of a segment.
        return_scale: Returns-to-go are divided by this.
        **kwargs: Arguments of TrajectoryModule.
    """

    task = "toy_trajectories"

    def __init__(
        self,
        num_episodes: int = 64,
        data_seed: int = 0,
        context_length: int = 5,
        return_scale: float = 10.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(context_length=context_length, return_scale=return_scale, **kwargs)
        require_at_least(1, num_episodes=num_episodes)
        require_at_least(0, data_seed=data_seed)
        self.num_episodes, self.data_seed = num_episodes, data_seed
        self._episodes: Episodes | None = None

    @property
    def environment(self) -> Environment:
        """The environment that the episodes are of."""
        return TOY

    @property
    def episodes(self) -> Episodes:
        """All episodes, made when they are first used."""
        if self._episodes is None:
            self._episodes = Episodes.from_steps(self._steps())
        return self._episodes

    def _steps(self) -> Steps:
        actor = Actor(TOY)
        recorded = [
            actor.play(_policy(number / self.num_episodes), (self.data_seed, number), True).recorded
            for number in range(self.num_episodes)
        ]
        joined = {key: np.concatenate([r[key] for r in recorded]) for key in recorded[0]}
        ends = np.flatnonzero(joined["terminals"] | joined["timeouts"])
        observations, actions = joined["observations"], joined["actions"]
        return Steps(observations, actions, joined["rewards"], ends, joined["terminals"][ends])


def _policy(skill: float) -> LinearPolicy:
    """A policy that pushes to the middle the more, the higher its skill in [0, 1) is."""
    weights = np.zeros((TOY.act_dim, TOY.obs_dim))
    weights[:, :2], weights[:, 2:4] = -skill * np.eye(2), -2 * skill * np.eye(2)
    return LinearPolicy(weights, np.zeros(TOY.obs_dim), np.ones(TOY.obs_dim), 0.8 - 0.7 * skill)
