"""A small environment of plain NumPy, and a policy for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lit_probattn.attention import SoftmaxAttention
from lit_probattn.models.decision_transformer import DecisionTransformer
from lit_probattn.rollouts.facts import EvaluationFacts

OBS, ACT, CONTEXT = 4, 2, 6


class Pendulum:
    """A driven point whose episodes end after 9 to 24 steps, by their seed."""

    def __init__(self) -> None:
        self.observation_space = SimpleNamespace(shape=(OBS,))
        self.action_space = SimpleNamespace(shape=(ACT,))
        self.closed = False

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        rng = np.random.default_rng(seed)
        self.state = rng.uniform(-1.0, 1.0, OBS)
        self.left = int(rng.integers(9, 25))
        return self.state.copy(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert action.shape == (ACT,)
        assert np.abs(action).max() <= 1.0
        position, speed = self.state[:ACT], self.state[ACT:]
        speed = 0.9 * speed + 0.2 * action - 0.3 * np.sin(3.0 * position)
        self.state = np.concatenate([position + 0.1 * speed, speed])
        self.left -= 1
        return self.state.copy(), float(1.0 - speed @ speed), self.left == 0, False, {}

    def render(self) -> np.ndarray:
        picture = np.zeros((20, 30, 3), dtype=np.uint8)
        picture[:, int(10 + 5 * self.state[0])] = 255
        return picture

    def close(self) -> None:
        self.closed = True


def facts(**more: Any) -> EvaluationFacts:
    numbers = {
        "env_name": "Hopper",
        "observation_mean": np.linspace(-0.2, 0.3, OBS),
        "observation_std": np.linspace(0.5, 1.5, OBS),
        "target_returns": (30.0, 15.0),
        "reference_returns": (-20.272305, 3234.3),
        "return_scale": 10.0,
    }
    return EvaluationFacts(**{**numbers, **more})


def softmax(c, head_dim, **more):
    return SoftmaxAttention(c, 2, head_dim=head_dim, **more)


def policy(attention=softmax, obs_dim=OBS, act_dim=ACT, max_timestep=50) -> DecisionTransformer:
    """A random policy in float64 whose actions depend on everything that it sees."""
    torch.manual_seed(4)
    model = DecisionTransformer(
        attention,
        obs_dim=obs_dim,
        act_dim=act_dim,
        max_timestep=max_timestep,
        embed_dim=16,
        head_dim=8,
        num_layers=2,
        mlp_dim=32,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention" not in name or "_proj." in name:
                parameter.normal_(std=0.25)
    return model.double()
