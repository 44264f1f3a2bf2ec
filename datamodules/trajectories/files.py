"""D4RL's HDF5 files: names and content.

A file stores the steps of many episodes consecutively: `observations`, `actions`, `rewards`,
`terminals` (the episode terminated) and `timeouts` (it was truncated).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.files import not_found
from datamodules.trajectories.environments import (
    ENVIRONMENTS,
    Environment,
    environment_named,
)
from lit_probattn.base.errors import DataError, MissingDataError

RELEASE = "v2"  # version of D4RL's files that the papers use
# Rounding can push the actions of tanh policies beyond 1.
_LARGEST_ACTION = 1 + 1e-5


def _h5py(why: str) -> Any:
    try:
        import h5py
    except ImportError:
        raise DataError(f"{why} needs the package h5py: pip install 'lit-probattn[rl]'") from None
    return h5py


# ---- names -------------------------------------------------------------------------------------


def file_name(environment: Environment, quality: str, version: str = RELEASE) -> str:
    """Return the name of a file, such as `hopper_medium_replay-v2.hdf5`."""
    return f"{environment.name.lower()}_{quality.replace('-', '_')}-{version}.hdf5"


def find_file(environment: Environment, quality: str, data_dir: Path) -> Path:
    """Find D4RL's release, or else data of gymnasium's environment.

    Raises:
        MissingDataError: Neither exists.
    """
    names = [file_name(environment, quality, v) for v in (RELEASE, environment.version or "toy")]
    for name in names:
        if (data_dir / name).is_file():
            return data_dir / name
    raise not_found(
        "Trajectories",
        f"{names[0]} and {names[1]}",
        f"the file {names[0]}",
        "It is a release of D4RL (http://rail.eecs.berkeley.edu/datasets/offline_rl)",
        f"trajectories --env {environment.name} --quality {quality}",
        data_dir,
        f"; examples/sets/d4rl_by_search.py generates {names[1]} without it",
    )


def environment_of(name: str, env: str | None = None) -> Environment:
    """Infer the environment from the name of a file or data set, unless `env` names it.

    Raises:
        DataError: The name contains no environment, or only others than `env`.
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    found = [ENVIRONMENTS[word] for word in words if word in ENVIRONMENTS]
    if env is None and not found:
        names = ", ".join(environment.name for environment in ENVIRONMENTS.values())
        raise DataError(
            f"{name}: the name does not contain an environment; set env to one of {names}"
        )
    chosen = found[0] if env is None else environment_named(env)
    if found and chosen not in found:
        raise DataError(
            f"{name}: the name contains {found[0].name}, received env={chosen.name}; remove env, "
            "or rename the file"
        )
    return chosen


# ---- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Steps of whole episodes, in order.

    Args:
        observations: (num_steps, obs_dim) float32.
        actions: (num_steps, act_dim) float32.
        rewards: (num_steps,) float32.
        ends: Last step of each episode, increasing; the last one is the last step.
            (num_episodes,).
        terminated: Whether the episode terminated instead of being truncated, (num_episodes,).
        notes: Remarks for reports.
    """

    observations: npt.NDArray[np.float32]
    actions: npt.NDArray[np.float32]
    rewards: npt.NDArray[np.float32]
    ends: npt.NDArray[np.int64]
    terminated: npt.NDArray[np.bool_]
    notes: list[str] = field(default_factory=list)


def read_steps(path: Path, environment: Environment) -> Steps:
    """Read a D4RL file, ignoring additional keys.

    An episode ends at a terminal or a timeout; if the file has no timeouts, at step 1000, as in
    D4RL's readers of v0 and v1. Steps after the last end are dropped, as in these readers.

    Raises:
        MissingDataError: There is no such file.
        DataError: The file is invalid or belongs to another environment; the message names the key.
    """
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file")
    if not path.stat().st_size:
        raise DataError(f"{path}: the file is empty; copy it again")
    h5py = _h5py(f"reading {path}")
    try:
        with h5py.File(path, "r") as file:
            return _steps_of(path, file, environment)
    except OSError as error:
        reason = " ".join(str(error).split())
        kind = "corrupt or truncated" if h5py.is_hdf5(path) else "not an HDF5 file"
        raise DataError(
            f"{path}: {kind}; expected a file in D4RL's layout, copy it again ({reason})"
        ) from None


def _steps_of(path: Path, file: Mapping[str, Any], environment: Environment) -> Steps:
    needed = ("observations", "actions", "rewards", "terminals")
    keys = (*needed, "timeouts") if "timeouts" in list(file) else needed
    lacking = [key for key in keys if file.get(key) is None]  # dangling links included
    if lacking:
        found = ", ".join(sorted(file)) or "nothing"
        raise DataError(
            f"{path}: missing {', '.join(lacking)}; D4RL's files contain {', '.join(needed)} and "
            f"timeouts, found {found}"
        )
    lengths = {key: _length(path, key, file[key]) for key in keys}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise DataError(f"{path}: expected one row per step, received different lengths: {shown}")
    if not lengths["rewards"]:
        raise DataError(f"{path}: the file contains no steps; copy it again")
    sizes = {"observations": environment.obs_dim, "actions": environment.act_dim}
    for key, size in sizes.items():
        if file[key].shape[1:] != (size,):
            raise DataError(
                f"{path}: {environment.name} requires {key} of size {size}, received shape "
                f"{file[key].shape}; set env to the environment of this file"
            )
    values = {key: _numbers(path, key, file[key]) for key in needed[:3]}
    flags = {key: _flags(path, key, file[key]) for key in keys[3:]}
    check_actions(path, values["actions"])
    terminals = flags["terminals"]
    notes = []
    if "timeouts" in flags:
        is_end = terminals | flags["timeouts"]
    else:
        is_end = terminals | _cut_at(terminals, environment.max_steps)
        notes.append(
            f"{path.name} has no timeouts: an episode ends at a terminal or at step "
            f"{environment.max_steps}, as in D4RL's readers of v0 and v1"
        )
    ends = np.flatnonzero(is_end)
    if not len(ends):
        raise DataError(
            f"{path}: no episode ends in {len(is_end)} steps: there are no terminals and no "
            "timeouts; correct the file"
        )
    count = int(ends[-1]) + 1
    if count < len(is_end):
        notes.append(f"{len(is_end) - count} steps after the end of the last episode are dropped")
    observations, actions, rewards = (values[key][:count] for key in needed[:3])
    return Steps(observations, actions, rewards, ends, terminals[ends], notes)


def _length(path: Path, key: str, dataset: Any) -> int:
    shape = getattr(dataset, "shape", None)
    if not shape:
        raise DataError(f"{path}: {key} is not an array with one row per step; correct the file")
    return int(shape[0])


def _numbers(path: Path, key: str, dataset: Any) -> npt.NDArray[np.float32]:
    if dataset.dtype.kind not in "fiu":
        raise DataError(
            f"{path}: {key} has dtype {dataset.dtype}, expected numbers; correct the file"
        )
    values = np.asarray(dataset[()], dtype=np.float32)
    if key == "rewards" and values.size != len(values):
        raise DataError(
            f"{path}: {key} must have one number per step, received shape {dataset.shape}; correct "
            "the file"
        )
    values = values.reshape(len(values)) if key == "rewards" else values
    check_finite(path, key, values)
    return values


def _flags(path: Path, key: str, dataset: Any) -> npt.NDArray[np.bool_]:
    values = np.asarray(dataset[()]).reshape(-1)
    wrong = (values != 0) & (values != 1)
    if len(values) != len(dataset) or wrong.any():
        received = f"{values[int(np.argmax(wrong))]}" if wrong.any() else f"shape {dataset.shape}"
        raise DataError(
            f"{path}: {key} must be 0 or 1 at each step, received {received}; correct the file"
        )
    return values.astype(np.bool_)


def check_finite(path: Path | str, key: str, values: npt.NDArray[np.float32]) -> None:
    """Raise a DataError that names the first step with a non-finite number."""
    rows = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if not rows.all():
        raise DataError(
            f"{path}: {key} of step {int(np.argmin(rows))}: expected finite numbers; remove the "
            "episode"
        )


def check_actions(path: Path | str, actions: npt.NDArray[np.float32]) -> None:
    """Raise a DataError that names the first step with an action outside [-1, 1]."""
    rows = np.abs(actions).max(axis=1)
    if rows.max() > _LARGEST_ACTION:
        step = int(np.argmax(rows > _LARGEST_ACTION))
        raise DataError(
            f"{path}: step {step}: actions must be in [-1, 1] (the model's output range), received "
            f"{rows[step]:g}; rescale them"
        )


def _cut_at(terminals: npt.NDArray[np.bool_], most: int) -> npt.NDArray[np.bool_]:
    """Mark every `most`-th step of an episode, counted from terminals and marks."""
    marks = np.zeros(len(terminals), dtype=np.bool_)
    starts = [0, *(np.flatnonzero(terminals) + 1).tolist(), len(terminals)]
    for start, stop in itertools.pairwise(starts):
        marks[start + most - 1 : stop : most] = True
    return marks
