"""Logs of a run, `metrics.csv` and TensorBoard events, which resuming extends."""

import csv
import io
import warnings
from argparse import Namespace
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from lit_probattn.base.files import replace_text
from lit_probattn.training.run_record import set_aside

FILE_NAME = "metrics.csv"


class RunCSVLogger(Logger):
    """Writes metrics to `<folder>/metrics.csv`, a column per metric and `step` first.

    `step` is the number of completed optimiser steps. Every row is written immediately.
    Training and validation metrics of one step share a row. A metric that appears later adds a
    column.

    Args:
        steps_done: number of steps before this process. Later rows of an earlier process are
            dropped, because those steps are repeated.
    """

    def __init__(self, folder: Path, steps_done: int) -> None:
        super().__init__()
        self._folder = folder
        self._steps_done = steps_done
        self._columns: list[str] = ["step"]
        self._rows: list[dict[str, str]] = []
        self._loaded = False

    @property
    def save_dir(self) -> str:
        """The run folder, in which callbacks of Lightning write."""
        return str(self._folder)

    @property
    def log_dir(self) -> str:
        """The run folder."""
        return str(self._folder)

    # Lightning appends both to `save_dir`.
    name: Any = ""
    version: Any = ""

    @property
    def path(self) -> Path:
        """Path of `metrics.csv`."""
        return self._folder / FILE_NAME

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kw: Any) -> None:
        """Do nothing: hyperparameters are in `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add values to the row of a step; Lightning counts `step` from 0."""
        if not self._loaded:
            self.load()
        values = {key: str(np.float32(v)) for key, v in metrics.items() if key != "epoch"}
        if not values:
            return
        new_columns = [key for key in values if key not in self._columns]
        self._columns += new_columns
        text = str(steps_taken(step))
        if self._rows and self._rows[-1]["step"] == text:
            self._rows[-1].update(values)
            self._rewrite()
            return
        self._rows.append({"step": text, **values})
        if new_columns or not self.path.exists():
            self._rewrite()
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns, restval="").writerow(self._rows[-1])

    def load(self) -> None:
        """Read the rows of an earlier process, and keep those that are not repeated.

        An incomplete last row, as left by a killed process or a power failure, is dropped. If
        another row is corrupt, the file is moved aside and the other rows are kept.
        """
        self._loaded = True
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        self._columns, rows, problems = _read_rows(self.path)
        if problems:
            aside = set_aside(self.path)
            warnings.warn(
                f"{self.path}: {problems[0]}"
                + (f", and {len(problems) - 1} other rows" if len(problems) > 1 else "")
                + f" cannot be read; the file is kept as {aside.name}, and all other rows are used",
                stacklevel=2,
            )
        self._rows = [row for row in rows if int(row["step"]) <= self._steps_done]
        self._rewrite()

    def _rewrite(self) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(self._rows)
        replace_text(self.path, text.getvalue())


def _read_rows(path: Path) -> tuple[list[str], list[dict[str, str]], list[str]]:
    """Return the columns and rows of a `metrics.csv`, and its problems."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # drops an incomplete last row
    except OSError as error:
        return ["step"], [], [str(error.strerror)]
    text = [line.decode("utf-8-sig", "replace").rstrip("\r") for line in lines]
    cells = [next(csv.reader([line]), []) for line in text]
    columns = cells[0] if cells else ["step"]
    if columns[:1] != ["step"] or len(set(columns)) < len(columns) or "\ufffd" in "".join(text[:1]):
        return ["step"], [], ["row 1, the names of the columns,"]
    rows, problems = [], []
    for number, values in enumerate(cells[1:], 2):
        try:
            [float(value) for value in values if value]
            row = dict(zip(columns, values, strict=True))
            rows.append(row | {"step": str(int(float(row["step"])))})
        except (ValueError, OverflowError):
            problems.append(f"row {number}")
    return columns, rows, problems


def steps_taken(lightning_step: int | None) -> int:
    """Return the number of completed optimiser steps; Lightning's step numbers count from 0."""
    return 0 if lightning_step is None else lightning_step + 1


class RunTensorBoardLogger(TensorBoardLogger):
    """TensorBoard events in the run folder itself, with `step` as in `metrics.csv`.

    Args:
        steps_done: number of steps before this process; TensorBoard hides later events of an
            earlier process.
    """

    def __init__(self, folder: Path, steps_done: int) -> None:
        super().__init__(
            save_dir=str(folder.parent.parent),
            name=folder.parent.name,
            version=folder.name,
            default_hp_metric=False,
            purge_step=steps_done + 1 if steps_done else None,
        )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write scalars."""
        values = {key: value for key, value in metrics.items() if key != "epoch"}
        super().log_metrics(values, steps_taken(step))

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: hyperparameters are in `config.yaml`."""

    @rank_zero_only
    def save(self) -> None:
        """Flush the events without writing `hparams.yaml`."""
        self.experiment.flush()


def tensorboard_logger(folder: Path, steps_done: int) -> list[RunTensorBoardLogger]:
    """Return the TensorBoard logger, or nothing, with a message, if TensorBoard is missing."""
    if find_spec("tensorboard") is None:
        needs = "which require the package tensorboard: pip install 'lit-probattn[tensorboard]'"
        rank_zero_info(f"no TensorBoard events, {needs}; metrics.csv contains all metrics")
        return []
    return [RunTensorBoardLogger(folder, steps_done)]
