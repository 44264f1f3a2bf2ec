"""Local data sets of the package minari, in the format of D4RL's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from datamodules.trajectories.environments import Environment
from datamodules.trajectories.files import Steps, check_actions, check_finite
from lit_probattn.base.errors import DataError, MissingDataError

MINARI = "minari:"  # prefix of paths that name such a data set


def folder_of_minari(path: str) -> Path:
    """Return the folder of a local data set; see `read_minari` for `path` and errors."""
    return Path(_opened(path).storage.data_path).parent


def read_minari(path: str, environment: Environment) -> Steps:
    """Read all episodes of a local data set.

    Args:
        path: `minari:` and the name, such as `minari:mujoco/hopper/medium-v0`.

    Raises:
        MissingDataError: The data set is not on this machine, or the package is missing.
        DataError: The data set belongs to another environment.
    """
    episodes = list(_opened(path).iterate_episodes())
    parts = [_arrays(path, episode, environment) for episode in episodes]
    if not parts:
        raise DataError(f"{path}: the data set contains no episodes")
    observations, actions, rewards = (
        np.concatenate([part[place] for part in parts]) for place in range(3)
    )
    for key, values in (("observations", observations), ("actions", actions), ("rewards", rewards)):
        check_finite(path, key, values)
    check_actions(path, actions)
    ends = np.cumsum([len(part[2]) for part in parts]) - 1
    terminated = np.array([bool(episode.terminations[-1]) for episode in episodes])
    return Steps(observations, actions, rewards, ends, terminated)


def _opened(path: str) -> Any:
    name = path.removeprefix(MINARI)
    try:
        import minari
    except ImportError:
        raise MissingDataError(
            f"{path} needs the package minari: pip install 'lit-probattn[minari]'"
        ) from None
    try:
        return minari.load_dataset(name)
    except FileNotFoundError:
        raise MissingDataError(
            f"{path}: the data set is not on this machine; run `minari download {name}`"
        ) from None


def _arrays(path: str, episode: Any, environment: Environment) -> tuple[Any, Any, Any]:
    """Return the observations before each step, the actions and the rewards of an episode."""
    rewards = np.asarray(episode.rewards, dtype=np.float32)
    # The observation after the last step has no action.
    observations = np.asarray(episode.observations, dtype=np.float32)[: len(rewards)]
    actions = np.asarray(episode.actions, dtype=np.float32)
    shapes = observations.shape, actions.shape
    expected = (len(rewards), environment.obs_dim), (len(rewards), environment.act_dim)
    if shapes != expected or not len(rewards):
        raise DataError(
            f"{path}: {environment.name} requires observations of size {environment.obs_dim} and "
            f"actions of size {environment.act_dim}, received shapes {shapes[0]} and {shapes[1]}; "
            "set env to the environment of this data set"
        )
    return observations, actions, rewards
