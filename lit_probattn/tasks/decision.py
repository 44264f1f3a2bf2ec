"""Offline reinforcement learning as sequence modelling of returns, states and actions."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.base.arguments import Count, OnlyWith, Range, WholeNumber, arguments_of, takes
from lit_probattn.models.decision_transformer import DecisionTransformer
from lit_probattn.rollouts.environments import (
    check_sizes,
    describe_environment,
    make_environment,
)
from lit_probattn.rollouts.episodes import Episode, Player, Watch
from lit_probattn.rollouts.facts import EvaluationFacts
from lit_probattn.tasks.base import Split, Task, real_rows
from lit_probattn.tasks.counted import CountedTask
from lit_probattn.tasks.distributed import gather_objects, num_ranks

FIRST_SEED = 100  # added to the run's seed for the first episode, as in the source
_SECONDS_BETWEEN_LINES = 10.0
_TARGETS: tuple[Literal["high", "low"], ...] = ("high", "low")
_PLAYED = ("return", "return_std", "length", "score")  # logged for each target
# Logged if episodes are played.
_SCORES = ("score", *(f"{what}_{target}" for what in _PLAYED for target in _TARGETS))


class DecisionMaking(CountedTask):
    """Decision transformer, trained on the mean squared error of the actions of a global batch.

    The mean is over all entries of actions at real steps of the global batch, independent of the
    distribution over ranks and accumulation steps; padding is ignored.

    Batches: `observations` (B, K, obs_dim) standardised, `actions` (B, K, act_dim), `returns_to_go`
    (B, K, 1) scaled, `timesteps` (B, K) int64, `mask` (B, K) True on real steps, `sample_ids` (B,).

    Logs, in addition to the values of every task, for `val` and `test`: `loss`, the mean squared
    error, and `steps`, the number of real steps. If episodes are played (`test_episodes`,
    `val_episodes`), in the environment of the data and for both target returns, `high` and `low`:
    `return_high`, their mean return, its standard deviation `return_std_high` (from two episodes
    on), the mean `length_high`, the normalised `score_high`; and `score`, the larger of both
    scores. `provenance` contains the environment's versions, seeds, targets and every return.

    Episode i starts from the seed `seed` + 100 + i, for both targets, independent of the numbers of
    episodes, batches and ranks.

    Source: Decision Transformer (Chen et al., 2021), with the recipe of FiSH, NeurIPS 2022, table
    7: AdamW, linear warm-up to a constant rate.
    Departs from the source: every episode has a separate seed; environments are gymnasium's -v5.

    Args:
        context_length: K, number of steps in the policy's context.
        test_episodes: number of episodes that `test` plays per target; 0 computes only the loss.
        val_episodes: number of episodes that a validation plays per target.
        val_every: number of validations between those that play episodes.
        target_returns: the two target returns of the policy; None uses those of the data.

    Raises:
        ValueError: a value is out of range.
    """

    logged: ClassVar[tuple[str, ...]] = ("loss", "steps", *_SCORES)
    loss_unit: ClassVar[str] = "squared error"
    num_sums = 2  # squared errors, steps

    model: DecisionTransformer

    @takes(
        DecisionTransformer,
        Task,
        lr=1e-3,
        eps=1e-8,
        weight_decay=1e-4,
        schedule="constant",
        warmup_steps=10_000,
    )
    def __init__(
        self,
        *,
        context_length: Count,
        test_episodes: WholeNumber = 100,
        val_episodes: WholeNumber = 0,
        val_every: Annotated[Count, OnlyWith(val_episodes=Range(1))] = 1,
        target_returns: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**arguments_of(Task, options))
        if target_returns is not None and len(target_returns) != 2:
            raise ValueError(f"target_returns must be two numbers, received {list(target_returns)}")
        self.keep_arguments()
        self.context_length = context_length
        self.test_episodes, self.val_episodes, self.val_every = (
            *(test_episodes, val_episodes),
            val_every,
        )
        self.target_returns = target_returns
        self.model = DecisionTransformer(**arguments_of(DecisionTransformer, options))
        self.facts: EvaluationFacts | None = None
        self.provenance: dict[str, Any] = {}
        self._validations = 0  # since the last one with episodes

    # ---- set-up ------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Read the evaluation facts from the data; validate the environment.

        Raises:
            ValueError: the environment is missing, or its sizes differ from the data; see also
                `Task.setup`.
        """
        super().setup(stage)
        self.facts = EvaluationFacts.of(self.datamodule) or self.facts
        plays = self.val_episodes if stage in ("fit", "validate") else self.test_episodes
        if plays and stage != "predict" and self.facts is not None and self.facts.env_name:
            environment = make_environment(self.facts.env_name)
            try:
                sizes = self.model.obs_dim, self.model.act_dim
                check_sizes(self.facts.env_name, environment, *sizes)
            finally:
                environment.close()

    # ---- losses ------------------------------------------------------------------------------

    def predicted(self, batch: Any) -> Tensor:
        """Return the predicted actions of a batch, (B, K, act_dim)."""
        names = ("observations", "actions", "returns_to_go", "timesteps", "mask")
        inputs = {name: batch[name] for name in names}
        for name in names[:3]:
            inputs[name] = inputs[name].to(self.model.head.weight.dtype)
        return self.model(**inputs, rng=self.random_key(batch))

    def squared_errors(self, batch: Any) -> Tensor:
        """Return every step's mean squared error over its action's entries, (B, K); 0 at padding.

        Computed in float32 or float64.
        """
        predicted = self.predicted(batch)
        exact = predicted.to(compute_dtype(predicted))
        errors = (exact - batch["actions"].to(exact)).square().mean(-1)
        return torch.where(batch["mask"], errors, 0.0)

    def loss_sum(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum of the errors of a micro-batch's real steps, and their number; both ()."""
        return self.squared_errors(batch).sum(), batch["mask"].sum()

    def places(self, batch: Any) -> int:
        """Return the number of steps of a micro-batch, padding included."""
        return int(batch["mask"].numel())

    # ---- evaluation --------------------------------------------------------------------------

    def evaluate(self, batch: Any, split: Split) -> None:
        """Add the errors of the real steps of a batch."""
        rows = real_rows(batch)
        if len(rows["sample_ids"]):
            self.add_to_sums(self.squared_errors(rows).double().sum(), rows["mask"].sum())

    def log_scores(self, split: Split) -> None:
        """Log the loss; play episodes if due."""
        total, steps = self.summed().tolist()
        self.reset_scores()
        loss = torch.tensor(total / steps if steps else float("nan"), dtype=torch.float64)
        self.log(f"{split}/loss", loss, prog_bar=split == "val")
        self.log(f"{split}/steps", float(steps))
        count = self._episodes_now(split)
        if count:
            self._log_returns(split, count)

    def may_omit(self, metric: str) -> bool:
        """Whether only the validations that play episodes log a metric."""
        plays = self.val_episodes and self.facts is not None and self.facts.env_name
        return bool(plays) and metric.removeprefix("val/") in _SCORES

    def _episodes_now(self, split: Split) -> int:
        if self.is_final(split):
            return self.test_episodes
        if split == "test" or not self.val_episodes or self.trainer.sanity_checking:
            return 0
        self._validations += 1
        if self.trainer.state.fn == "fit" and self._validations < self.val_every:
            return 0
        self._validations = 0
        return self.val_episodes

    def _log_returns(self, split: Split, count: int) -> None:
        facts = self.facts
        if facts is None or not facts.env_name:
            self.print_line("no episodes played: the data specify no environment")
            return
        targets = sorted(self.target_returns or facts.target_returns, reverse=True)
        report = {**describe_environment(facts.env_name), "episodes": count}
        report |= {"first_seed": self.seed + FIRST_SEED, "targets": {}}
        report["reference_returns"] = list(facts.reference_returns)
        scores = {}
        for name, target in zip(_TARGETS, targets, strict=True):
            played = self.play(target, count)
            returns = np.array([episode.total for episode in played])
            scores[name] = facts.score(float(returns.mean()))
            found = {
                "return": float(returns.mean()),
                "length": float(np.mean([episode.length for episode in played])),
                "score": scores[name],
            }
            shown = f"{found['return']:.1f}"
            if count > 1:
                found["return_std"] = float(returns.std(ddof=1))
                shown += f" ± {found['return_std']:.1f}"
            exact = {k: torch.tensor(value, dtype=torch.float64) for k, value in found.items()}
            self.log_dict({f"{split}/{key}_{name}": value for key, value in exact.items()})
            report["targets"][name] = {"target": target, **found, "returns": returns.tolist()}
            self.print_line(
                f"{report['environment']}, target {target:g}: return {shown}, "
                f"score {found['score']:.1f}, {count} episodes of {found['length']:.0f} steps"
            )
        best = torch.tensor(max(scores.values()), dtype=torch.float64)
        self.log(f"{split}/score", best, prog_bar=split == "val")
        report["score_is"] = "the better of the two targets"
        self.provenance["evaluation"] = report
        if split == "test":
            self.print_line(f"note: {report['warning']}")

    def play(self, target: float, count: int) -> list[Episode]:
        """Play `count` episodes for a target return, distributed over the ranks; return all in
        order.

        Raises:
            ValueError: there is no environment, or see `Player.play`.
        """
        facts = self.facts
        if facts is None or not facts.env_name:
            raise ValueError("the data specify no environment to play in")
        trainer = self.trainer_or_none
        rank = 0 if trainer is None else trainer.global_rank
        numbers = range(rank, count, num_ranks())
        environments = [make_environment(facts.env_name) for _ in numbers]
        player = Player(self.model, facts, context_length=self.context_length, seed=self.seed)
        try:
            mine = player.play(
                environments,
                target,
                [self.seed + FIRST_SEED + number for number in numbers],
                numbers=numbers,
                watch=self._watch(target, len(numbers)),
            )
        finally:
            for environment in environments:
                environment.close()
        everyone = [episode for part in gather_objects(mine) for episode in part]
        return sorted(everyone, key=lambda episode: episode.number)

    def _watch(self, target: float, count: int) -> Watch | None:
        """Return a callback that prints a line every ten seconds while episodes are played."""
        trainer = self.trainer_or_none
        bar = getattr(trainer, "progress_bar_callback", None)
        if trainer is None or bar is None or not trainer.is_global_zero:
            return None
        shown = time.monotonic()

        def watch(step: int, running: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown >= _SECONDS_BETWEEN_LINES:
                shown = now
                line = f"target {target:g}: step {step}, {running} of {count} episodes running"
                print(line, file=sys.stderr, flush=True)

        return watch

    # ---- prediction --------------------------------------------------------------------------

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Predict the actions of the real rows of a batch.

        Returns:
            `sample_id` (R,), and for each of the R rows, at its real steps: `timesteps`, `actions`
            and `predicted`, lists of numbers or of lists of act_dim numbers.
        """
        rows = real_rows(batch)
        result: dict[str, Any] = {"sample_id": rows["sample_ids"]}
        named = {"timesteps": rows["timesteps"], "actions": rows["actions"]}
        if len(rows["sample_ids"]):
            named["predicted"] = self.predicted(rows).float()
        for name, values in named.items():
            kept = zip(values, rows["mask"], strict=True)
            result[name] = [row[real].tolist() for row, real in kept]
        return result

    # ---- checkpoints -------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the evaluation facts, and the number of validations since the last episodes."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["training"]["validations_since_episodes"] = self._validations
        if self.facts is not None:
            checkpoint["evaluation"] = self.facts.state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the evaluation facts, which standardise states as in training."""
        super().on_load_checkpoint(checkpoint)
        training = checkpoint.get("training", {})
        self._validations = training.get("validations_since_episodes", 0)
        if "evaluation" in checkpoint:
            self.facts = EvaluationFacts(**checkpoint["evaluation"])
