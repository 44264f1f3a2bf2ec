"""Policies that record trajectories, and episodes recorded with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from datamodules.trajectories.environments import Environment
from datamodules.trajectories.simulators import make

__all__ = ["Actor", "Episode", "LinearPolicy", "Policy", "UniformPolicy"]

Array = npt.NDArray[np.float64]


class Policy(Protocol):
    """Chooses actions."""

    def act(self, observation: Array, rng: np.random.Generator) -> tuple[Array, float]:
        """Return an action in [-1, 1], (act_dim,), and the logarithm of its density."""


@dataclass(frozen=True)
class UniformPolicy:
    """Uniform actions."""

    act_dim: int

    def act(self, observation: Array, rng: np.random.Generator) -> tuple[Array, float]:
        """Return an action and the logarithm of its density."""
        return rng.uniform(-1, 1, self.act_dim), -self.act_dim * np.log(2.0)


@dataclass(frozen=True)
class LinearPolicy:
    """A linear function of standardised observations, with Gaussian noise, cut off at ±1.

    Args:
        weights: (act_dim, obs_dim).
        mean: Of observations, (obs_dim,).
        std: Likewise.
        noise: Standard deviation of the noise of each number of an action. The density of an action
            is that before the cut; without noise there is none, and its logarithm is given as 0.
    """

    weights: Array
    mean: Array
    std: Array
    noise: float = 0.0

    def act(self, observation: Array, rng: np.random.Generator) -> tuple[Array, float]:
        """Return an action and the logarithm of its density."""
        action = self.weights @ ((observation - self.mean) / self.std)
        if not self.noise:
            return action.clip(-1, 1), 0.0
        draw = rng.standard_normal(len(action))
        log_scale = np.log(2 * np.pi * self.noise**2)
        log_density = -0.5 * (draw @ draw + len(action) * log_scale)
        return (action + self.noise * draw).clip(-1, 1), float(log_density)


class Episode(NamedTuple):
    """One episode.

    Args:
        total: Sum of its rewards.
        observations: All but the last, as the simulator gives them, (num_steps, obs_dim) float64.
        recorded: Arrays by the names in `files.KEYS`, one row a step; empty if not asked for.
    """

    total: float
    observations: Array
    recorded: dict[str, npt.NDArray[Any]]


class Actor:
    """Plays episodes in an environment of its own; its buffers are made once."""

    def __init__(self, environment: Environment) -> None:
        self._env = make(environment)
        steps, obs_dim = environment.max_steps, environment.obs_dim
        simulator = self._env.unwrapped.data
        self._observations = np.empty((steps + 1, obs_dim))
        self._actions = np.empty((steps, environment.act_dim), dtype=np.float32)
        self._rewards, self._log_probs = np.empty(steps), np.empty(steps)
        self._qpos = np.empty((steps, len(simulator.qpos)))
        self._qvel = np.empty((steps, len(simulator.qvel)))

    def play(self, policy: Policy, key: tuple[int, ...], record: bool = False) -> Episode:
        """Play one episode, a pure function of the policy and the key (numbers from 0 on)."""
        rng = np.random.default_rng(key)
        observation, _ = self._env.reset(seed=int(rng.integers(2**31)))
        simulator = self._env.unwrapped.data
        self._observations[0] = observation
        step, terminated, truncated = 0, False, False
        while not (terminated or truncated):
            if record:  # the state before the step, as in D4RL
                self._qpos[step], self._qvel[step] = simulator.qpos, simulator.qvel
            action, self._log_probs[step] = policy.act(self._observations[step], rng)
            self._actions[step] = action
            observation, reward, terminated, truncated, _ = self._env.step(self._actions[step])
            self._rewards[step] = reward
            step += 1
            self._observations[step] = observation
        total, seen = float(self._rewards[:step].sum()), self._observations[:step].copy()
        return Episode(total, seen, self._recorded(step, bool(terminated)) if record else {})

    def _recorded(self, count: int, terminated: bool) -> dict[str, npt.NDArray[Any]]:
        last = np.arange(count) == count - 1
        observations = self._observations[: count + 1].astype(np.float32)
        return {
            "observations": observations[:-1],
            "actions": self._actions[:count].copy(),
            "rewards": self._rewards[:count].astype(np.float32),
            "next_observations": observations[1:],
            "terminals": last & terminated,
            "timeouts": last & (not terminated),
            "infos/qpos": self._qpos[:count].copy(),
            "infos/qvel": self._qvel[:count].copy(),
            "infos/action_log_probs": self._log_probs[:count].astype(np.float32),
        }
