"""Decision transformers: returns-to-go, states and actions of a trajectory -> actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention.cache import Cache
from lit_probattn.base.arguments import Count, takes
from lit_probattn.models.transformer import Transformer
from lit_probattn.randomness import Dropout, RandomKey

TOKENS_PER_STEP = 3  # return-to-go, state, action
_STD = 0.02


class DecisionTransformer(nn.Module):
    """Causal transformer over (return-to-go, state, action) of every step; predicts at states.

        r₁ s₁ a₁ r₂ s₂ a₂ …  each linear, + time step ─ LayerNorm ─ drop ─ Block × L ─ LayerNorm
        action[t] = tanh(W h[s_t] + b)

    Source: Decision Transformer (Chen et al., 2021) with the sizes of FiSH, NeurIPS 2022, table 7;
    the blocks are pre-norm, and the time step is the only position embedding. Weight matrices of
    the blocks are initialised to N(0, 0.02²) and biases to 0, as in GPT-2; embeddings and head as
    in PyTorch.
    Departs from the source: nothing. (FiSH does not specify the initialisation.)

    Args:
        obs_dim: size of a state.
        act_dim: size of an action, with entries in [−1, 1].
        max_timestep: rows of the time-step embedding; steps count from 0.
        dropout: dropout of tokens and of every branch of a block.

    Raises:
        ValueError: a size is below 1, or see `Transformer`.
    """

    @takes(
        Transformer,
        without=(
            *("norm_first", "activation_dropout", "cross_attention", "norm_eps", "share_layers"),
            "attention_bias",
        ),
        embed_dim=256,
        head_dim=64,
        num_layers=3,
        mlp_dim=1024,
        dropout=0.1,
        attention_dropout=0.1,
        activation="relu",
    )
    def __init__(
        self,
        *,
        obs_dim: Count,
        act_dim: Count,
        max_timestep: Count,
        **stack: Any,
    ) -> None:
        super().__init__()
        embed_dim: int = stack["embed_dim"]
        self.obs_dim, self.act_dim, self.max_timestep = obs_dim, act_dim, max_timestep
        self.returns = nn.Linear(1, embed_dim)
        self.observations = nn.Linear(obs_dim, embed_dim)
        self.actions = nn.Linear(act_dim, embed_dim)
        self.timesteps = nn.Embedding(max_timestep, embed_dim)
        self.norm = nn.LayerNorm(embed_dim)
        self.dropout = Dropout(stack["dropout"])
        self.encoder = Transformer(**stack)
        self.head = nn.Linear(embed_dim, act_dim)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for module in self.encoder.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        observations: Tensor,
        actions: Tensor,
        returns_to_go: Tensor,
        timesteps: Tensor,
        *,
        mask: Tensor | None = None,
        rng: RandomKey | None = None,
    ) -> Tensor:
        """Return the predicted action of every step, (B, K, act_dim), in (−1, 1).

        An action depends on the state and return-to-go of its step, and on earlier steps.

        Args:
            observations: standardised states, (B, K, obs_dim).
            actions: (B, K, act_dim), or (B, K − 1, act_dim): the last action is not used.
            returns_to_go: scaled, (B, K, 1).
            timesteps: steps since the start of the episode, (B, K) int64.
            mask: real steps, (B, K) bool. None means all.
            rng: key of attention dropout and noise.

        Raises:
            ValueError: shapes are inconsistent with each other or with the model.
        """
        self._check(observations, actions, returns_to_go, timesteps)
        steps = observations.shape[1]
        tokens = self.embed(observations, actions, returns_to_go, timesteps)
        key_mask = None
        if mask is not None:
            key_mask = mask.repeat_interleave(TOKENS_PER_STEP, 1)[:, : tokens.shape[1]]
        hidden = self.encoder(self.dropout(tokens), key_mask=key_mask, is_causal=True, rng=rng)
        return torch.tanh(self.head(hidden[:, 1::TOKENS_PER_STEP][:, :steps]))

    def embed(
        self, observations: Tensor, actions: Tensor, returns_to_go: Tensor, timesteps: Tensor
    ) -> Tensor:
        """Return the normalised tokens in order, (B, 3 K, C), or one fewer; see `forward`."""
        steps, last = observations.shape[1], actions.shape[1]
        time = self.timesteps(timesteps)  # (B, K, C)
        states = self.observations(observations) + time
        returns = self.returns(returns_to_go) + time
        acts = self.actions(actions) + time[:, :last]
        if last < steps:
            acts = torch.cat([acts, acts.new_zeros(acts.shape[0], 1, acts.shape[2])], 1)
        tokens = torch.stack([returns, states, acts], 2).flatten(1, 2)  # (B, 3 K, C)
        return self.norm(tokens[:, : tokens.shape[1] - (steps - last)])

    def new_caches(self, capacity: int = 0) -> list[Cache]:
        """Return an empty cache per layer, with space for `capacity` tokens."""
        return self.encoder.new_caches(capacity)

    def next_action(
        self,
        observation: Tensor,
        previous_action: Tensor | None,
        return_to_go: Tensor,
        timestep: int,
        *,
        caches: Sequence[Cache],
        rng: RandomKey | None = None,
    ) -> Tensor:
        """Append a step to the caches and return its action, (B, act_dim).

        Equal to `forward` on all steps since the caches were empty.

        Args:
            observation: (B, obs_dim).
            previous_action: action of the previous step, (B, act_dim); None if the caches are
                empty.
            return_to_go: (B, 1).
            timestep: index of this step.
            caches: from `new_caches`.

        Raises:
            ValueError: there is a previous action and no step in the caches, or the reverse.
        """
        if (previous_action is None) != (caches[0].length == 0):
            given = "None" if previous_action is None else "an action"
            raise ValueError(
                "previous_action must be None at the first step and an action after it, received "
                f"{given} with {caches[0].length} tokens in the caches"
            )
        time = self.timesteps.weight[timestep]
        tokens = [self.returns(return_to_go) + time, self.observations(observation) + time]
        if previous_action is not None:
            tokens.insert(0, self.actions(previous_action) + self.timesteps.weight[timestep - 1])
        hidden = self.encoder(
            self.dropout(self.norm(torch.stack(tokens, 1))), is_causal=True, rng=rng, caches=caches
        )
        return torch.tanh(self.head(hidden[:, -1]))

    def _check(
        self, observations: Tensor, actions: Tensor, returns_to_go: Tensor, timesteps: Tensor
    ) -> None:
        batch, steps = observations.shape[:2]
        expected = {
            "observations": (observations, (batch, steps, self.obs_dim)),
            "returns_to_go": (returns_to_go, (batch, steps, 1)),
            "timesteps": (timesteps, (batch, steps)),
        }
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, received {tuple(tensor.shape)}")
        allowed = [(batch, count, self.act_dim) for count in (steps, steps - 1)]
        if tuple(actions.shape) not in allowed:
            raise ValueError(
                f"actions must have shape {allowed[0]}, or one step fewer, received "
                f"{tuple(actions.shape)}"
            )
