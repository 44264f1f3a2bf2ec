"""Augmented random search for a linear policy, which goes on where it was interrupted.

Source: Mania, Guy and Recht, "Simple random search of static linear policies is competitive for
reinforcement learning", NeurIPS 2018, algorithm 2, version V2-t. An iteration plays the policy
with weights M + ν δ and M − ν δ for each of some random directions δ, in coordinates standardised
by all observations so far; the directions with the best of their two returns move the weights:

    M ← M + α / (b σ) Σ_k (r(M + ν δ_k) − r(M − ν δ_k)) δ_k,

with b directions and σ the standard deviation of their returns. A bonus that an environment pays
for not having fallen yet is taken off the returns.

Every episode is a pure function of (seed, iteration, direction, sign) and of the policy, and the
history keeps the policy of each iteration: so the search is exactly the same however often it is
interrupted and however many processes play, and what it saw can be played again.
"""

from __future__ import annotations

import json
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.errors import DataError
from datamodules.core.files import sync
from datamodules.trajectories.crew import Crew, Play
from datamodules.trajectories.environments import Environment
from datamodules.trajectories.policies import Episode, LinearPolicy

__all__ = ["SETTINGS", "Search", "SearchSettings"]

Array = npt.NDArray[np.float64]

_EPS = 1e-6
# What the episodes of a key are for.
_DIRECTIONS, _SEARCHING, _JUDGING = 0, 1, 2


@dataclass(frozen=True)
class SearchSettings:
    """How to search.

    Args:
        step_size: α.
        num_directions: Random directions of an iteration.
        num_best: Those that move the weights, b.
        noise: ν.
        alive_bonus: Taken off the reward of each step.
        judge_every: Iterations from one judgement of the policy to the next.
        num_judged: Episodes of a judgement; its score is that of their mean return.
    """

    step_size: float
    num_directions: int
    num_best: int
    noise: float
    alive_bonus: float
    judge_every: int = 5
    num_judged: int = 4


SETTINGS = {
    "HalfCheetah": SearchSettings(0.02, 8, 4, 0.03, 0.0),
    "Hopper": SearchSettings(0.01, 8, 4, 0.025, 1.0, judge_every=2),
    "Walker2d": SearchSettings(0.03, 16, 8, 0.025, 1.0),
    "Toy": SearchSettings(0.1, 4, 2, 0.1, 0.0, judge_every=2),
}


class Search:
    """The history of a search: entry i of each list is what iteration i begins with.

    Args:
        weights: (act_dim, obs_dim) each.
        counts: Steps played so far.
        means: Of the observations so far, (obs_dim,) each.
        squares: Sums of their squared differences from the mean, (obs_dim,) each.
        scores: Score of the policy, at the iterations where it was judged.
    """

    def __init__(self, environment: Environment, settings: SearchSettings, seed: int) -> None:
        self.environment, self.settings, self.seed = environment, settings, seed
        self.weights: list[Array] = [np.zeros((environment.act_dim, environment.obs_dim))]
        self.counts: list[int] = [0]
        self.means: list[Array] = [np.zeros(environment.obs_dim)]
        self.squares: list[Array] = [np.zeros(environment.obs_dim)]
        self.scores: dict[int, float] = {}

    # ---- asked -------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps played so far, those of judgements not counted."""
        return self.counts[-1]

    def first_at(self, target: float) -> int | None:
        """Return the first iteration whose policy was judged to have reached a score."""
        return next((i for i, score in sorted(self.scores.items()) if score >= target), None)

    def best(self) -> int | None:
        """Return the iteration of the best policy so far; None before the first judgement."""
        return max(self.scores, key=lambda i: (self.scores[i], -i), default=None)

    def policy(self, iteration: int, noise: float = 0.0) -> LinearPolicy:
        """Return the policy that an iteration begins with."""
        count, mean = self.counts[iteration], self.means[iteration]
        std = np.ones_like(mean)
        if count:
            std = np.sqrt(self.squares[iteration] / count) + _EPS
        return LinearPolicy(self.weights[iteration], mean, std, noise)

    def plays(self, iteration: int, record: bool = False) -> Iterator[Play]:
        """Yield what an iteration plays: both signs of each direction."""
        centre = self.policy(iteration)
        for direction, delta in enumerate(self._deltas(iteration)):
            for sign in (1, -1):
                weights = centre.weights + sign * self.settings.noise * delta
                policy = LinearPolicy(weights, centre.mean, centre.std)
                key = (self.seed, _SEARCHING, iteration, direction, (1 - sign) // 2)
                yield Play(policy, key, record)

    def _deltas(self, iteration: int) -> Array:
        rng = np.random.default_rng((self.seed, _DIRECTIONS, iteration))
        return rng.standard_normal((self.settings.num_directions, *self.weights[0].shape))

    # ---- done --------------------------------------------------------------------------------

    def run(
        self, crew: Crew, target: float, budget: int, tell: Callable[[Search], None]
    ) -> int | None:
        """Search until a score is reached or `budget` steps are played.

        Args:
            tell: Called after each judgement, to save the history and to show progress.

        Returns:
            The first iteration whose policy reached the score, or None.
        """
        while (found := self.first_at(target)) is None and self.num_steps < budget:
            self.iterate(crew)
            if (len(self.weights) - 1) % self.settings.judge_every == 0:
                self.judge(crew)
                tell(self)
        return found

    def iterate(self, crew: Crew) -> None:
        """Play one iteration and move the weights."""
        settings, iteration = self.settings, len(self.weights) - 1
        episodes = crew.play(self.plays(iteration))
        paid = [e.total - settings.alive_bonus * len(e.observations) for e in episodes]
        returns = np.array(paid).reshape(-1, 2)
        best = np.argsort(-returns.max(axis=1), kind="stable")[: settings.num_best]
        gain = returns[best, 0] - returns[best, 1]
        step = settings.step_size / (len(best) * (returns[best].std() + 1e-8))
        delta = np.einsum("k,kad->ad", gain, self._deltas(iteration)[best])
        self.weights.append(self.weights[-1] + step * delta)
        self._count(episodes)

    def _count(self, episodes: list[Episode]) -> None:
        """Merge the observations of some episodes into their mean and squares."""
        count, mean, squares = self.counts[-1], self.means[-1], self.squares[-1]
        new = np.concatenate([episode.observations for episode in episodes])
        total, shift = count + len(new), new.mean(axis=0) - mean
        squares = squares + ((new - new.mean(axis=0)) ** 2).sum(axis=0)
        self.squares.append(squares + shift**2 * count * len(new) / total)
        self.means.append(mean + shift * len(new) / total)
        self.counts.append(total)

    def judge(self, crew: Crew) -> float:
        """Score the policy as it is now."""
        iteration = len(self.weights) - 1
        policy = self.policy(iteration)
        keys = ((self.seed, _JUDGING, iteration, i) for i in range(self.settings.num_judged))
        episodes = crew.play(Play(policy, key) for key in keys)
        score = self.environment.score(float(np.mean([e.total for e in episodes])))
        self.scores[iteration] = score
        return score

    # ---- kept --------------------------------------------------------------------------------

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the search."""
        from importlib.metadata import PackageNotFoundError, version

        versions = {"numpy": np.__version__}
        for package in ("gymnasium", "mujoco") if self.environment.version else ():
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                versions[package] = "unknown"
        name = f"{self.environment.name}-{self.environment.version}"
        settings = asdict(self.settings)
        return {"env": name, "settings": settings, "seed": self.seed, "versions": versions}

    def save(self, path: Path) -> None:
        """Write the history atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:
                np.savez(
                    file,
                    identity=np.array(json.dumps(self.identity, sort_keys=True)),
                    weights=np.array(self.weights),
                    counts=np.array(self.counts),
                    means=np.array(self.means),
                    squares=np.array(self.squares),
                    judged=np.array(list(self.scores), dtype=np.int64),
                    scores=np.array(list(self.scores.values())),
                )
                sync(file)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def resume(self, path: Path) -> bool:
        """Take the history of a file, if there is one; returns whether there was.

        Raises:
            DataError: It cannot be read, or is of another search.
        """
        if not path.exists():
            return False
        again = "; delete it to search anew"
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
            identity = json.loads(str(found["identity"]))
            weights, means, squares = (
                list(found[name]) for name in ("weights", "means", "squares")
            )
            counts = [int(count) for count in found["counts"]]
            scores = dict(zip(found["judged"].tolist(), found["scores"].tolist(), strict=True))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: not the history of a search ({reason}){again}") from None
        for name, value in self.identity.items():
            if identity.get(name) != value:
                raise DataError(
                    f"{path}: the search was begun with {name} {identity.get(name)}, now {value}"
                    f"{again}, or go on with the same"
                )
        self.weights, self.means, self.squares = weights, means, squares
        self.counts, self.scores = counts, scores
        return True
