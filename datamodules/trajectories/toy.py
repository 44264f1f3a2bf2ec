"""Trajectories of a point pushed to the origin, for tests and smoke runs without a simulator."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from datamodules.trajectories.data import TrajectoryModule
from datamodules.trajectories.environments import Environment
from datamodules.trajectories.episodes import Episodes
from datamodules.trajectories.files import Steps
from datamodules.trajectories.toy_environment import TOY, ToyEnvironment
from lit_probattn.base.arguments import Count, WholeNumber, with_defaults


@with_defaults(context_length=5, return_scale=10.0)
class ToyTrajectories(TrajectoryModule):
    """Episodes of a point in the plane, pushed to the origin by policies of increasing skill.

    Episode i is a pure function of (data_seed, i). All data are generated in memory; there is no
    cache.

    Args:
        num_episodes: Number of episodes, of at most 31 steps each.
        data_seed: Seed of the episodes.
        **kwargs: Arguments of TrajectoryModule.
    """

    task = "toy_trajectories"

    def __init__(
        self, *, num_episodes: Count = 64, data_seed: WholeNumber = 0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.num_episodes, self.data_seed = num_episodes, data_seed

    @property
    def environment(self) -> Environment:
        """The environment of the episodes."""
        return TOY

    @cached_property
    def episodes(self) -> Episodes:
        """All episodes, generated on first use."""
        return Episodes.from_steps(self._steps())

    def _steps(self) -> Steps:
        played = [
            _play(number / self.num_episodes, (self.data_seed, number))
            for number in range(self.num_episodes)
        ]
        observations, actions, rewards = (
            np.concatenate([each[place] for each in played]).astype(np.float32)
            for place in range(3)
        )
        ends = np.cumsum([len(each[2]) for each in played]) - 1
        return Steps(observations, actions, rewards, ends, np.array([each[3] for each in played]))


def _play(skill: float, key: tuple[int, ...]) -> tuple[Any, Any, Any, bool]:
    """Play an episode with a policy of skill in [0, 1).

    Returns observations, actions, rewards, and whether the episode terminated.
    """
    rng, environment = np.random.default_rng(key), ToyEnvironment()
    noise = 0.8 - 0.7 * skill
    weights = np.zeros((TOY.act_dim, TOY.obs_dim))
    weights[:, :2], weights[:, 2:4] = -skill * np.eye(2), -2 * skill * np.eye(2)
    seen, _ = environment.reset(seed=int(rng.integers(2**31)))
    rows = []
    terminated = truncated = False
    while not (terminated or truncated):
        action = weights @ seen + noise * rng.standard_normal(TOY.act_dim)
        action = action.clip(-1, 1).astype(np.float32)
        after, reward, terminated, truncated, _ = environment.step(action)
        rows.append((seen, action, reward))
        seen = after
    observations, actions, rewards = (np.array(each) for each in zip(*rows, strict=True))
    return observations, actions, rewards, terminated
