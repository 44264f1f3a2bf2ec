"""Data sets of the package minari that lie on this machine, read as files of D4RL are."""

from __future__ import annotations

from typing import Any

import numpy as np

from datamodules.trajectories.environments import Environment
from datamodules.trajectories.files import Steps, check_actions, check_finite
from lit_probattn.base.errors import DataError, MissingDataError

__all__ = ["MINARI", "read_minari"]

MINARI = "minari:"  # what a path begins with that names such a data set


def read_minari(path: str, environment: Environment) -> Steps:
    """Read all episodes of a data set; nothing is downloaded.

    Args:
        path: `minari:` and the name, as `minari:mujoco/hopper/medium-v0`.

    Raises:
        MissingDataError: It is not on this machine.
        DataError: The package is missing, or the data set is of another environment.
    """
    name = path.removeprefix(MINARI)
    try:
        import minari
    except ImportError:
        raise DataError(
            f"{path} needs the package minari: pip install 'lit-probattn[minari]'"
        ) from None
    try:
        data = minari.load_dataset(name)
    except FileNotFoundError:
        raise MissingDataError(
            f"{path}: not among the data sets on this machine; run `minari download {name}`"
        ) from None
    episodes = list(data.iterate_episodes())
    parts = [_arrays(path, episode, environment) for episode in episodes]
    if not parts:
        raise DataError(f"{path}: there is no episode in it")
    observations, actions, rewards = (
        np.concatenate([part[place] for part in parts]) for place in range(3)
    )
    for key, values in (("observations", observations), ("actions", actions), ("rewards", rewards)):
        check_finite(path, key, values)
    check_actions(path, actions)
    ends = np.cumsum([len(part[2]) for part in parts]) - 1
    terminated = np.array([bool(episode.terminations[-1]) for episode in episodes])
    return Steps(observations, actions, rewards, ends, terminated)


def _arrays(path: str, episode: Any, environment: Environment) -> tuple[Any, Any, Any]:
    """Observations before each step, actions and rewards of an episode."""
    rewards = np.asarray(episode.rewards, dtype=np.float32)
    # The observation after the last step has no action.
    observations = np.asarray(episode.observations, dtype=np.float32)[: len(rewards)]
    actions = np.asarray(episode.actions, dtype=np.float32)
    shapes = observations.shape, actions.shape
    expected = (len(rewards), environment.obs_dim), (len(rewards), environment.act_dim)
    if shapes != expected or not len(rewards):
        raise DataError(
            f"{path}: {environment.name} has observations of {environment.obs_dim} and actions of "
            f"{environment.act_dim} numbers, received shapes {shapes[0]} and {shapes[1]}; set env "
            f"to the environment of this data set"
        )
    return observations, actions, rewards
