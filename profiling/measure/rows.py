"""The rows of a sweep: one schema, JSON Lines while running, CSV and Parquet when done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import replacing
from lit_probattn.base.rows import RowStore

ROWS = "rows.jsonl"  # in the folder of results
Source = Literal["measured", "predicted", "analytic"]
Status = Literal["ok", "failed", "skipped", "mismatch"]
Quantity = Literal["cost", "memory", "time"]
Scope = Literal["attention", "layers", "model"]
Size = Annotated[int, Field(ge=1)]
Count = Annotated[int | None, Field(ge=0)]
Seconds = Annotated[float | None, Field(gt=0)]


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


def row_store(path: Path) -> RowStore[ProfileRow]:
    """Return a file of rows: a point has several, and one that failed is measured again."""
    return RowStore(
        path,
        ProfileRow,
        ("point_id",),
        size="rows_in_point",
        is_final=lambda row: row.status != "failed",
    )


def read_rows(path: str | Path) -> list[ProfileRow]:
    """Return the rows of complete points of a file.

    Raises:
        ConfigError: no file, a damaged line that is not the last, or a point twice.
    """
    if not Path(path).is_file():
        raise ConfigError(f"cannot read {path}: no such file")
    return row_store(Path(path)).rows


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
