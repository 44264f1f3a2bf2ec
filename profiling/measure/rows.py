"""The rows of a sweep: one schema, JSON Lines during the sweep, CSV and Parquet afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import replacing
from lit_probattn.base.rows import RowStore

ROWS = "rows.jsonl"  # in the results folder
PLACE = ["embed_dim", "seq_len", "grid_heads", "batch_size"]
SETTING = ["mode", "backend", "dtype", "device_name", "scope"]
Source = Literal["measured", "predicted", "analytic"]
Status = Literal["ok", "failed", "skipped", "mismatch"]
Quantity = Literal["cost", "memory", "time"]
Scope = Literal["attention", "layers", "model"]
Size = Annotated[int, Field(ge=1)]
Count = Annotated[int | None, Field(ge=0)]
Seconds = Annotated[float | None, Field(gt=0)]


class ProfileRow(BaseModel):
    """Values of one source for one scope of one point. Every row has all columns.

    `macs` are multiply-adds in matrix products; `fvcore_operations` is fvcore's total, including
    norms; `paper_operations` follow the papers' rule (multiplications plus additions) for the
    papers' layer, `paper_operations_printed` the simplified formula in the paper.
    `resident_memory_bytes` are parameters, buffers and inputs; `peak_memory_bytes` is the peak of
    one call above that. Tables contain the sum as `memory_bytes` (see `to_frame`). `time_median_s`
    is the time of calls from Python, `graph_median_s` that of the replayed CUDA graph of a call,
    whose kernels do not wait for Python; on a GPU, `reason` says why the graph is missing.
    """

    model_config = ConfigDict(extra="forbid")

    # identity of the point
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
    # results
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
    graph_median_s: Seconds = None
    # provenance
    backend_note: str | None
    device_name: str
    versions: str
    git_revision: str
    command: str

    @classmethod
    def of(cls, known: dict[str, Any]) -> ProfileRow:
        """Return a row; values that were not measured are None."""
        return cls.model_validate(dict.fromkeys(cls.model_fields) | known)


def row_store(path: Path) -> RowStore[ProfileRow]:
    """Open a file of rows: a point has several, and a failed point is measured again."""
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
        ConfigError: the file is missing, a line before the last is corrupt, or a point is repeated.
    """
    if not Path(path).is_file():
        raise ConfigError(f"cannot read {path}: no such file")
    return row_store(Path(path)).rows


def to_frame(rows: Iterable[ProfileRow], variants: Sequence[str] = ()) -> pd.DataFrame:
    """Return rows as a sorted table with all columns; `variants` in this order, then others.

    The column `memory_bytes` is added: resident memory plus the peak above it, which a device must
    provide.
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
