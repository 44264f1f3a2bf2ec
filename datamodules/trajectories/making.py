"""Offline data from nothing: a policy is searched for and plays, and D4RL's files are written."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.core.errors import DataError, require_at_least
from datamodules.core.processes import num_useful
from datamodules.core.progress import progress
from datamodules.trajectories.crew import Crew, Play
from datamodules.trajectories.environments import Environment
from datamodules.trajectories.files import EpisodeFile, file_name, generator_of
from datamodules.trajectories.policies import Episode, LinearPolicy, UniformPolicy
from datamodules.trajectories.search import SETTINGS, Search

__all__ = ["TARGETS", "TrajectoryMaker"]

# Scores at which a policy is taken. D4RL stops at about a third of the expert for medium.
TARGETS = {"medium": 100 / 3, "expert": 95.0}
_STEPS = 1_000_000  # of D4RL's files
_BUDGETS = {"HalfCheetah": 8_000_000, "Hopper": 3_000_000, "Walker2d": 4_000_000, "Toy": 20_000}
_OUT_OF_REACH = ("Walker2d",)  # of a linear policy within an hour
_NOISE = 0.1  # of the actions of medium and expert
_MOST_JOBS = 8
_MOST_AT_ONCE = 64  # episodes
_RANDOM, _PLAYING = 3, 4  # streams of keys, after those of a search
_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class TrajectoryMaker:
    """Makes a file in D4RL's layout where there is none: `<env>_<quality>-v5.hdf5` in data_dir.

    `random` is uniform actions; `medium` is the first linear policy above a third of the expert,
    `expert` the first above 95 % of it, both with Gaussian noise of 0.1; `medium-replay` is every
    step of the search until `medium`; `medium-expert` is medium and expert, one after the other.
    Policies are found by augmented random search, one search for all of an environment and seed.
    Its history lies beside the files, and an interrupted search goes on from there.

    Args:
        num_steps: Steps to write at least; a file ends with an episode. None means 1,000,000.
            medium-replay has as many as it took.
        budget: Most steps of a search. None means 3,000,000 for Hopper, 8,000,000 for HalfCheetah,
            and 4,000,000 for Walker2d.
        jobs: Processes that play. None means one for each CPU, up to 8. The data do not depend on
            it.
        policy_seed: Seed of search and episodes.
        accept: Whether the best policy is taken where the score was not reached.
    """

    num_steps: int | None = None
    budget: int | None = None
    jobs: int | None = None
    policy_seed: int = 0
    accept: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, num_steps=self.num_steps, budget=self.budget, jobs=self.jobs)
        require_at_least(0, policy_seed=self.policy_seed)

    def prepare(self, data: Any) -> None:
        """Make the file of a `Trajectories` data set, unless there is one.

        Raises:
            DataError: The score was not reached; an option has no effect; a package is missing.
        """
        quality = data.quality
        if quality is None:
            self._refuse("path names a file, and nothing is made")
            return
        if file_name(data.environment, quality) in _names_in(data.data_dir):
            self._refuse(f"{data.file()} is a release, and nothing is made")
            return
        self.make(data.environment, quality, data.data_dir)

    def make(self, environment: Environment, quality: str, folder: Path) -> Path:
        """Make the file of a quality, unless it is there; return its path."""
        work = _Work(self, environment, folder)
        return work.file(quality)

    def _refuse(self, why: str) -> None:
        """Raise a DataError for options that would have no effect."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default:
                raise DataError(f"{why}; leave out --{field.name}")


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


class _Work:
    """Files of one environment and seed."""

    def __init__(self, options: TrajectoryMaker, environment: Environment, folder: Path) -> None:
        self.options, self.environment, self.folder = options, environment, folder
        self.version = environment.version or "toy"
        self.budget = options.budget or _BUDGETS[environment.name]
        self.jobs = num_useful(options.jobs, _MOST_JOBS)
        self._search = Search(environment, SETTINGS[environment.name], options.policy_seed)

    def file(self, quality: str) -> Path:
        self._check(quality)
        path = self.folder / file_name(self.environment, quality, self.version)
        if path.exists():
            self._compare(path, quality)
            return path
        if quality == "medium-expert":
            return self._both(path)
        with Crew.of(self.environment, self.jobs) as crew:
            if quality == "random":
                plays = self._endless(UniformPolicy(self.environment.act_dim), _RANDOM)
                return self._write(path, quality, crew, plays, self._steps, 0, {})
            iteration = self._found(quality.partition("-")[0], crew)
            if quality == "medium-replay":
                return self._replay(path, crew, iteration)
            policy = self._search.policy(iteration, _NOISE)
            stream = _PLAYING + list(TARGETS).index(quality)
            plays = self._endless(policy, stream)
            return self._write(path, quality, crew, plays, self._steps, iteration, _weights(policy))

    @property
    def _steps(self) -> int:
        return self.options.num_steps or _STEPS

    def _check(self, quality: str) -> None:
        """Refuse what has no effect, or no prospect."""
        name, options = self.environment.name, self.options
        if quality == "medium-replay" and options.num_steps is not None:
            raise DataError(
                "medium-replay has every step of the search until medium; leave out --num_steps"
            )
        if quality == "random":
            for option in ("budget", "accept"):
                if getattr(options, option):
                    raise DataError(f"random needs no search for a policy; leave out --{option}")
        elif name in _OUT_OF_REACH and not options.accept:
            raise DataError(
                f"{name}: a linear policy does not reach {quality.partition('-')[0]} within an "
                f"hour; put D4RL's release {file_name(self.environment, quality)} into "
                f"{self.folder}, or take the best policy found with --accept"
            )

    def _settings(self, quality: str) -> dict[str, Any]:
        """What a file depends on, beside the search and its budget."""
        steps = None if quality == "medium-replay" else self._steps
        return {"quality": quality, "num_steps": steps, "policy_seed": self.options.policy_seed}

    def _compare(self, path: Path, quality: str) -> None:
        """Refuse a file that was made otherwise than now asked for."""
        found = generator_of(path)
        if found is None:
            return
        for name, value in self._settings(quality).items():
            if found.get(name) != value:
                raise DataError(
                    f"{path} was made with {name} {found.get(name)}, now {value}; delete it to "
                    f"make it anew, or give the same"
                )

    # ---- a policy ----------------------------------------------------------------------------

    @property
    def _history(self) -> Path:
        """File of the search."""
        name = f"{self.environment.name.lower()}-{self.version}-seed{self._search.seed}"
        return self.folder / f".{name}.search.npz"

    def _found(self, level: str, crew: Crew) -> int:
        """Return the iteration of the search whose policy is of a level."""
        name, search, target = self.environment.name, self._search, TARGETS[level]
        if search.resume(self._history):
            _say(f"{name}: the search goes on at {search.num_steps} steps")
        lines = _Lines(name, level, target, self.budget)

        def tell(search: Search) -> None:
            search.save(self._history)
            lines.show(search)

        found = search.run(crew, target, self.budget, tell)
        if found is not None:
            _say(
                f"{name}: {level} (score {target:.1f}) reached after {search.counts[found]} steps: "
                f"score {search.scores[found]:.1f}"
            )
            return found
        best = search.best()
        told = "nothing was judged" if best is None else f"best {search.scores[best]:.1f}"
        missed = (
            f"{name}: score {target:.1f} ({level}) was not reached in {search.num_steps} steps, "
            f"{told}"
        )
        if best is None or not self.options.accept:
            raise DataError(
                f"{missed}; raise --budget (now {self.budget}): the search goes on where it is; or "
                f"take the best policy with --accept"
            )
        _say(f"{missed}; the best policy is taken")
        return best

    # ---- files -------------------------------------------------------------------------------

    def _endless(self, policy: Any, stream: int) -> Iterator[Play]:
        seed = self.options.policy_seed
        return (Play(policy, (seed, stream, number), True) for number in itertools.count())

    def _replay(self, path: Path, crew: Crew, last: int) -> Path:
        """Play what the search played before an iteration again, and write it."""
        search = self._search
        plays = (play for i in range(last) for play in search.plays(i, record=True))
        total = search.counts[last]
        return self._write(path, "medium-replay", crew, plays, total, last, {})

    def _write(
        self,
        path: Path,
        quality: str,
        crew: Crew,
        plays: Iterator[Play],
        least: int,
        iteration: int,
        more: dict[str, Any],
    ) -> Path:
        """Write episodes in their order until there are enough steps."""
        start = time.monotonic()
        metadata = {
            "algorithm": "uniform" if quality == "random" else "ARS V2-t",
            "iteration": iteration,
            "generator": {**self._search.identity, **self._settings(quality)},
            **more,
        }
        returns: list[float] = []
        with (
            EpisodeFile.create(path, metadata) as file,
            progress(path.name, least, "steps") as advance,
        ):
            while file.num_steps < least:
                # How many at once does not matter: an episode depends on nothing but its number.
                mean = file.num_steps / len(returns) if returns else least
                count = min(math.ceil((least - file.num_steps) / mean), _MOST_AT_ONCE)
                block = crew.play(itertools.islice(plays, max(count, self.jobs)))
                if not block:
                    break
                kept: list[Episode] = []
                for episode in block:
                    if file.num_steps + sum(len(e.observations) for e in kept) >= least:
                        break
                    kept.append(episode)
                file.append([episode.recorded for episode in kept])
                returns += [episode.total for episode in kept]
                advance(sum(len(episode.observations) for episode in kept))
            if quality == "medium-replay" and file.num_steps != least:
                raise DataError(
                    f"{path}: the search took {least} steps, and {file.num_steps} when played "
                    f"again: it was done on another machine; delete {self._history} to search anew"
                )
        mean = sum(returns) / len(returns)
        _say(
            f"{path.name}: {file.num_steps} steps, {len(returns)} episodes, return {mean:.1f} "
            f"(min {min(returns):.1f}, max {max(returns):.1f}), score "
            f"{self.environment.score(mean):.1f}; {time.monotonic() - start:.0f} s"
        )
        return path

    def _both(self, path: Path) -> Path:
        """Write medium and expert, one after the other, as D4RL did."""
        parts = [self.file(quality) for quality in ("medium", "expert")]
        metadata = {
            "algorithm": "ARS V2-t",
            "iteration": 0,
            "generator": {**self._search.identity, **self._settings("medium-expert")},
        }
        with EpisodeFile.create(path, metadata) as file:
            for part in parts:
                file.append_file(part)
        _say(f"{path.name}: {file.num_steps} steps of {' and '.join(p.name for p in parts)}")
        return path


def _weights(policy: LinearPolicy) -> dict[str, Any]:
    """The policy, as the group `metadata/policy` keeps it."""
    names = ("weights", "mean", "std", "noise")
    return {f"policy/{name}": getattr(policy, name) for name in names}


class _Lines:
    """Lines of progress of a search, some seconds apart."""

    def __init__(self, name: str, level: str, target: float, budget: int) -> None:
        self._about = f"{name}, {level} at score {target:.1f}"
        self._budget, self._start = budget, time.monotonic()
        self._shown = self._start

    def show(self, search: Search) -> None:
        now = time.monotonic()
        if now - self._shown < _SECONDS_BETWEEN_LINES:
            return
        self._shown = now
        best, last = search.best(), max(search.scores)
        assert best is not None
        _say(
            f"{self._about}: {search.num_steps} of {self._budget} steps, score "
            f"{search.scores[last]:.1f}, best {search.scores[best]:.1f}, {now - self._start:.0f} s"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
