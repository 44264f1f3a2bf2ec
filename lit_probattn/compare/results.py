"""The result file of a finished run: schema, reading, validation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.rows import RowStore, describe
from lit_probattn.compare.tables import Metric

_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[int, Field(ge=1)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_REMEDY = "remove the file and rerun the command to evaluate the run again"


class _Evaluation(BaseModel):
    """Report of an evaluation: scores and checkpoint."""

    model_config = ConfigDict(strict=True, extra="allow")

    checkpoint: str


class RunResult(BaseModel):
    """A finished run.

    Args:
        name: name of the run and of the file.
        task, row, seed: identity of the run; other tables may use another name for the row.
        values: metrics in the printed unit.
        sources: SHA-256 of the source files of the data, including those of its starts.
        selected_step: step of the evaluated checkpoint.
        selected_on_test: whether it was selected on the test split.
        max_steps: number of optimiser steps.
        fit_seconds_of_last_start: None if this command has only evaluated.
        num_starts: number of times the run was started.
        report: report of the last evaluation.
        run_folder, command: the run folder and the command that trained it.
        parameters, macs, macs_published_length, num_test: counts of model and data.
        python, packages, git, hardware, backends: as in the run's versions.json.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    task: str
    row: str
    seed: int
    values: dict[str, _Finite]
    sources: dict[str, str]
    selected_step: _Count
    selected_on_test: bool
    max_steps: _Positive
    fit_seconds_of_last_start: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    num_starts: _Positive
    report: _Evaluation
    run_folder: str
    command: str
    parameters: _Positive
    macs: _Count
    macs_published_length: _Count
    num_test: _Count | None
    python: str | None
    packages: dict[str, str | None] | None
    git: dict[str, str | bool | None] | None
    hardware: dict[str, Any] | None
    backends: dict[str, str] | None

    @model_validator(mode="after")
    def _selected_within(self) -> RunResult:
        if self.selected_step > self.max_steps:
            raise ValueError(
                f"selected_step: expected at most max_steps {self.max_steps}, received "
                f"{self.selected_step}"
            )
        return self


def result_store(path: Path) -> RowStore[RunResult]:
    """Open the result file of a run; its last row is the current result."""
    return RowStore(path, RunResult, ("name",), is_final=lambda result: False)


def keep_result(path: Path, content: Any) -> dict[str, Any]:
    """Append a result to the file of its run; return it.

    Raises:
        ConfigError: a field is missing or invalid; the message names it.
    """
    try:
        result = RunResult.model_validate(content)
    except ValidationError as error:
        raise ConfigError(describe(error, RunResult.model_fields)) from None
    result_store(path).add(result)
    return result.model_dump()


def read_result(
    path: Path, expected: Mapping[str, Any], metrics: Collection[Metric]
) -> dict[str, Any] | None:
    """Return the content of a result file; None if it is missing or truncated.

    Missing metrics are computed from the stored report of the evaluation.

    Args:
        path: the file.
        expected: fields that identify the run.
        metrics: required metrics.

    Raises:
        ConfigError: the file belongs to another run, or a field is missing or invalid.
    """
    results = result_store(path).rows
    if not results:
        return None
    found = results[-1].model_dump()
    try:
        for field, value in expected.items():
            if found[field] != value:
                raise ConfigError(f"{field}: expected {value!r}, received {found[field]!r}")
        found["values"] = _measured(metrics, found) | found["values"]
        _check_values(metrics, found["values"])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; {_REMEDY}") from None
    return found


def _measured(metrics: Iterable[Metric], result: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that the report or the counts contain."""
    places = {"count": result, "test": result["report"], "validate": result["report"]}
    found = {}
    for metric in metrics:
        place = places.get(metric.command, {})
        if isinstance(place.get(metric.key_in(place)), int | float):
            found[metric.name] = metric.value(place)
    return found


def _check_values(metrics: Iterable[Metric], values: Mapping[str, float]) -> None:
    for metric in metrics:
        if metric.command == "study":
            continue
        if metric.name not in values:
            known = ", ".join(values)
            raise ConfigError(f"values.{metric.name}: missing; values: {known}")
        value = values[metric.name]
        if metric.unit == "%" and not 0 <= value <= 100:
            raise ConfigError(
                f"values.{metric.name}: expected a percentage from 0 to 100, received {value:g}"
            )
