"""The rows of a sweep: one schema, JSON Lines while running, CSV and Parquet when done."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.base.files import append_lines, replace_text, replacing

Source = Literal["measured", "predicted", "analytic"]
Status = Literal["ok", "failed", "skipped", "mismatch"]
Quantity = Literal["cost", "memory", "time"]
Scope = Literal["attention", "layers", "model"]
Size = Annotated[int, Field(ge=1)]
Count = Annotated[int | None, Field(ge=0)]
Seconds = Annotated[float | None, Field(gt=0)]


def describe(error: ValidationError, known: Collection[str]) -> str:
    """Return a validation error in one line, with the nearest known name for a wrong one."""
    parts = []
    for item in error.errors():
        place = ".".join(str(p) for p in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = f"unknown key{nearest(str(item['loc'][-1]), known)}"
        elif not isinstance(item["input"], dict):
            message += f" (received {item['input']!r})"
        parts.append(f"{place}: {message}" if place else message)
    return "; ".join(parts)


class ProfileRow(BaseModel):
    """One source's numbers for one scope of one grid point. Every row names every column.

    `macs` are multiply-adds in matrix products; `fvcore_operations` are fvcore's total, norms
    included; `paper_operations` follow the papers' rule (multiplications plus additions) for the
    papers' layer, `paper_operations_printed` the simplification that the paper prints.
    `resident_memory_bytes` are parameters, buffers and inputs; `peak_memory_bytes` is the rise of
    one call above that. Tables add both as `memory_bytes` (see `to_frame`).
    """

    model_config = ConfigDict(extra="forbid")

    # which point
    sweep: str
    point_id: str
    row_index: Annotated[int, Field(ge=0)]
    rows_in_point: Size
    quantity: Quantity
    source: Source
    scope: Scope
    variant: str
    baseline: str | None
    attention_class: str
    attention_args: str
    model: str
    embed_dim: Size
    seq_len: Size
    grid_heads: int | None
    num_heads: int | None
    head_dim: int | None
    num_layers: int | None
    mlp_dim: int | None
    batch_size: Size
    mode: Literal["train", "eval"]
    backend: str
    dtype: str
    device: str
    # what came of it
    status: Status
    reason: str | None
    macs: Count
    flops: Count
    fvcore_operations: Count
    paper_operations: float | None
    paper_operations_printed: float | None
    num_parameters: Count
    num_parameters_non_embedding: Count
    resident_memory_bytes: Count
    peak_memory_bytes: Count
    peak_reserved_bytes: Count
    nvml_memory_bytes: Count
    time_median_s: Seconds
    time_p20_s: Seconds
    time_p80_s: Seconds
    time_repeats: int | None
    energy_j: float | None
    # how it was made
    backend_note: str | None
    device_name: str
    versions: str
    git_revision: str
    command: str

    @classmethod
    def of(cls, known: dict[str, Any]) -> ProfileRow:
        """Return a row; what was not measured becomes None."""
        return cls.model_validate(dict.fromkeys(cls.model_fields) | known)


def read_rows(path: str | Path) -> tuple[list[ProfileRow], int]:
    """Read a JSON Lines file, leaving out what an interrupted write left incomplete.

    Returns:
        The rows of complete points, and how many bytes at the end to drop.

    Raises:
        ConfigError: no file, a damaged line that is not the last, or a point twice.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    rows: list[ProfileRow] = []
    pending: list[ProfileRow] = []
    seen: set[tuple[str, int]] = set()
    good = position = 0
    for number, raw in enumerate(content.splitlines(keepends=True), start=1):
        position += len(raw)
        try:
            if not raw.endswith(b"\n"):
                break
            pending.append(ProfileRow.model_validate(json.loads(raw)))
        except ValueError as error:
            if position == len(content):
                break
            reason = f"not JSON: {error}"
            if isinstance(error, ValidationError):
                reason = describe(error, ProfileRow.model_fields)
            reason = " ".join(reason.split())[:200]
            raise ConfigError(
                f"{path}, line {number} is not a row of a sweep ({reason}); only the last line "
                "may be incomplete"
            ) from error
        place = (pending[-1].point_id, pending[-1].row_index)
        if place in seen:
            raise ConfigError(f"{path}, line {number}: the point {place[0]} stands there twice")
        seen.add(place)
        if pending[-1].row_index == pending[-1].rows_in_point - 1:
            rows += pending
            pending, good = [], position
    return rows, len(content) - good


def repair(path: Path) -> list[ProfileRow]:
    """Return the complete rows of a file and cut off what an interrupted write left behind."""
    rows, excess = read_rows(path) if path.exists() else ([], 0)
    if excess:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - excess)
            os.fsync(file.fileno())
    return rows


def without(path: Path, rows: Sequence[ProfileRow], points: Collection[str]) -> list[ProfileRow]:
    """Return the rows of a file without those of some points, and keep only these in the file."""
    kept = [row for row in rows if row.point_id not in points]
    if len(kept) < len(rows):
        replace_text(path, "".join(f"{row.model_dump_json()}\n" for row in kept))
    return kept


def append_rows(path: Path, rows: Sequence[ProfileRow]) -> None:
    """Append all rows of one point in one write and wait until they are on disk."""
    append_lines(path, [row.model_dump_json() for row in rows])


def to_frame(rows: Iterable[ProfileRow], variants: Sequence[str] = ()) -> pd.DataFrame:
    """Return rows as a table of the whole schema, sorted; `variants` in this order, then others.

    `memory_bytes` is added: resident memory and the peak above it, what a device must have in all.
    """
    fields = ProfileRow.model_fields
    frame = pd.DataFrame([row.model_dump() for row in rows], columns=list(fields))
    order = ["quantity", "variant", "embed_dim", "seq_len", "grid_heads", "batch_size", "mode"]
    order += ["backend", "dtype", "scope", "source", "point_id"]
    integers = [name for name in fields if fields[name].annotation in (int, int | None)]
    frame[integers] = frame[integers].astype("Int64")
    frame["memory_bytes"] = frame["resident_memory_bytes"] + frame["peak_memory_bytes"]
    ranks = {name: f"{index:04d}" for index, name in enumerate(variants)}

    def key(column: pd.Series) -> pd.Series:
        return column.map(lambda v: ranks.get(v, v)) if column.name == "variant" else column

    return frame.sort_values(order, kind="stable", ignore_index=True, key=key)


def write_tables(rows: Sequence[ProfileRow], folder: Path) -> None:
    """Write rows.csv and rows.parquet."""
    frame = to_frame(rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in (("rows.csv", frame.to_csv), ("rows.parquet", frame.to_parquet)):
        with replacing(folder / name) as file:
            write(file, index=False)
