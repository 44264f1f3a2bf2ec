"""Episodes of a decision transformer, played side by side: one forward pass serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lit_probattn.models.decision_transformer import TOKENS_PER_STEP, DecisionTransformer
from lit_probattn.randomness import RandomKey
from lit_probattn.rollouts.environments import Environment, as_floats
from lit_probattn.rollouts.facts import EvaluationFacts

# Called after every step with its number and how many episodes go on.
Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Episode:
    """One finished episode.

    Args:
        number: names the episode, and its draws of noise.
        seed: of the environment's reset.
        target: the return that was asked for.
        total: the return, undiscounted.
        length: steps.
        actions: (length, act_dim) float64, if they were to be kept.
    """

    number: int
    seed: int
    target: float
    total: float
    length: int
    actions: np.ndarray | None = None


class _Histories:
    """What all episodes saw and did at their last steps; rows are episodes, also ended ones."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.observations: list[np.ndarray] = []
        self.returns: list[np.ndarray] = []
        self.actions: list[np.ndarray] = []

    def see(self, observations: np.ndarray, returns: np.ndarray) -> None:
        """Add a step's states and returns-to-go, (N, obs_dim) and (N, 1)."""
        self.observations = [*self.observations, observations][-self.steps :]
        self.returns = [*self.returns, returns][-self.steps :]

    def act(self, actions: np.ndarray) -> None:
        """Add a step's actions, (N, act_dim); the window needs one fewer than states."""
        self.actions = [*self.actions, actions][-(self.steps - 1) :] if self.steps > 1 else []


class Player:
    """Plays episodes of one policy, each in an environment of its own.

    The policy sees the last `context_length` steps: standardised states, its actions, and what is
    left of the target after the rewards so far. Until that window slides, caches continue the
    forward pass by the newest tokens; afterwards every token's place in the window changes, and the
    window is computed anew at every step. Both are the same numbers. Episodes that ended leave the
    batch. States, rewards and targets are float64 until the policy reads them in its own dtype.

    An episode depends on its seed, number and target alone, not on those played beside it, but for
    the rounding of sums in another order.

    Args:
        model: the policy; it is put into evaluation mode while it plays.
        facts: see `EvaluationFacts`.
        context_length: steps that the policy sees, K.
        seed: of noise that an attention draws in evaluation.
        use_cache: False computes the window anew at every step.

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
            target: return that all ask for.
            seeds: of the resets, one per episode.
            numbers: names of the episodes. None counts from 0.
            max_steps: end episodes after so many steps. None leaves that to the environments.
            keep_actions: whether episodes hold their actions.
            watch: see `Watch`.

        Raises:
            ValueError: an episode goes on beyond the last time step that the model knows, or there
                are not as many seeds as environments.
        """
        was_training = self.model.training
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
            self.model.train(was_training)

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
                chosen = self._anew(histories, running, rows, step)
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
        """Return the actions of running episodes, (R, act_dim), by the newest tokens alone."""
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

    def _anew(
        self, histories: _Histories, running: np.ndarray, rows: np.ndarray, step: int
    ) -> np.ndarray:
        """Return these actions by all tokens of the window."""
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
                f"an episode goes beyond step {step}, but the policy knows "
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
