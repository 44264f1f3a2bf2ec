"""Small files in D4RL's exact layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

OBS_DIM, ACT_DIM = 11, 3  # of Hopper
LENGTHS = (7, 3, 13, 1, 29, 5, 11)
TERMINATED = (True, True, False, True, False, True, True)


def arrays(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> dict[str, Any]:
    """Everything that a v2 file holds; episodes of these lengths."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    last = np.zeros(count, dtype=bool)
    last[np.cumsum(lengths) - 1] = True
    ended = np.resize(TERMINATED, len(lengths)).astype(bool)
    terminals = np.zeros(count, dtype=bool)
    terminals[np.cumsum(lengths)[ended] - 1] = True
    observations = rng.normal(3, 2, (count, OBS_DIM)).astype(np.float32)
    return {
        "observations": observations,
        "actions": rng.uniform(-1, 1, (count, ACT_DIM)).astype(np.float32),
        "rewards": rng.normal(2, 1, count).astype(np.float32),
        "terminals": terminals,
        "timeouts": last & ~terminals,
        "next_observations": np.roll(observations, -1, axis=0),
        "infos/action_log_probs": rng.normal(size=count).astype(np.float32),
        "infos/qpos": rng.normal(size=(count, 6)),
        "infos/qvel": rng.normal(size=(count, 6)),
        "metadata/algorithm": np.bytes_("SAC"),
        "metadata/iteration": np.array(500),
        "metadata/policy/fc0/weight": rng.normal(size=(5, OBS_DIM)),
    }


def write(path: Path, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write a file; `changes` replace arrays, `without` leaves some out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for key, values in {**arrays(), **changes}.items():
            if key not in without:
                file[key] = values
    return path
