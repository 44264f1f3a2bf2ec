"""One run of a table: task, row and seed; its commands, run folder and result file.

A run is identified by all settings that affect its result, not by its table, so tables share runs.
The files of modules that `--allow_code` permits are settings too, if it uses one of their classes.
A run may start from the weights of another run, its start, which is then part of its identity; its
data use the tokeniser of the start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from datamodules.core.base import CachedDataModule, DataModule
from lit_probattn.base import files as digests
from lit_probattn.base.allowed_code import files_of_allowed
from lit_probattn.base.config_files import run_stem
from lit_probattn.base.errors import ConfigError, DataError
from lit_probattn.compare.flags import Place, flags
from lit_probattn.compare.protocol import (
    STEPS,
    Options,
    attention_option,
    config_files,
    deciding,
    overrides,
    run_config,
    setting,
    start_of,
)
from lit_probattn.compare.results import read_result
from lit_probattn.compare.tables import Metric, Row, TaskEntry
from lit_probattn.configs import class_of, different_keys, parameters_of
from lit_probattn.training.checkpoints import list_checkpoints
from lit_probattn.training.run_folder import versions_of

INIT_FROM, TOKENISER = "run.init_from", "data.init_args.tokenizer"
# Verified cache folders, by configuration and folders of the data.
_OPENED: dict[str, str] = {}


@dataclass(frozen=True)
class Run:
    """A task, a row and a seed of a table: one training with its evaluations."""

    task: TaskEntry
    row: Row
    seed: int
    options: Options = field(default_factory=Options)
    place: Place = field(default_factory=Place)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Composed configuration, without seed and folders."""
        return run_config(self.task, self.row, self.options)

    @cached_property
    def digest(self) -> str:
        """Hash of all settings that affect the result, and of the code that `--allow_code` adds."""
        more: list[Any] = [dict(self.task.files)] if self.task.files else []
        more += [self.start.digest] if self.start else []
        more += [self.code] if self.code else []
        text = json.dumps(
            [deciding(self.config, self.task.checkpoint), self.seed, *more], sort_keys=True
        )
        return digests.digest(text, 12)

    @cached_property
    def code(self) -> dict[str, str]:
        """SHA-256 of the files of allowed modules whose classes the configuration names."""
        named = re.findall(r'"class_path": "(\w+)', json.dumps(self.config))
        files = {name: path for one in named for name, path in files_of_allowed(one).items()}
        return {name: digests.file_digest(path) for name, path in files.items()}

    # ---- start ---------------------------------------------------------------------------------

    @cached_property
    def start(self) -> Run | None:
        """The run from whose weights this one starts; None if settings name other weights."""
        task = start_of(self.task, self.options)
        if task is None or setting(self.config, INIT_FROM) is not None:
            return None
        seed = self.options.start_seed
        return replace(self, task=task, seed=self.seed if seed is None else seed)

    def chain(self) -> list[Run]:
        """Return its chain of starts, the first one first, and itself."""
        return [*(self.start.chain() if self.start else ()), self]

    def data(self) -> DataModule:
        """Build the DataModule; only the tokeniser of the start is read.

        It uses the start's tokeniser only if the cache of the start's data exists.

        Raises:
            DataError: the data files that this requires are missing.
        """
        found = self._tokeniser
        more = {} if found is None else {TOKENISER.rpartition(".")[2]: found}
        return data_of(self.config, self.place, **more)

    @property
    def data_key(self) -> str:
        """Identity of the data, equal for runs with the same data."""
        before = self.start.data_key if self.start else None
        return json.dumps([self.config["data"], before], sort_keys=True)

    @property
    def _shares_tokeniser(self) -> bool:
        """Whether the data of this run and of its start have a tokeniser that is not set here."""
        if self.start is None or setting(self.config, TOKENISER) is not None:
            return False
        option = TOKENISER.rpartition(".")[2]
        both = (class_of(run.config["data"]["class_path"]) for run in (self, self.start))
        return all(option in parameters_of(data) for data in both)

    @property
    def _tokeniser(self) -> str | None:
        """Folder of the start's tokeniser; None without one, or before it is built."""
        if self.start is None or not self._shares_tokeniser:
            return None
        key = json.dumps([self.start.data_key, self.place.data_dir, self.place.cache_dir])
        if key not in _OPENED:
            try:
                data = self.start.data()
                assert isinstance(data, CachedDataModule)
                _OPENED[key] = str(data.open().folder)
            except DataError:
                return None
        return _OPENED[key]

    def links(self) -> dict[str, Any]:
        """Return the settings that refer to the start: its weights and its tokeniser."""
        if self.start is None:
            return {}
        folder = self.start.version() or self.place.runs / self.start.run_name / "0"
        found: dict[str, Any] = {INIT_FROM: folder / self.start.task.checkpoint}
        if self._shares_tokeniser:
            found[TOKENISER] = self._tokeniser or f"<tokeniser of {self.start.name}>"
        return found

    # ---- data files ----------------------------------------------------------------------------

    @property
    def sources(self) -> dict[str, str] | None:
        """SHA-256 of the source files of its data and of its starts' data, by name.

        The current files are hashed. None if the data are missing.
        """
        found: dict[str, str] = {}
        for run in self.chain():
            hashes = run._own_sources
            if hashes is None:
                return None
            of = "" if run is self else f"{run.task.name}: "
            found |= {f"{of}{name}": sha for name, sha in hashes.items()}
        return found

    @property
    def _own_sources(self) -> dict[str, str] | None:
        known = self.place.hashes
        if self.data_key not in known:
            hashes: dict[str, str] | None
            try:
                hashes = getattr(self.data(), "present_hashes", dict)()
            except DataError:
                hashes = None
            if hashes is None:
                return None
            known[self.data_key] = hashes
        return known[self.data_key]

    # ---- names and folders ---------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the result file, and prefix of the run's name."""
        attention = run_stem(config_files(self.task, self.row, self.options)[1])
        heads = str(attention_option(self.config, "num_heads")).replace("/", "-")
        return f"{self.task.name}-{attention}-{heads}-seed{self.seed}-{self.digest}"

    @property
    def run_name(self) -> str:
        """Name of the run folder: the name of the result and a hash of the source files.

        Changed data start a new run, even if an unfinished one exists.
        """
        if not self.sources:
            return self.name
        text = json.dumps(self.sources, sort_keys=True)
        return f"{self.name}-data{digests.digest(text, 8)}"

    @property
    def label(self) -> str:
        """Task, row and seed."""
        return f"{self.task.name}, {self.row.label}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of results, locks and logs."""
        return self.place.runs / "reproduce"

    @property
    def result_path(self) -> Path:
        """Result file."""
        return self.folder / "results" / f"{self.name}.jsonl"

    @property
    def max_steps(self) -> int:
        """Number of optimiser steps.

        Raises:
            ConfigError: the task does not set it, or sets no limit.
        """
        steps = setting(self.config, STEPS)
        if not isinstance(steps, int) or steps < 1:
            raise ConfigError(
                f"{self.task.config}: expected {STEPS} of at least 1, received {steps}; set it, or "
                "use --steps"
            )
        return steps

    # ---- commands and results ------------------------------------------------------------------

    def fit_arguments(self, run_name: str | None = None) -> list[str]:
        """Return the command line of `fit`, after the program's name.

        Args:
            run_name: name of the run folder. None reads the source files, on which it depends.
        """
        settings = {
            "seed_everything": self.seed,
            **overrides(self.task, self.row, self.options),
            **self.links(),
            "trainer.enable_progress_bar": False,
            "run.root": self.place.runs,
            "run.name": self.run_name if run_name is None else run_name,
            "ckpt_path": "auto",
        }
        files = config_files(self.task, self.row, self.options)
        configs = [part for name in files for part in ("--config", name)]
        return ["fit", *configs, *flags(settings), *self.place.flag_arguments()]

    def evaluations(self) -> list[tuple[str, dict[str, Any], list[Metric]]]:
        """Return command, settings and metrics of each evaluation that the metrics require."""
        found: dict[str, tuple[str, dict[str, Any], list[Metric]]] = {}
        for metric in self.task.metrics.values():
            if metric.command != "count":
                entry: tuple[str, dict[str, Any], list[Metric]]
                entry = (metric.command, dict(metric.flags), [])
                key = json.dumps(entry[:2], sort_keys=True)
                found.setdefault(key, entry)[2].append(metric)
        return list(found.values())

    def evaluate_arguments(
        self, command: str, settings: Mapping[str, Any], version: Path
    ) -> list[str]:
        """The command line that evaluates the checkpoint of a run folder."""
        files = ["--config", str(version / "config.yaml"), "--ckpt_path", self.task.checkpoint]
        quiet = flags({"trainer.enable_progress_bar": False, **settings})
        return [command, *files, *quiet, *self.place.flag_arguments()]

    def version(self) -> Path | None:
        """Newest run folder with a checkpoint, or None."""
        for folder in versions_of(self.place.runs, self.run_name):
            if list_checkpoints(folder / "checkpoints", "step"):
                return folder
        return None

    def folder_of(self, result: Mapping[str, Any]) -> Path:
        """Return the run folder of its result, below --runs if that was moved since."""
        told = Path(result["run_folder"])
        return told if told.is_dir() else self.place.runs / told.parent.name / told.name

    def result(self) -> dict[str, Any] | None:
        """Return the result of a finished run; None if it is missing or of other data.

        A truncated file counts as missing. If the data are missing, the result is not checked
        against them.

        Raises:
            ConfigError: the file belongs to another run, or a field is missing or invalid.
        """
        found = self._kept()
        return None if found is None or self._changed(found) else found

    def changed_sources(self) -> list[str]:
        """Return the data files that differ from those of the result file."""
        found = self._kept()
        return [] if found is None else self._changed(found)

    def _kept(self) -> dict[str, Any] | None:
        expected = {"name": self.name, "seed": self.seed, "max_steps": self.max_steps}
        return read_result(self.result_path, expected, self.task.metrics.values())

    def _changed(self, result: Mapping[str, Any]) -> list[str]:
        now = self.sources
        return [] if now is None else different_keys(result["sources"], now)


def with_starts(runs: Iterable[Run]) -> list[Run]:
    """Return the runs and their starts without duplicates, each start before its dependants."""
    found: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        for part in run.chain():
            found.setdefault((part.task.name, part.row.name, part.seed), part)
    return list(found.values())


def share_of(runs: Iterable[Run], index: int, count: int) -> list[Run]:
    """Return every `count`-th group of runs from the `index`-th, each run once.

    A group contains the runs with the same first start, so one shard trains the whole chain.
    """
    groups: dict[str, dict[str, Run]] = {}
    for run in runs:
        groups.setdefault(run.chain()[0].name, {}).setdefault(run.name, run)
    return [run for group in list(groups.values())[index::count] for run in group.values()]


def data_of(config: Mapping[str, Any], place: Place, **more: Any) -> DataModule:
    """Build the DataModule of a configuration without reading data.

    Raises:
        ConfigError: the data are those of another package, whose sizes are not known.
    """
    entry = config["data"]
    cls = class_of(entry["class_path"])
    if not (isinstance(cls, type) and issubclass(cls, DataModule)):
        raise ConfigError(
            f"data.class_path: {entry['class_path']} is not a subclass of "
            "datamodules.core.base.DataModule, whose sizes a comparison requires: derive it from "
            "that class, or train each variant with fit"
        )
    folders = {"data_dir": place.data_dir, "cache_dir": place.cache_dir}
    places = {name: folder for name, folder in folders.items() if folder is not None}
    return cls(**{**entry.get("init_args", {}), **places, **more})
