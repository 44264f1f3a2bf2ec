"""The environments of D4RL's locomotion data: sizes and reference returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_probattn.base.errors import DataError, nearest

Quality = Literal["random", "medium", "medium-replay", "medium-expert", "expert"]
# Maximum number of steps of an episode.
MAX_STEPS = 1000


@dataclass(frozen=True)
class Environment:
    """Facts about an environment that the data depend on.

    Args:
        name: gymnasium's name, without the version.
        obs_dim: Size of an observation.
        act_dim: Size of an action, whose entries are in [-1, 1].
        target_returns: Target returns for a trained model.
        reference_returns: Returns of a random policy and of an expert. Source: D4RL's `infos.py`.
        version: Version of gymnasium's environment for data generated here; None for other
            environments.
        max_steps: Maximum number of steps of an episode.
    """

    name: str
    obs_dim: int
    act_dim: int
    target_returns: tuple[float, float]
    reference_returns: tuple[float, float]
    version: str | None = "v5"
    max_steps: int = MAX_STEPS

    def score(self, total: float) -> float:
        """Normalise a return: 0 is the random reference policy, 100 the expert."""
        random, expert = self.reference_returns
        return 100 * (total - random) / (expert - random)


ENVIRONMENTS = {
    environment.name.lower(): environment
    for environment in (
        Environment("HalfCheetah", 17, 6, (12000.0, 6000.0), (-280.178953, 12135.0)),
        Environment("Hopper", 11, 3, (3600.0, 1800.0), (-20.272305, 3234.3)),
        Environment("Walker2d", 17, 6, (5000.0, 2500.0), (1.629008, 4592.3)),
    )
}


def environment_named(name: str) -> Environment:
    """Return an environment by its name, ignoring case.

    Raises:
        DataError: There is no such environment.
    """
    if name.lower() not in ENVIRONMENTS:
        valid = [environment.name for environment in ENVIRONMENTS.values()]
        hint = nearest(name, valid, lists=False)
        raise DataError(f"env must be one of {', '.join(valid)}, received {name!r}{hint}")
    return ENVIRONMENTS[name.lower()]
