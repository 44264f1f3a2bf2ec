"""Returns of a decision transformer over its target returns.

The policy of a checkpoint plays episodes in the environment of its data, for several target returns
and the same seeds. The figure shows the mean return of each target with its standard deviation, the
line return = target, and the references of the normalised score. The data are not needed, since the
checkpoint stores the interface of its policy to the environment.

With --video, one episode of the largest target is drawn as a GIF file. With --one_by_one, the
episodes of that target are played twice more by the policy in float64: in parallel and one at a
time. Their actions differ only by rounding, and so do their returns unless the simulation amplifies
it.

Source: Decision Transformer (Chen et al., 2021), figure 4. Scores: D4RL (Fu et al., 2020).
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import BLUE, label
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.base.arguments import at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.models.decision_transformer import DecisionTransformer
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import markdown_table
from lit_probattn.rollouts.environments import (
    Environment,
    check_sizes,
    describe_environment,
    environment_id,
    make_environment,
)
from lit_probattn.rollouts.episodes import Episode, Player
from lit_probattn.rollouts.facts import EvaluationFacts
from lit_probattn.rollouts.video import filmed_environment, write_gif
from lit_probattn.training.checkpoints import load_checkpoint

# Default targets: shares of the way from a random policy's return to the data's larger target.
_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# Number of steps whose actions are compared: a simulation amplifies rounding in later steps.
_COMPARED_STEPS = 100
_ACTIONS_DIFFER = "largest difference between actions"


class Returns(ModelStudy):
    """Returns over target returns."""

    name, title = "returns", "Returns against target returns"
    with_data = False

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        text = "target returns; default: six up to the larger one of the data"
        add("--targets", type=float, nargs="+", help=text)
        add("--episodes", type=at_least(1), default=10, help="episodes of each target")
        text = "seed of the first episode; the others increase"
        add("--seed", type=at_least(0), default=100, help=text)
        add("--behaviour", type=float, help="mean return of the data, drawn as a line")
        add("--one_by_one", action="store_true", help="compare parallel episodes with single ones")
        text = "draw one episode of the largest target as a GIF file"
        add("--video", action="store_true", help=text)

    def _compute(self) -> str:
        self.policy, self.facts = self._policy(), self._known()
        self.env_name = str(self.facts.env_name)
        self.environment = environment_id(self.env_name)
        rows = pd.DataFrame([row for target in self._targets() for row in self._play(target)])
        self.results.table(rows, "episodes")
        table = means(rows, self.facts)
        self.results.table(table)
        best = table.loc[table["return"].idxmax()]
        claim = f"Best mean return: {best['return']:.1f}, for the target {best['target']:g}"
        figure = draw(table, self.facts, self.environment, self.options.behaviour)
        self.results.figure(figure, claim)
        told = describe_environment(self.env_name)
        versions = ", ".join(f"{k} {told[k]}" for k in ("gymnasium", "mujoco") if told[k])
        lines = [
            f"{self.environment} ({versions}), {self.options.episodes} episodes of each target, "
            f"seeds from {self.options.seed}. {told['warning'][0].upper()}{told['warning'][1:]}.",
            "",
            markdown_table(table),
            "",
            findings(table, self.options.behaviour),
        ]
        if self.options.one_by_one:
            lines += ["", self._one_by_one(float(table["target"].max()))]
        if self.options.video:
            lines += ["", self._video(float(table["target"].max()))]
        return "\n".join(lines)

    def _policy(self) -> DecisionTransformer:
        model = self.trained.task.model
        if not isinstance(model, DecisionTransformer):
            kind = type(self.trained.task).__name__
            raise ConfigError(f"returns needs a run of DecisionMaking, received one of {kind}")
        return model

    def _known(self) -> EvaluationFacts:
        kept = load_checkpoint(self.trained.checkpoint).get("evaluation")
        if kept is None or not kept.get("env_name"):
            raise ConfigError(
                f"{self.trained.checkpoint.name} has no environment, since its data had none"
            )
        return EvaluationFacts(**kept)

    def _targets(self) -> list[float]:
        given = self.options.targets or []
        if not np.isfinite(given).all():
            raise ConfigError(f"--targets must be finite, received {' '.join(map(str, given))}")
        if given:
            return sorted(set(given))
        low, high = self.facts.reference_returns[0], max(self.facts.target_returns)
        return [low + share * (high - low) for share in _SHARES]

    def _player(self, policy: DecisionTransformer | None = None) -> Player:
        task = self.trained.task
        policy = self.policy if policy is None else policy
        return Player(policy, self.facts, context_length=task.context_length, seed=task.seed)

    def _episodes(
        self, player: Player, target: float, numbers: Sequence[int], keep_actions: bool = False
    ) -> list[Episode]:
        """Play numbered episodes of a target in parallel."""
        environments: list[Environment] = []
        try:
            environments += [make_environment(self.env_name) for _ in numbers]
            check_sizes(self.environment, environments[0], self.policy.obs_dim, self.policy.act_dim)
            seeds = [self.options.seed + number for number in numbers]
            return player.play(
                environments, target, seeds, numbers=numbers, keep_actions=keep_actions
            )
        finally:
            for environment in environments:
                environment.close()

    def _play(self, target: float) -> list[dict[str, float]]:
        start = time.monotonic()
        played = self._episodes(self._player(), target, range(self.options.episodes))
        rows = [self._row(episode) for episode in played]
        mean = np.mean([row["return"] for row in rows])
        print(f"target {target:g}: return {mean:.1f}, {time.monotonic() - start:.0f} s", flush=True)
        return rows

    def _one_by_one(self, target: float) -> str:
        """Play episodes in parallel and one by one; return the text of the comparison."""
        player, numbers = self._player(copy.deepcopy(self.policy).double()), self.options.episodes
        together = self._episodes(player, target, range(numbers), keep_actions=True)
        alone = []
        for number in range(numbers):
            alone += self._episodes(player, target, [number], keep_actions=True)
            print(
                f"one at a time: {number + 1} of {numbers}, return {alone[-1].total:.1f}",
                flush=True,
            )
        table = pd.DataFrame(
            [compared(side, one) for side, one in zip(together, alone, strict=True)]
        )
        self.results.table(table, "one_by_one")
        means = table[["in parallel", "one at a time"]].mean()
        return "\n".join(
            [
                f"Target {target:g}, policy in float64, the same episodes in parallel and one at "
                "a time:",
                "",
                markdown_table(table),
                "",
                f"Mean returns {means['in parallel']:.4f} and {means['one at a time']:.4f}; "
                f"actions of the first {_COMPARED_STEPS} steps differ by at most "
                f"{table[_ACTIONS_DIFFER].max():.1e}.",
            ]
        )

    def _row(self, episode: Episode) -> dict[str, float]:
        return {
            "target": episode.target,
            "seed": episode.seed,
            "return": episode.total,
            "score": self.facts.score(episode.total),
            "length": episode.length,
        }

    def _video(self, target: float) -> str:
        """Write one episode as a GIF file; return its text."""
        film = filmed_environment(self.env_name)
        if isinstance(film, str):
            return f"{film[0].upper()}{film[1:]}."
        try:
            (episode,) = self._player().play([film], target, [self.options.seed])
        finally:
            film.close()
        path = self.results.path("gif")
        write_gif(path, film.frames)
        return (
            f"![an episode]({path.name}) Target {target:g}, seed {self.options.seed}: return "
            f"{episode.total:.1f} in {episode.length} steps."
        )


def compared(together: Episode, alone: Episode) -> dict[str, float]:
    """Return the comparison of an episode that was played in parallel and alone."""
    assert together.actions is not None
    assert alone.actions is not None
    count = min(_COMPARED_STEPS, together.length, alone.length)
    off = np.abs(together.actions[:count] - alone.actions[:count]).max()
    if min(_COMPARED_STEPS, together.length) != min(_COMPARED_STEPS, alone.length):
        off = float("inf")
    return {
        "seed": together.seed,
        "in parallel": together.total,
        "one at a time": alone.total,
        "steps": together.length,
        "steps one at a time": alone.length,
        _ACTIONS_DIFFER: float(off),
    }


def means(rows: pd.DataFrame, facts: EvaluationFacts) -> pd.DataFrame:
    """Return mean, deviation and score of each target; one episode has no deviation."""
    groups = rows.groupby("target")
    table = pd.DataFrame(
        {
            "return": groups["return"].mean(),
            "std": groups["return"].std(ddof=1),
            "length": groups["length"].mean(),
            "episodes": groups["return"].size(),
        }
    ).reset_index()
    table["score"] = [facts.score(value) for value in table["return"]]
    table["target score"] = [facts.score(value) for value in table["target"]]
    return table


def findings(table: pd.DataFrame, behaviour: float | None = None) -> str:
    """Return sentences on the relation of returns and targets."""
    best = table.loc[table["return"].idxmax()]
    lines = [
        f"The best mean return is {best['return']:.1f} (score {best['score']:.1f}), for the target "
        f"{best['target']:g}."
    ]
    if len(table) > 1:
        equal = table["return"].nunique() == 1
        rank = None if equal else table["target"].corr(table["return"], method="spearman")
        off = (table["return"] - table["target"]).abs()
        near = table.loc[off.idxmin()]
        order = (
            "no rank correlation: all returns are equal"
            if rank is None
            else f"rank correlation of targets and mean returns {rank:.2f}"
        )
        lines.append(
            f"{order[0].upper()}{order[1:]}; the target closest to its mean return is "
            f"{near['target']:g}, with {near['return']:.1f}."
        )
    if behaviour is not None:
        word = "above" if best["return"] > behaviour else "not above"
        lines.append(f"The best mean return is {word} the mean return of the data, {behaviour:g}.")
    return " ".join(lines)


def draw(
    table: pd.DataFrame, facts: EvaluationFacts, environment: str, behaviour: float | None = None
) -> Figure:
    """Draw mean returns with deviations over targets, and the references."""
    figure, axes = panels(1, 1, 5.0, 3.6)
    axis = axes[0][0]
    target, mean = table["target"].to_numpy(), table["return"].to_numpy()
    low = min(target.min(), mean.min())
    high = max(target.max(), mean.max())
    axis.plot([low, high], [low, high], color="0.5", lw=1.0, ls="--", label="return = target")
    spread = table["std"] if table["std"].notna().any() else None
    words = "policy, one episode each" if spread is None else "policy, ± std"
    axis.errorbar(target, mean, spread, color=BLUE, marker="o", ms=4, capsize=3, label=words)
    for value, name, colour in zip(
        facts.reference_returns, ("random", "expert"), ("0.7", "0.3"), strict=True
    ):
        if value <= high + 0.3 * (high - low):
            axis.axhline(value, color=colour, lw=0.9, ls=":", label=f"{name} {value:.0f}")
    if behaviour is not None:
        axis.axhline(behaviour, color="#b5651d", lw=1.0, label=f"data {behaviour:.0f}")
    bottom, top = axis.get_ylim()
    axis.set_ylim(bottom, top + 0.45 * (top - bottom))  # space for the legend
    label(axis, "target return", "return", environment)
    axis.legend(fontsize=7, frameon=False, loc="upper left", ncol=2)
    return figure
