"""Studies of the runs of a table or figure: each runs once and is stored below the runs.

A `RunStudy` is a study of `lit_probattn.analysis` with its flags. It is used with three calls:

    spectrum = RunStudy("spectrum", {"full": True})
    failed = run_studies(spectrum.jobs(runs), 2, ())      # runs with a checkpoint, unless done
    table = spectrum.table(run, "spectrum_layers.csv")    # or Value(...).of(spectrum, run)

Results are in RUNS/reproduce/studies, one folder per run, study and flags. A study is done when
its `report.json` exists, which is written last; an interrupted one is restarted, and resumes if it
stores rows (`rank`, `query_likelihood`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from lit_probattn.analysis.registry import STUDIES, load_study
from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ChildError, ConfigError, nearest
from lit_probattn.base.files import digest
from lit_probattn.base.provenance import shown_command
from lit_probattn.compare.runs import Run
from lit_probattn.experiments.page import DATA, FIGURES
from lit_probattn.experiments.runner import Command, Job, Runner, Work
from lit_probattn.records.figures import PNG

MODULE = "lit_probattn.analysis"
_DEVICES = {"gpu": "cuda", None: "auto"}


@dataclass(frozen=True)
class RunStudy:
    """A study with its flags, for any run.

    Args:
        name: name of the study on the command line.
        flags: flags by name, without dashes; True is a switch, a list several values, `data.NAME`
            an argument of the data.

    Raises:
        ConfigError: the study or a flag is unknown.
    """

    name: str
    flags: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in STUDIES:
            raise ConfigError(f"unknown study {self.name!r}{nearest(self.name, STUDIES)}")
        parser = Parser()
        load_study(self.name).add_arguments(parser)
        known = re.findall(r"(?<![\w-])--(\w+)", parser.format_usage())
        for flag in self.flags:
            if flag not in known and not flag.startswith("data."):
                raise ConfigError(f"study {self.name}: unknown flag {flag!r}{nearest(flag, known)}")

    # ---- folders -----------------------------------------------------------------------------

    def folder(self, run: Run) -> Path:
        """Return the folder of a run's results.

        Its name depends on the flags and on the evaluated checkpoint, so a retrained run is
        studied again.
        """
        seen = (run.result() or {}).get("report")
        text = json.dumps([dict(self.flags), seen], sort_keys=True)
        return run.folder / "studies" / run.name / f"{self.name}-{digest(text, 8)}" / self.name

    def is_done(self, run: Run) -> bool:
        """Return whether the run is trained and its study finished."""
        return run.result() is not None and (self.folder(run) / DATA).is_file()

    def arguments(self, run: Run) -> list[str]:
        """Return the arguments of the command; for an untrained run with the expected checkpoint.

        Otherwise the checkpoint is that of the run's evaluation.
        """
        result, place = run.result(), run.place
        checkpoint = place.runs / run.run_name / "0"
        if result is not None:
            name = Path(result["report"]["checkpoint"]).name
            checkpoint = run.folder_of(result) / "checkpoints" / name
        words = [self.name, "--checkpoint", str(checkpoint), "--out", str(self.folder(run).parent)]
        words += ["--device", _DEVICES.get(place.accelerator, str(place.accelerator))]
        words += self.words
        folders = {"data_dir": place.data_dir, "cache_dir": place.cache_dir}
        data = [(f"--data.{key}", str(path)) for key, path in folders.items() if path]
        return [*words, *(word for pair in data for word in pair)]

    @property
    def words(self) -> list[str]:
        """The flags as on the command line."""
        words: list[str] = []
        for flag, value in self.flags.items():
            values = value if isinstance(value, list) else [value]
            words += [f"--{flag}", *(() if value is True else map(str, values))]
        return words

    def command(self, run: Run) -> str:
        """Return the command as typed in a shell."""
        return f"python -m {MODULE} {shown_command(self.arguments(run))}"

    # ---- running -----------------------------------------------------------------------------

    def jobs(self, runs: Sequence[Run]) -> list[StudyJob]:
        """Return the missing studies of the trained runs; equal runs are studied once."""
        trained = {run.name: run for run in runs if run.result() is not None}
        return [StudyJob(run, self) for run in trained.values() if not self.is_done(run)]

    # ---- reading -----------------------------------------------------------------------------

    def table(self, run: Run, file: str) -> pd.DataFrame:
        """Return a table of a finished study.

        Args:
            run: the run.
            file: name of the table, such as `spectrum_layers.csv`.

        Raises:
            ConfigError: the study has no such table.
        """
        path = self.folder(run) / file
        if not path.is_file():
            there = sorted(found.name for found in path.parent.glob("*.csv"))
            raise ConfigError(f"study {self.name}: unknown table {file}; has {', '.join(there)}")
        return pd.read_csv(path)

    def figures(self, run: Run) -> list[Path]:
        """Return the figures of a finished study."""
        return sorted((self.folder(run) / FIGURES).glob(f"*{PNG}"))


class StudyJob(Job):
    """The job that runs a study of a trained run; the study resumes from its stored rows.

    Args:
        run: the run.
        study: the study.
    """

    def __init__(self, run: Run, study: RunStudy) -> None:
        name, label = f"{run.name}-{study.folder(run).parent.name}", f"{run.label}, {study.name}"
        kind = (study.name, run.task.name, run.row.name)  # all seeds take equally long
        super().__init__(name, label, run.folder, kind=kind)
        self.run, self.study = run, study

    def is_done(self) -> bool:
        """Whether the study's report is complete."""
        return self.study.is_done(self.run)

    def work(self) -> Work:
        """Run the study; user errors are not retried."""
        words = self.study.arguments(self.run)
        yield from study_step(self.study.name, words, self.log_path)
        return f"done: {self.study.folder(self.run)}"


def study_step(name: str, arguments: Sequence[str], log: Path) -> Generator[Command, int, None]:
    """Yield the command of a study.

    Args:
        name: the study.
        arguments: arguments of its command line.
        log: file to which the output is appended.

    Raises:
        ChildError: the study failed; the message is the last line of the log.
    """
    status = yield Command(arguments, MODULE)
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = f"{name} exited with status {status}: {lines[-1][:300]}"
        raise ChildError(reason, again=status != 2)  # user errors are not retried


def run_studies(jobs: Sequence[Job], num_slots: int, devices: Sequence[str]) -> dict[str, str]:
    """Run studies; return the reasons, by label, for those that are not done.

    Args:
        jobs: studies and their comparisons.
        num_slots, devices: see `Runner`.
    """
    outcome = Runner(num_slots, devices, what="studies").run(jobs)
    busy = dict.fromkeys(outcome.elsewhere, "running in another process")
    return {**outcome.failed, **outcome.skipped, **busy}


@dataclass(frozen=True)
class Value:
    """A number in a table of a study.

    Args:
        file: the table.
        column: column to read in the selected rows.
        where: required values of columns.
        at_least, at_most: bounds on columns.
        reduce: reduction of the rows to one number; `only` expects a single row.
    """

    file: str
    column: str
    where: Mapping[str, Any] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)
    at_most: Mapping[str, float] = field(default_factory=dict)
    reduce: Literal["only", "mean", "max", "min"] = "only"

    @cached_property
    def _words(self) -> str:
        parts = (("", self.where), ("at least ", self.at_least), ("at most ", self.at_most))
        chosen = ", ".join(f"{k} {word}{v}" for word, part in parts for k, v in part.items())
        return f"{self.file}, column {self.column}" + (f" where {chosen}" if chosen else "")

    def of(self, study: RunStudy, run: Run) -> float:
        """Return the number of a studied run.

        Raises:
            ConfigError: the column or the rows are missing, or there are several rows for `only`.
        """
        table = study.table(run, self.file)
        for column in (self.column, *self.where, *self.at_least, *self.at_most):
            if column not in table:
                hint = nearest(column, table.columns)
                raise ConfigError(f"{self.file} has no column {column!r}{hint}")
        for column, value in self.where.items():
            table = table[table[column] == value]
        for column, least in self.at_least.items():
            table = table[table[column] >= least]
        for column, most in self.at_most.items():
            table = table[table[column] <= most]
        if table.empty or (self.reduce == "only" and len(table) > 1):
            raise ConfigError(f"{self._words}: expected one row, found {len(table)}")
        values = table[self.column]
        return float(values.iloc[0] if self.reduce == "only" else values.agg(self.reduce))
