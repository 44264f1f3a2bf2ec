"""Trajectories as a data set for decision transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.base import CachedDataModule, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.division import HeldOut
from datamodules.core.files import expand
from datamodules.core.own import AtPath
from datamodules.trajectories.environments import (
    MAX_STEPS,
    Environment,
    Quality,
)
from datamodules.trajectories.episodes import Episodes
from datamodules.trajectories.files import (
    RELEASE,
    environment_of,
    file_name,
    find_file,
    read_steps,
)
from datamodules.trajectories.minari_sets import MINARI, folder_of_minari, read_minari
from datamodules.trajectories.segments import SegmentCollate, Segments
from lit_probattn.base.arguments import (
    Count,
    Positive,
    check_argument,
    with_defaults,
)
from lit_probattn.base.errors import DataError, MissingDataError

_SHOWN_ROWS = 3


@with_defaults(val_fraction=0.05, batch_size=64)
class TrajectoryModule(HeldOut):
    """Base of data sets of trajectories: segments, validation episodes, checkpoint state.

    For the batches see `datamodules.trajectories.segments.SegmentCollate`. A segment starts at
    every step of a training episode, and an epoch contains each once, so that episodes are sampled
    in proportion to their length. Validation reads its episodes without overlap. Test and
    prediction read the same, since a decision transformer is tested by its return in the
    environment.

    Departs from the source: there, segments are drawn with replacement, and no episodes are held
    out (`val_fraction` 0).

    Args:
        context_length: Number of steps of a segment, with three tokens each.
        return_scale: Returns-to-go are divided by this.
        **kwargs: Arguments of HeldOut and DataModule. With a `val_fraction` of 0, training uses all
            episodes, and so does validation.
    """

    may_hold_out_none = True

    def __init__(
        self, *, context_length: Count = 20, return_scale: Positive = 1000.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.context_length, self.return_scale = context_length, float(return_scale)

    @property
    def environment(self) -> Environment:
        """The environment of the episodes."""
        raise NotImplementedError

    @property
    def episodes(self) -> Episodes:
        """All episodes."""
        raise NotImplementedError

    # ---- sizes -------------------------------------------------------------------------------

    @property
    def obs_dim(self) -> int:
        """Size of an observation."""
        return self.environment.obs_dim

    @property
    def act_dim(self) -> int:
        """Size of an action."""
        return self.environment.act_dim

    @property
    def max_timestep(self) -> int:
        """Rows of the time-step embedding: the length of the longest episode, at least 1000."""
        return max(MAX_STEPS, int(self.episodes.lengths.max()))

    @property
    def max_seq_len(self) -> int:
        """Number of tokens of a segment: return-to-go, state and action of each step."""
        return 3 * self.context_length

    @property
    def evaluation(self) -> dict[str, Any]:
        """Facts that are needed to run a trained model in its environment, as plain values.

        `env_name` in gymnasium without the version; `observation_mean` and `observation_std`, with
        the added 1e-6, to subtract and divide by; two `target_returns` for the model;
        `reference_returns` of a random policy and of an expert; `return_scale`, `context_length`
        and `max_timestep`, the exclusive upper bound of step numbers.
        """
        mean, std = self.episodes.moments
        return {
            "env_name": self.environment.name,
            "observation_mean": mean.tolist(),
            "observation_std": std.tolist(),
            "target_returns": list(self.environment.target_returns),
            "reference_returns": list(self.environment.reference_returns),
            "return_scale": self.return_scale,
            "context_length": self.context_length,
            "max_timestep": self.max_timestep,
        }

    # ---- splits ------------------------------------------------------------------------------

    def load_splits(self) -> dict[str, Split]:
        """Divide the episodes into segments."""
        episodes = self.episodes
        train, held_out = self._divided(len(episodes))
        sizes = self.context_length, self.return_scale
        val = Segments(episodes, held_out, *sizes, stride=self.context_length)
        splits: dict[str, Any] = {"train": Segments(episodes, train, *sizes)}
        splits.update(val=val, test=val)
        self.notes = [*episodes.notes, self._note_on_validation(len(held_out))]
        return splits

    def _divided(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the training and the validation episodes, each in order."""
        if not self.val_fraction:
            return np.arange(count), np.arange(count)
        if count < 2:
            raise DataError(
                f"{count} episode cannot be split into training and validation; set val_fraction "
                "to 0"
            )
        held_out = self.held_out(np.zeros(count, dtype=np.int64))
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)

    def _note_on_validation(self, count: int) -> str:
        if not self.val_fraction:
            return "validation reads the training episodes (val_fraction 0)"
        return f"validation and test read the same {count} held-out episodes"

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that collates a batch."""
        return SegmentCollate(self.context_length, self.obs_dim, self.act_dim)

    # ---- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluation facts, for checkpoints."""
        return {"evaluation": self.evaluation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise a DataError if a checkpoint was trained on other data."""
        before, now = state_dict["evaluation"], self.evaluation
        for name, value in now.items():
            if before[name] != value:
                shown = "are others" if isinstance(value, list) else f"is {value}"
                was = "" if isinstance(value, list) else f", was {before[name]}"
                raise DataError(
                    f"the checkpoint was trained on other data: {name} {shown}{was}; use the data "
                    "and the data settings of its training"
                )

    # ---- reports -----------------------------------------------------------------------------

    @property
    def headline(self) -> str:
        """First line of a report."""
        sizes = f"obs_dim {self.obs_dim}, act_dim {self.act_dim}, max_timestep {self.max_timestep}"
        return f"{self.environment.name}, {sizes}"

    def size_lines(self) -> Iterator[str]:
        """Yield lines about episodes, returns, lengths, actions and segments, and three rows."""
        episodes, score = self.episodes, self.environment.score
        count, terminated = len(episodes), int(episodes.terminated.sum())
        yield (
            f"{count} episodes, {episodes.num_steps} steps; {terminated} terminated, "
            f"{count - terminated} truncated"
        )
        returns = [float(f(episodes.returns)) for f in (np.min, np.mean, np.max)]
        shown = ", ".join(
            f"{name} {value:.1f} (score {score(value):.1f})"
            for name, value in zip(("min", "mean", "max"), returns, strict=True)
        )
        yield f"returns: {shown}"
        low, median, high = np.percentile(episodes.lengths, (0, 50, 100)).astype(int)
        mean = episodes.lengths.mean()
        yield f"steps per episode: min {low}, median {median}, mean {mean:.1f}, max {high}"
        ranges = zip(episodes.actions.min(axis=0), episodes.actions.max(axis=0), strict=True)
        yield f"actions: {', '.join(f'{low:.3f} to {high:.3f}' for low, high in ranges)}"
        train, val = self.splits["train"], self.splits["val"]
        yield f"train: {len(train.chosen)} episodes, {len(train)} segments, one from every step"
        yield f"val, test: {len(val.chosen)} episodes, {len(val)} segments without overlap"
        for row in np.linspace(0, episodes.num_steps - 1, _SHOWN_ROWS).astype(int):
            observation, action = (
                " ".join(f"{value:.3f}" for value in values[row])
                for values in (episodes.observations, episodes.actions)
            )
            yield (
                f"row {row}: observation {observation} | action {action} | reward "
                f"{episodes.rewards[row]:.3f} | return-to-go {episodes.returns_to_go[row]:.1f}"
            )


class Trajectories(AtPath, CachedDataModule, TrajectoryModule):
    """Trajectories in D4RL's format, for decision transformers.

    Files are D4RL's releases, such as `hopper_medium-v2.hdf5`; files of gymnasium's environments,
    such as `hopper_medium-v5.hdf5`; or any with `observations`, `actions`, `rewards`, `terminals`
    and `timeouts`. Observations are standardised by mean and standard deviation (+ 1e-6) of all
    steps.

    `path` is the file, or `minari:NAME` for a data set of the package minari on this machine.

    Args:
        env: HalfCheetah, Hopper or Walker2d. Default with `path`: inferred from the name.
        quality: Instead of `path`: random, medium, medium-replay, medium-expert or expert. The
            file is `<env>_<quality>-<version>.hdf5` in `data_dir`; a release (v2) takes precedence
            over data of gymnasium's environment (v5).
        **kwargs: Arguments of AtPath and TrajectoryModule.
    """

    task = "trajectories"

    def __init__(
        self, *, env: str | None = None, quality: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_argument("quality", quality, Quality | None)
        path = self.given_path
        if path and quality is not None:
            raise DataError("path and quality are mutually exclusive; set one of them")
        if not path and (env is None or quality is None):
            raise DataError(
                "no file is specified: set env and quality, such as `--env Hopper --quality "
                "medium`, or path"
            )
        self.path, self.quality = path, quality
        name = path if self._is_minari else Path(path).name
        self._environment = environment_of(name, env)

    def folder_of(self, path: str) -> Path | None:
        """Return the folder of `path`; None without one."""
        return expand(path).parent if path and not path.startswith(MINARI) else None

    @property
    def environment(self) -> Environment:
        """The environment of the episodes."""
        return self._environment

    def file(self) -> Path:
        """Return the file; raises MissingDataError if `quality` is set and none is found."""
        if self.quality is not None:
            return find_file(self.environment, self.quality, self.data_dir)
        return expand(self.path)

    @property
    def _is_minari(self) -> bool:
        return self.path.startswith(MINARI)

    # ---- the cache ---------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        name = self.path
        if not self._is_minari:
            try:
                place = self.file()
            except MissingDataError:
                place = self.data_dir / file_name(self.environment, str(self.quality), RELEASE)
            name = str(place.resolve())
        return {"file": name, "env": self.environment.name}

    def sources(self) -> list[Path]:
        """Return the file, or the folder of minari; raises MissingDataError if it is missing."""
        if self._is_minari:
            return [folder_of_minari(self.path)]
        file = self.file()
        if not file.is_file():
            raise MissingDataError(f"{file}: no such file")
        return [file]

    def build(self, writer: CacheWriter) -> None:
        """Read the file and divide it into episodes."""
        read = read_minari if self._is_minari else read_steps
        place: Any = self.path if self._is_minari else self.file()
        Episodes.from_steps(read(place, self.environment)).write(writer)

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits in the cache."""
        return TrajectoryModule.load_splits(self)

    @cached_property
    def episodes(self) -> Episodes:
        """All episodes; the cache is built first if necessary."""
        return Episodes.from_cache(self.cache)
