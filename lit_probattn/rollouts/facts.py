"""Facts about training data that an evaluation in an environment requires."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class EvaluationFacts:
    """How a policy's states are standardised, and which returns its scores refer to.

    Plain values: a checkpoint stores them, so that it can be evaluated without the data.

    Args:
        env_name: the environment; None if the data have none.
        observation_mean: mean of each entry of a state, to be subtracted.
        observation_std: standard deviation of each entry of a state, to divide by.
        target_returns: the two target returns of the policy.
        reference_returns: mean returns of a random policy and of an expert.
        return_scale: divisor of returns-to-go.

    Raises:
        ValueError: a value is missing, or a scale is not positive.
    """

    env_name: str | None
    observation_mean: tuple[float, ...]
    observation_std: tuple[float, ...]
    target_returns: tuple[float, ...]
    reference_returns: tuple[float, float]
    return_scale: float

    def __post_init__(self) -> None:
        for name in ("observation_mean", "observation_std", "target_returns", "reference_returns"):
            values = np.asarray(getattr(self, name), dtype=np.float64).ravel()
            if not np.isfinite(values).all():
                raise ValueError(f"{name} must be finite, received {values.tolist()}")
            object.__setattr__(self, name, tuple(values.tolist()))
        object.__setattr__(self, "return_scale", float(self.return_scale))
        if len(self.observation_mean) != len(self.observation_std):
            raise ValueError(
                "observation_mean and observation_std must have equal lengths, received "
                f"{len(self.observation_mean)} and {len(self.observation_std)}"
            )
        for name in ("target_returns", "reference_returns"):
            if len(getattr(self, name)) != 2:
                raise ValueError(
                    f"{name} must be two numbers, received {list(getattr(self, name))}"
                )
        if not min(self.observation_std, default=0.0) > 0 or not self.return_scale > 0:
            raise ValueError(
                "observation_std and return_scale must be positive, received "
                f"{min(self.observation_std, default=0.0)} and {self.return_scale}"
            )
        if self.reference_returns[0] == self.reference_returns[1]:
            raise ValueError(
                f"reference_returns must differ, received {list(self.reference_returns)}: they "
                "define the scores 0 and 100"
            )

    @classmethod
    def of(cls, data: Any) -> EvaluationFacts | None:
        """Return the facts in a DataModule's `evaluation`, a mapping; None if it has none."""
        found = getattr(data, "evaluation", None)
        if found is None:
            return None
        return cls(**{name: found[name] for name in cls.__dataclass_fields__})

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; `EvaluationFacts(**state)` restores them."""
        return asdict(self)

    def standardised(self, observations: np.ndarray) -> np.ndarray:
        """Return standardised states, in float64; (…, obs_dim)."""
        shifted = np.asarray(observations, np.float64) - np.asarray(self.observation_mean)
        return shifted / np.asarray(self.observation_std)

    def score(self, episode_return: float) -> float:
        """Return the normalised score: 0 is a random policy's mean return, 100 an expert's.

            score = 100 (return − random) / (expert − random)

        Source: D4RL (Fu et al., 2020).
        """
        random, expert = self.reference_returns
        return 100.0 * (episode_return - random) / (expert - random)
