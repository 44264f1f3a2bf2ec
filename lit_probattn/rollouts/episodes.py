"""Episodes of a decision transformer, batched in one forward pass per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lit_probattn.models.decision_transformer import TOKENS_PER_STEP, DecisionTransformer
from lit_probattn.randomness import RandomKey
from lit_probattn.rollouts.environments import Environment, as_floats
from lit_probattn.rollouts.facts import EvaluationFacts

# Called after every step with its number and the number of running episodes.
Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Episode:
    """One finished episode.

    number: index of the episode, which keys its noise.
    seed: seed of the environment's reset.
    target: target return.
    total: undiscounted return.
    length: number of steps.
    actions: (length, act_dim) float64, if requested.
    """

    number: int
    seed: int
    target: float
    total: float
    length: int
    actions: np.ndarray | None


class _Histories:
    """Inputs and actions of all episodes at the last steps; rows include ended episodes."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.observations: list[np.ndarray] = []
        self.returns: list[np.ndarray] = []
        self.actions: list[np.ndarray] = []

    def see(self, observations: np.ndarray, returns: np.ndarray) -> None:
        """Append a step's states and returns-to-go, (N, obs_dim) and (N, 1)."""
        self.observations = [*self.observations, observations][-self.steps :]
        self.returns = [*self.returns, returns][-self.steps :]

    def act(self, actions: np.ndarray) -> None:
        """Append a step's actions, (N, act_dim); the window has one fewer than states."""
        self.actions = [*self.actions, actions][-(self.steps - 1) :] if self.steps > 1 else []


class Player:
    """Plays episodes of one policy, each in a separate environment.

    The policy's context is the last `context_length` steps: standardised states, its actions, and
    the target return minus past rewards. Until the window slides, caches extend the forward pass by
    the newest tokens; afterwards the position of every token changes, and the window is recomputed
    at every step. Both give the same numbers. Ended episodes are removed from the batch. States,
    rewards and targets are float64 and converted to the policy's dtype on input.

    An episode depends on its seed, number and target alone, not on the rest of the batch, apart
    from rounding differences due to the order of sums.

    Args:
        model: the policy; set to evaluation mode while playing.
        facts: see `EvaluationFacts`.
        context_length: K, number of steps in the policy's context.
        seed: seed of noise that an attention draws in evaluation.
        use_cache: False recomputes the window at every step.

    Raises:
        ValueError: `context_length` is below 1.
    """

    def __init__(
        self,
        model: DecisionTransformer,
        facts: EvaluationFacts,
        *,
        context_length: int,
        seed: int = 0,
        use_cache: bool = True,
    ) -> None:
        if context_length < 1:
            raise ValueError(f"context_length must be at least 1, received {context_length}")
        self.model, self.facts, self.context_length = model, facts, context_length
        self.seed, self.use_cache = seed, use_cache

    @torch.no_grad()
    def play(
        self,
        environments: Sequence[Environment],
        target: float,
        seeds: Sequence[int],
        *,
        numbers: Sequence[int] | None = None,
        max_steps: int | None = None,
        keep_actions: bool = False,
        watch: Watch | None = None,
    ) -> list[Episode]:
        """Play one episode in each environment.

        Args:
            environments: one per episode.
            target: target return of all episodes.
            seeds: seeds of the resets, one per episode.
            numbers: indices of the episodes. None counts from 0.
            max_steps: truncate episodes after this number of steps. None leaves that to the
                environments.
            keep_actions: whether episodes store their actions.
            watch: see `Watch`.

        Raises:
            ValueError: an episode exceeds the model's maximum time step, the numbers of seeds
                and environments differ, or `max_steps` is below 1.
        """
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, received {max_steps}")
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            names = list(range(len(seeds))) if numbers is None else list(numbers)
            if not len(environments) == len(seeds) == len(names):
                raise ValueError(
                    f"expected one seed and number per environment, received {len(environments)} "
                    f"environments, {len(seeds)} seeds and {len(names)} numbers"
                )
            return self._play(environments, target, seeds, names, max_steps, keep_actions, watch)
        finally:
            for module in training:
                module.training = True

    def _play(
        self,
        environments: Sequence[Environment],
        target: float,
        seeds: Sequence[int],
        names: Sequence[int],
        max_steps: int | None,
        keep_actions: bool,
        watch: Watch | None,
    ) -> list[Episode]:
        count = len(environments)
        states = [
            as_floats(environment.reset(seed=seed)[0])
            for environment, seed in zip(environments, seeds, strict=True)
        ]
        observations = np.stack(states) if states else np.empty((0, self.model.obs_dim))
        totals, lengths = np.zeros(count), np.zeros(count, dtype=np.int64)
        kept: list[list[np.ndarray]] = [[] for _ in range(count)]
        running, step = np.arange(count), 0
        histories = _Histories(self.context_length)
        caches = self.model.new_caches(TOKENS_PER_STEP * self.context_length)
        while len(running):
            self._require_step(step)
            left = (target - totals[:, None]) / self.facts.return_scale
            histories.see(self.facts.standardised(observations), left)
            rows = np.asarray(names)[running]
            if self.use_cache and step < self.context_length:
                chosen = self._continue(histories, running, rows, step, caches)
            else:
                chosen = self._recomputed_actions(histories, running, rows, step)
            actions = np.zeros((count, self.model.act_dim))
            actions[running] = chosen
            histories.act(actions)
            going = np.ones(len(running), dtype=bool)
            for place, row in enumerate(running):
                state, reward, ended, cut, _ = environments[int(row)].step(actions[row])
                observations[row] = as_floats(state)
                totals[row] += float(reward)
                lengths[row] += 1
                if keep_actions:
                    kept[row].append(actions[row])
                going[place] = not (ended or cut or lengths[row] == max_steps)
            if not going.all():
                stay = torch.as_tensor(np.flatnonzero(going), device=self._device)
                for cache in caches if step + 1 < self.context_length else ():
                    if cache.length:
                        cache.reorder(stay)
                running = running[going]
            step += 1
            if watch is not None:
                watch(step, len(running))
        return [
            Episode(
                number=int(names[row]),
                seed=int(seeds[row]),
                target=float(target),
                total=float(totals[row]),
                length=int(lengths[row]),
                actions=np.array(kept[row]) if keep_actions else None,
            )
            for row in range(count)
        ]

    def _continue(
        self, histories: _Histories, running: np.ndarray, rows: np.ndarray, step: int, caches: list
    ) -> np.ndarray:
        """Return the actions of running episodes, (R, act_dim), from caches and new tokens."""
        previous = self._tensor(histories.actions[-1][running]) if step else None
        return self._numbers(
            self.model.next_action(
                self._tensor(histories.observations[-1][running]),
                previous,
                self._tensor(histories.returns[-1][running]),
                step,
                caches=caches,
                rng=self._key(rows),
            )
        )

    def _recomputed_actions(
        self, histories: _Histories, running: np.ndarray, rows: np.ndarray, step: int
    ) -> np.ndarray:
        """Return the actions of running episodes by recomputing the whole window."""
        window = len(histories.observations)
        actions = [
            part[running] for part in histories.actions[len(histories.actions) + 1 - window :]
        ]
        none = np.empty((len(running), 0, self.model.act_dim))
        timesteps = torch.arange(step + 1 - window, step + 1, device=self._device)
        predicted = self.model(
            self._tensor(np.stack([part[running] for part in histories.observations], 1)),
            self._tensor(np.stack(actions, 1) if actions else none),
            self._tensor(np.stack([part[running] for part in histories.returns], 1)),
            timesteps.expand(len(running), window),
            rng=self._key(rows),
        )
        return self._numbers(predicted[:, -1])

    def _require_step(self, step: int) -> None:
        if step >= self.model.max_timestep:
            raise ValueError(
                f"an episode exceeds step {step}, but the policy supports "
                f"{self.model.max_timestep} time steps: train it with a larger "
                "max_timestep, or end episodes earlier"
            )

    def _key(self, rows: np.ndarray) -> RandomKey:
        return RandomKey(self.seed, 0, torch.as_tensor(rows, device=self._device))

    @property
    def _device(self) -> torch.device:
        return self.model.head.weight.device

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(numbers, dtype=self.model.head.weight.dtype, device=self._device)

    @staticmethod
    def _numbers(actions: torch.Tensor) -> np.ndarray:
        return actions.double().cpu().numpy()
