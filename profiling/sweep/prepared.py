"""What is known of a sweep's places before it runs: memory and operations, made on a CPU.

`python -m profiling sweep --config FILE --prepare` writes `prepared/NAME.json` beside the file. A
place is all that decides a model and its step; its memory and its time are two points of it. On a
GPU nothing is predicted while the sweep runs: what is not in the file is measured without.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from lit_probattn.base.config_files import file_named, find
from lit_probattn.base.memory import predicted_bytes
from lit_probattn.cli.shards import Progress, fork_context
from lit_probattn.configs import ConfigError
from lit_probattn.records.provenance import git_revision, replace_text, versions
from lit_probattn.records.rows import RowStore
from profiling.sweep.config import load_sweep
from profiling.sweep.plan import Point, make_plan
from profiling.sweep.points import make_step, measure_cost

KERNELS = "triton"  # the backend that runs on a GPU only

# What a point has beside its place.
_NOT_PLACE = {
    *("sweep", "quantity", "variant", "baseline", "grid_heads", "device", "timing", "seed"),
    *("memory_limit_bytes", "problem"),
}


@dataclass(frozen=True)
class Prepared:
    """What is known of a place; None is what could not be found out.

    Args:
        peak_bytes: predicted rise of one step above what is resident.
        resident_bytes: parameters, buffers and inputs.
        macs: counted multiply-adds of one step; those of the reference for kernels of a GPU, whose
            recomputed scores count once.
        num_parameters: of the model.
        problem: why the place cannot be built.
    """

    peak_bytes: int | None = None
    resident_bytes: int | None = None
    macs: int | None = None
    num_parameters: int | None = None
    problem: str | None = None

    @property
    def memory(self) -> tuple[int, int] | None:
        """Peak above resident, and resident, in bytes."""
        if self.peak_bytes is None or self.resident_bytes is None:
            return None
        return self.peak_bytes, self.resident_bytes

    def __str__(self) -> str:
        memory = self.memory
        text = (
            "no prediction" if memory is None else f"predicted peak {sum(memory) / 2**20:.1f} MiB"
        )
        return text if self.macs is None else f"{text}, {self.macs / 1e9:.4g} G multiply-adds"


def place_of(point: Point) -> str:
    """Return a name of the point's place, which points of other quantities and sweeps share."""
    content = {k: v for k, v in dataclasses.asdict(point).items() if k not in _NOT_PLACE}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def predict(point: Point) -> tuple[int, int] | None:
    """Predict (peak above resident, resident) in bytes on fake tensors; nothing is allocated.

    None for kernels of a GPU, which fake tensors on the CPU cannot follow.
    """
    if point.backend == KERNELS:
        return None
    return predicted_bytes(partial(make_step, point, torch.device("cpu")))


def prepare_place(point: Point, *, count: bool = True) -> Prepared:
    """Predict a place's memory and count its operations; what is wrong becomes its problem."""
    try:
        peak, resident = predict(point) or (None, None)
        counted_as = replace(point, backend="reference") if point.backend == KERNELS else point
        rows = measure_cost(counted_as) if count else []
    except Exception as error:  # measuring it says the same
        return Prepared(problem=" ".join(f"{type(error).__name__}: {error}".split())[:200])
    scope = "attention" if point.model == "attention" else "model"
    counted = [row for row in rows if row.scope == scope and row.source == "measured"]
    macs = next((row.macs for row in counted if row.macs is not None), None)
    parameters = next((r.num_parameters for r in counted if r.num_parameters is not None), None)
    return Prepared(peak, resident, macs, parameters)


class Predictions:
    """Memory of places: from a prepared file; what is not there is predicted once, or unknown.

    Args:
        known: what was prepared, by place.
        live: whether to predict the rest now. Not on a GPU, which would wait for it.
        about: how the known part was made.
    """

    def __init__(
        self, known: Mapping[str, Prepared], *, live: bool, about: str | None = None
    ) -> None:
        self.known, self.live, self.about = dict(known), live, about

    def of(self, point: Point) -> Prepared | None:
        """Return what is known of a point's place; None if nothing is."""
        place = place_of(point)
        if place not in self.known and self.live:
            self.known[place] = prepare_place(point, count=False)
        return self.known.get(place)


def prepared_path(config_path: str | Path) -> Path:
    """Return where the prepared numbers of a sweep file are."""
    path = find(file_named("measurement", str(config_path)))
    return path.parent / "prepared" / f"{path.stem}.json"


def load_predictions(config_path: str | Path, device: str) -> Predictions:
    """Return the predictions of a sweep file; none are prepared if it has no prepared file.

    Raises:
        ConfigError: the prepared file cannot be read as one.
    """
    path, live = prepared_path(config_path), torch.device(device).type != "cuda"
    if not path.exists():
        return Predictions({}, live=live)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = content["columns"]
        known = {
            place: Prepared(**dict(zip(names, values, strict=True)))
            for place, values in content["places"].items()
        }
        about = str(content["about"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a file of prepared numbers ({error}); make it again by "
            f"sweep --config {config_path} --prepare"
        ) from error
    return Predictions(known, live=live, about=about)


def prepare(
    config_path: str | Path,
    root: Path,
    *,
    jobs: int = 1,
    stream: Callable[[str], None] | None = None,
    only: Sequence[str] | None = None,
) -> Path:
    """Predict and count every place of a sweep and write its prepared file; return that.

    An interrupted run goes on where it stopped, if the code is the same.

    Args:
        config_path: the sweep's file.
        root: folder that paths in the file start from.
        jobs: processes.
        stream: receives progress lines; None prints them.
        only: places to prepare; None means all.
    """
    config = load_sweep(config_path)
    points = {
        place_of(p): p for p in make_plan(config, root) if p.quantity != "cost" and not p.problem
    }
    path = prepared_path(config_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {"versions": versions(), "revision": git_revision()}
    store = RowStore(path.with_suffix(".partial.jsonl"), made, ["place"])
    wanted = [place for place in points if only is None or place in only]
    missing = [place for place in wanted if not store.has(place=place)]
    progress = Progress(len(wanted), "places", stream)
    done = len(wanted) - len(missing)
    for number, (place, found) in enumerate(_in_processes(missing, points, jobs), 1):
        store.add({"place": place, **asdict(found)})
        left = (time.monotonic() - progress.begin) / number * (len(missing) - number)
        progress.show(done + number, left, points[place].label)
    columns = [field.name for field in dataclasses.fields(Prepared)]
    rows = {row["place"]: [row[name] for name in columns] for row in store.rows}
    lines = [f"  {json.dumps(place)}: {json.dumps(rows[place])}" for place in sorted(rows)]
    about = f"{made['versions']}; revision {made['revision']}"
    head = f'{{"about": {json.dumps(about)},\n "columns": {json.dumps(columns)},\n "places": {{\n'
    replace_text(path, head + ",\n".join(lines) + "\n }}\n")
    store.finish()
    return path


def _in_processes(
    places: Sequence[str], points: Mapping[str, Point], jobs: int
) -> Iterator[tuple[str, Prepared]]:
    """Prepare places in forked processes; here with one job, or where there are no forks."""
    if jobs <= 1 or len(places) < 2 or not hasattr(os, "fork"):
        for place in places:
            yield place, prepare_place(points[place])
        return
    # Not a Pool, which ends its processes by a signal that they may not take.
    with ProcessPoolExecutor(
        min(jobs, len(places)),
        mp_context=fork_context(),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        for future in as_completed([pool.submit(_pair, (p, points[p])) for p in places]):
            yield future.result()


def _pair(item: tuple[str, Point]) -> tuple[str, Prepared]:
    return item[0], prepare_place(item[1])
