"""Rows: results of jobs as JSON lines, validated by a schema and appended durably."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.base.files import append_lines
from lit_probattn.base.locks import claim

if TYPE_CHECKING:
    import pandas as pd

Row = TypeVar("Row")
_PATIENCE_SECONDS = 60.0  # another process appends within milliseconds


def describe(error: ValidationError, known: Collection[str]) -> str:
    """Return a validation error in one line, with the nearest known name for an unknown one."""
    parts = []
    for item in error.errors(include_url=False):
        place = ".".join(str(p) for p in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = f"unknown key{nearest(str(item['loc'][-1]), known)}"
        elif not isinstance(item["input"], dict):
            message += f" (received {item['input']!r})"
        parts.append(f"{place}: {message}" if place else message)
    return "; ".join(parts)


class RowStore(Generic[Row]):
    """A file of rows, to which several processes may append.

    The rows of a job are appended in one write and synced before `add` returns. If a process is
    killed while it writes, the incomplete job at the end of the file counts as missing, and the
    next `add` removes it.

    Args:
        path: the file.
        schema: a pydantic model, or `dict[str, Any]` for rows of any columns.
        key: columns that identify a job.
        settings: settings on which all rows depend, stored in the first line of the file. A file
            with other settings is replaced. None means that the file has only rows.
        size: column with the number of rows of the job; None means one row.
        is_final: whether the result of a row is final; otherwise later rows of its job replace it.
    """

    def __init__(
        self,
        path: Path,
        schema: type[Row],
        key: Sequence[str],
        *,
        settings: dict[str, Any] | None = None,
        size: str | None = None,
        is_final: Callable[[Row], bool] = lambda row: True,
    ) -> None:
        self.path, self.key, self.size, self.is_final = path, tuple(key), size, is_final
        is_model = isinstance(schema, type) and issubclass(schema, BaseModel)
        numbers = None if is_model else ConfigDict(ser_json_inf_nan="constants")
        self._adapter: TypeAdapter[Row] = TypeAdapter(schema, config=numbers)
        self._columns = getattr(schema, "model_fields", ())
        self._head = settings and json.dumps(settings, sort_keys=True, default=str)
        self._forget()

    def _forget(self) -> None:
        self._jobs: dict[tuple[Any, ...], list[Row]] = {}
        self._end = self._lines = 0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def rows(self) -> list[Row]:
        """All rows of the current file.

        Raises:
            ConfigError: a line is not a row, or a job has two final results.
        """
        self._read()
        return [row for rows in self._jobs.values() for row in rows]

    def of(self, **key: Any) -> list[Row]:
        """Return the rows of a job by its key; empty if it has no result."""
        self._read()
        return self._jobs.get(self._key_of(key), [])

    def has(self, **key: Any) -> bool:
        """Return whether a job has a final result."""
        return any(map(self.is_final, self.of(**key)))

    def add(self, *rows: Row) -> None:
        """Append the rows of complete jobs; jobs with a final result are skipped."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with claim(self.path, _PATIENCE_SECONDS) as lock:
            if lock is None:
                raise ConfigError(f"{self.path} is locked by another process")
            self._read()
            if self._head and not self._end:
                os.truncate(self.path, 0)
                append_lines(self.path, [self._head])
            elif self.path.stat().st_size > self._end:
                os.truncate(self.path, self._end)
            fresh = [row for row in rows if not self._is_final_job(self._key_of(row))]
            append_lines(self.path, [self._adapter.dump_json(row).decode() for row in fresh])
        self._read()

    def finish(self, jobs: Iterable[Mapping[str, Any]] | None = None) -> pd.DataFrame:
        """Return all rows, or those of these jobs in their order, and remove the file.

        Args:
            jobs: keys of jobs, as for `of`; a repeated one counts once. None means all. An
                interrupted command with other flags may have stored more.
        """
        import pandas as pd

        rows = self.rows
        if jobs is not None:
            keys = dict.fromkeys(map(self._key_of, jobs))
            rows = [row for key in keys for row in self._jobs.get(key, [])]
        self.path.unlink(missing_ok=True)
        return pd.DataFrame([self._adapter.dump_python(row) for row in rows])

    def _is_final_job(self, key: tuple[Any, ...]) -> bool:
        return any(map(self.is_final, self._jobs.get(key, [])))

    def _key_of(self, row: Any) -> tuple[Any, ...]:
        get = row.get if isinstance(row, dict) else lambda name: getattr(row, name)
        return tuple(get(name) for name in self.key)

    def _size_of(self, row: Any) -> int:
        return 1 if self.size is None else int(getattr(row, self.size))

    def _read(self) -> None:
        """Read the lines appended since the last call."""
        try:
            with self.path.open("rb") as file:
                if self._end > os.fstat(file.fileno()).st_size:
                    self._forget()
                file.seek(self._end)
                lines = file.readlines()
        except FileNotFoundError:
            self._forget()
            return
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from error
        whole = [line for line in lines if line.endswith(b"\n")]
        if self._head and not self._end and whole:
            if whole[0].decode(errors="replace").rstrip("\n") != self._head:
                return
            self._pass(whole[:1])
            whole = whole[1:]
        job: list[Row] = []
        for number, line in enumerate(whole, 1):
            job.append(self._parse(line, self._lines + len(job) + 1))
            if self._key_of(job[-1]) != self._key_of(job[0]):
                raise ConfigError(
                    f"{self.path}: rows are missing before line {self._lines + len(job)}"
                )
            if len(job) == self._size_of(job[0]):
                self._keep(job)
                self._pass(whole[number - len(job) : number])
                job = []

    def _pass(self, lines: Sequence[bytes]) -> None:
        self._end += sum(map(len, lines))
        self._lines += len(lines)

    def _keep(self, job: list[Row]) -> None:
        key = self._key_of(job[0])
        if self._is_final_job(key):
            name = " ".join(map(str, key))
            raise ConfigError(
                f"{self.path}: two results of {name}, the second at line {self._lines + 1}: remove "
                "the wrong one"
            )
        self._jobs[key] = job

    def _parse(self, line: bytes, number: int) -> Row:
        try:
            return self._adapter.validate_json(line)
        except ValidationError as error:
            reason = " ".join(describe(error, self._columns).split())[:200]
            raise ConfigError(
                f"{self.path}: {reason} (line {number}; only the last line may be incomplete): "
                "remove the line and rerun the command"
            ) from None
