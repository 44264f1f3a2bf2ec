"""One cell of the benchmark: archive, variant, seed; its command, its run, its result file."""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datamodules.core.errors import MissingDataError
from datamodules.series.archive import ARCHIVES
from datamodules.series.uea import UEA
from lit_probattn.cli.app import main as run_command
from lit_probattn.compare.cells import flag, read_result
from lit_probattn.configs import find
from lit_probattn.records.provenance import device_name, git_revision, replace_text, versions
from lit_probattn.reproduce.uea.recipes import Recipe, Table, Variant

Selection = Literal["val", "test"]


@dataclass(frozen=True)
class Place:
    """Where data lie and results go, and what may be changed for all cells.

    Args:
        data_dir, cache_dir: folders of the data; None for their defaults.
        source: `released` or `bundled`.
        select_on: the split that selects the checkpoint.
        runs: folder of the runs.
        out: folder of the results.
        accelerator: Lightning's name of the hardware.
        epochs: passes over the training split, in place of the recipes'. None keeps them.
    """

    data_dir: str | None
    cache_dir: str | None
    source: Literal["released", "bundled"]
    select_on: Selection
    runs: Path
    out: Path
    accelerator: str
    epochs: int | None

    def data(self, archive: str) -> UEA:
        """Make the DataModule of an archive; nothing is read."""
        return UEA(
            archive,
            source=self.source,
            select_on=self.select_on,
            data_dir=self.data_dir,
            cache_dir=self.cache_dir,
        )


@dataclass(frozen=True)
class Sizes:
    """Sizes of an archive, as they are on disk or as published.

    Args:
        num_train, num_val, num_test: series of the splits.
        num_features, max_seq_len, num_classes: what the model is built for.
        missing: why the archive cannot be read; None if it can.
        sha256: hashes of the files; empty if they cannot be read.
    """

    num_train: int
    num_val: int
    num_test: int
    num_features: int
    max_seq_len: int
    num_classes: int
    missing: str | None
    sha256: dict[str, str]


def sizes_of(archive: str, place: Place) -> Sizes | str:
    """Return the sizes of an archive, or why they are unknown.

    Raises:
        DataError: the files are there but malformed.
    """
    data = place.data(archive)
    try:
        data.setup()
    except MissingDataError as error:
        known = ARCHIVES[archive]
        if known is None:
            return str(error)
        held_out = 0 if place.select_on == "test" else round(data.val_fraction * known.num_train)
        val = known.num_test if place.select_on == "test" else held_out
        shape = (known.num_features, known.max_length, known.num_classes)
        return Sizes(known.num_train - held_out, val, known.num_test, *shape, str(error), {})
    return Sizes(
        num_train=len(data.split("train")),
        num_val=len(data.split("val")),
        num_test=len(data.split("test")),
        num_features=data.num_features,
        max_seq_len=data.max_seq_len,
        num_classes=data.num_classes,
        missing=None,
        sha256=data.provenance["archive_sha256"],
    )


@dataclass(frozen=True)
class Cell:
    """A point of the benchmark."""

    table: Table
    recipe: Recipe
    variant: Variant
    seed: int
    sizes: Sizes
    place: Place

    @property
    def epochs(self) -> int:
        """Passes over the training split."""
        return self.recipe.epochs if self.place.epochs is None else self.place.epochs

    @property
    def batch_size(self) -> int:
        """Samples of a step: the recipe's, or all that train."""
        return min(self.recipe.batch_size, self.sizes.num_train)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches of an epoch."""
        return self.sizes.num_train // self.batch_size

    @property
    def max_steps(self) -> int:
        """Optimiser steps."""
        return self.epochs * self.steps_per_epoch

    @property
    def selection(self) -> str:
        """How the checkpoint is chosen."""
        if self.place.select_on == "test":
            return "best accuracy on the test split"
        return "lowest loss on 20 % of the training file, held out by class"

    def deciding_arguments(self) -> list[str]:
        """Flags of `fit` that decide the numbers."""
        settings: dict[str, Any] = {
            "seed_everything": self.seed,
            "data.init_args.name": self.recipe.archive,
            "data.init_args.source": self.place.source,
            "data.init_args.select_on": self.place.select_on,
            "data.init_args.batch_size": self.batch_size,
            **{f"model.init_args.{key}": value for key, value in self.recipe.model.items()},
            **{
                f"model.init_args.attention.init_args.{key}": value
                for key, value in self.variant.init_args.items()
            },
            "trainer.max_steps": self.max_steps,
            "trainer.val_check_interval": 2 * self.steps_per_epoch,
        }
        if self.place.select_on == "test":
            settings |= {"run.monitor": "val/accuracy", "run.monitor_mode": "max"}
        files = ["--config", self.table.task, "--config", self.variant.config]
        return files + [part for key, value in settings.items() for part in flag(key, value)]

    def arguments(self) -> list[str]:
        """The command line of `fit`, after the program's name."""
        more: dict[str, Any] = {
            "trainer.accelerator": self.place.accelerator,
            "trainer.devices": 1,
            "trainer.enable_progress_bar": False,
            "run.root": self.place.runs,
            "run.name": self.name,
            "run.checkpoint_every": 20 * self.steps_per_epoch,
            "data.init_args.data_dir": self.place.data_dir,
            "data.init_args.cache_dir": self.place.cache_dir,
            "ckpt_path": "auto",
        }
        given = [part for k, v in more.items() if v is not None for part in flag(k, v)]
        return ["fit", *self.deciding_arguments(), *given]

    @property
    def digest(self) -> str:
        """Hash of everything that decides the result, the archive's content included."""
        files = [find(path).read_text() for path in (self.table.task, self.variant.config)]
        identity = [self.deciding_arguments(), files, self.sizes.sha256]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """Name of the run, and of the result file."""
        return f"uea-{self.recipe.archive}-{self.variant.name}-seed{self.seed}-{self.digest}"

    @property
    def result_path(self) -> Path:
        """File of the finished cell."""
        return self.place.out / "cells" / f"{self.name}.json"

    def result(self) -> dict[str, Any] | None:
        """Return the result of a finished cell, or None; half a file counts as none."""
        return read_result(self.result_path, "test_accuracy_percent")

    def run(self) -> dict[str, Any]:
        """Train, test and keep the result.

        Raises:
            RuntimeError: `fit` or `test` failed; they have said why.
        """
        arguments = self.arguments()
        print(f"$ python -m lit_probattn {shlex.join(arguments)}", flush=True)
        begin = time.perf_counter()
        resumed = (self.place.runs / self.name).is_dir()
        _require_success(arguments)
        seconds = time.perf_counter() - begin
        folder = max((self.place.runs / self.name).iterdir(), key=lambda p: p.stat().st_mtime)
        _require_success(["test", "--config", str(folder / "config.yaml"), "--ckpt_path", "best"])
        report_path = max(folder.glob("test-*.json"), key=lambda p: p.stat().st_mtime)
        report = json.loads(report_path.read_text())
        result = {
            **self._facts(),
            "test_accuracy_percent": 100 * report.pop("test/accuracy"),
            "test_loss": report.pop("test/loss"),
            "fit_minutes": seconds / 60,
            "resumed": resumed,
            "run_folder": str(folder),
            **report,
        }
        self.result_path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.result_path, json.dumps(result, indent=1) + "\n")
        return result

    def _facts(self) -> dict[str, Any]:
        device = "cuda" if self.place.accelerator in ("gpu", "cuda") else "cpu"
        column = self.variant.published
        return {
            "archive": self.recipe.archive,
            "variant": self.variant.name,
            "seed": self.seed,
            "protocol": self.recipe.protocol,
            "selection": self.selection,
            "epochs": self.epochs,
            "max_steps": self.max_steps,
            "batch_size": self.batch_size,
            "published_percent": None if column is None else self.recipe.published.get(column),
            "device": device_name(device),
            "versions": versions(),
            "git_revision": git_revision(),
            "command": shlex.join(["python", "-m", "lit_probattn", *self.arguments()]),
        }


def _require_success(arguments: Sequence[str]) -> None:
    status = run_command(arguments)
    if status:
        raise RuntimeError(f"`{arguments[0]}` ended with status {status}")
