"""`lit-probattn sweep`: run each point of a plan once and store its rows durably."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

import torch

from lit_probattn.base.errors import ChildError, ConfigError
from lit_probattn.base.files import refuse_to_replace, replace_text
from lit_probattn.base.processes import Worker
from lit_probattn.base.provenance import command_line
from lit_probattn.base.rows import RowStore
from lit_probattn.experiments.runner import Call, Job, Runner, Work
from lit_probattn.measure.memory import available_bytes
from profiling.measure.rows import ROWS, ProfileRow, row_store, write_tables
from profiling.sweep.config import SweepConfig
from profiling.sweep.plan import Point, make_plan, shard
from profiling.sweep.points import failed_rows, measure_point, skipped_rows
from profiling.sweep.predictions import Predictions
from profiling.sweep.worker import make_worker, out_of_memory, request_of, rows_of


def claim_folder(config: SweepConfig, folder: Path, root: Path) -> None:
    """Store the sweep in its folder, or check that it equals the stored one.

    It is stored with the arguments in the attention files, which may change after a measurement.

    Args:
        config: the sweep.
        folder: its results folder.
        root: folder to which paths in the config are relative.

    Raises:
        ConfigError: the folder contains another sweep or unrelated files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note, given = folder / "sweep.json", config.model_dump(mode="json", exclude={"report"})
    for name, variant in config.variants.items():
        class_path, init_args = variant.attention.resolve(root)
        given["variants"][name]["attention"] = {"class_path": class_path, "init_args": init_args}
    content = json.loads(json.dumps(given, default=str))
    if note.exists():
        try:
            stored = json.loads(note.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"{note} is not JSON: choose another --out or remove the folder"
            ) from error
        if stored != content:
            raise ConfigError(
                f"{folder} contains results of another sweep or of other attention files "
                "(sweep.json differs); choose another --out or remove the folder"
            )
        return
    tables = (folder / "rows.csv", folder / "rows.parquet")
    refuse_to_replace([*tables, *folder.glob("rows*.jsonl")])
    replace_text(note, json.dumps(content, indent=1))


def limit_bytes(point: Point) -> int | None:
    """Return the memory limit of a point: the sweep's limit, or the free memory of the device."""
    free = available_bytes(torch.device(point.device))
    limits = [v for v in (point.memory_limit_bytes, free) if v is not None]
    return min(limits) if limits else None


def cannot_fit(point: Point, predicted: tuple[int, int] | None) -> list[ProfileRow]:
    """Return the rows of a point that does not fit according to the prediction; empty if it fits.

    The prediction is kept as a separate row.
    """
    limit = None if predicted is None else limit_bytes(point)
    if limit is None or predicted is None or sum(predicted) <= limit:
        return []
    reason = (
        f"predicted peak {sum(predicted) / 2**30:.2f} GiB exceeds the "
        f"{limit / 2**30:.2f} GiB that {point.device} may take"
    )
    return skipped_rows(point, reason, *predicted)


class PointJob(Job):
    """The job that measures a point.

    Args:
        point: the point.
        store: rows of the sweep.
        predictions: predicted memory.
        worker: creates the process that measures memory and time.
        timeout_s: limit of its run time in seconds.
    """

    def __init__(
        self,
        point: Point,
        store: RowStore[ProfileRow],
        predictions: Predictions,
        worker: Callable[[], Worker],
        timeout_s: float,
    ) -> None:
        kind = (point.quantity, point.variant)  # these points take about as long
        super().__init__(point.point_id, point.label, store.path.parent, kind=kind)
        self.point, self.store, self.predictions = point, store, predictions
        self.worker, self.timeout_s = worker, timeout_s

    def is_done(self) -> bool:
        """Whether the point has rows and did not fail."""
        return self.store.has(point_id=self.name)

    def begins(self) -> tuple[str, int]:
        """Return no message: most points take less than a second."""
        return "", 0

    def work(self) -> Work:
        """Measure the point; rows without values contain the reason."""
        self.store.add(*(yield from self._rows()))
        return ""

    def _rows(self) -> Generator[Call, Worker, list[ProfileRow]]:
        point = self.point
        if point.in_process or point.problem is not None:
            return measure_point(point)
        known = self.predictions.of(point)
        predicted = None if known is None else known.memory
        skipped = cannot_fit(point, predicted)
        if skipped:
            return skipped
        worker = yield Call(self.worker, request_of(point, predicted), self.timeout_s)
        try:
            rows = rows_of(worker)
        except ChildError as error:
            return failed_rows(point, str(error))
        if out_of_memory(rows):
            worker.close()  # its remaining memory would distort the next point
        return rows


def run_sweep(
    config: SweepConfig,
    folder: Path,
    root: Path,
    *,
    index: int = 0,
    count: int = 1,
    stream: Callable[[str], None] | None = None,
) -> list[ProfileRow]:
    """Run the missing points of a sweep or of one shard and return all its rows.

    Concurrent commands on one folder share the points.

    Args:
        config: the sweep.
        folder: results folder.
        root: folder to which paths in the config are relative.
        index: shard, from 0.
        count: number of shards.
        stream: receives progress lines; None prints them.

    Raises:
        ConfigError: the plan is invalid, the folder contains another sweep, or the device of the
            missing points is not available.
    """
    points = make_plan(config, root)
    claim_folder(config, folder, root)
    store = row_store(folder / ROWS)
    _run_missing(config, shard(points, index, count), store, stream)
    rows = store.rows
    if {row.point_id for row in rows} >= {point.point_id for point in points}:
        write_tables(rows, folder)
    return rows


def _run_missing(
    config: SweepConfig,
    points: Sequence[Point],
    store: RowStore[ProfileRow],
    stream: Callable[[str], None] | None,
) -> None:
    missing = [point for point in points if not store.has(point_id=point.point_id)]
    reason = missing_device(config.device)
    if reason is not None and not all(p.in_process or p.problem is not None for p in missing):
        raise ConfigError(
            f"{reason}: run {config.name} on another machine, or set another device and name"
        )
    before = len(points) - len(missing)
    if before:
        (stream or print)(f"{before} of {len(points)} points already finished")
    predictions = Predictions(config.device)
    worker = partial(make_worker, config.memory_limit_bytes, command_line())
    jobs = [
        PointJob(point, store, predictions, worker, config.point_timeout_s) for point in missing
    ]
    Runner(say=stream, what="points").run(jobs, done=before)


def missing_device(device: str) -> str | None:
    """Return why a device cannot be used, or None if it can."""
    kind = torch.device(device)
    if kind.type != "cuda":
        return None
    if not torch.cuda.is_available():
        return f"device {device} is not available: PyTorch finds no CUDA device"
    if kind.index is not None and kind.index >= torch.cuda.device_count():
        return f"device {device} is not available: {torch.cuda.device_count()} CUDA devices found"
    return None


def describe_plan(config: SweepConfig, root: Path, index: int, count: int) -> str:
    """Return the plan as text: every point, its predicted memory, and whether it is skipped.

    There is no prediction for a GPU.
    """
    predictions = Predictions(config.device)
    lines, skipped, broken, unknown = [], 0, 0, 0
    points = shard(make_plan(config, root), index, count)
    for point in points:
        note = ""
        if point.problem is not None:
            note, broken = f"  FAILS: {point.problem}", broken + 1
        elif not point.in_process:
            known = predictions.of(point)
            if known is None:
                note, unknown = "  not predicted", unknown + 1
            elif known.problem is not None:
                note, broken = f"  FAILS: {known.problem}", broken + 1
            else:
                note = f"  {known}"
                limit = None if known.memory is None else limit_bytes(point)
                if limit is not None and sum(known.memory or ()) > limit:
                    note, skipped = f"{note}  SKIPPED: cannot fit", skipped + 1
        lines.append(f"{point.label}{note}")
    lines.append(
        f"{len(points)} points on {config.device}: {skipped} skipped by the memory prediction, "
        f"{broken} that fail, {len(points) - skipped - broken} to measure"
    )
    if unknown:
        lines.append(f"{unknown} points on a GPU have no prediction")
    return "\n".join(lines)
