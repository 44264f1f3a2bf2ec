"""Sweeps of `python -m profiling sweep`, point by point."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from profiling.measure.rows import append_rows, repair, without, write_tables
from profiling.report.page import write_report
from profiling.stages.place import Phase, Place, Stage
from profiling.stages.units import Row, Skipped, Unit
from profiling.sweep.config import SweepConfig, load_sweep
from profiling.sweep.plan import Point, make_plan
from profiling.sweep.points import measure_point
from profiling.sweep.prepared import Predictions, load_predictions
from profiling.sweep.run import cannot_fit, claim_folder


def sweep_config(place: Place, name: str) -> SweepConfig:
    """Return a sweep; of one tiny place per variant on the CPU in a rehearsal."""
    config = load_sweep(f"configs/profiling/{name}.yaml")
    if not place.rehearses:
        return config
    content = config.model_dump(mode="json")
    content["model"] |= {"head_dim": 16, "head_dim_divisor": None, "num_layers": 1}
    content["model"] |= {"mlp_dim": 24, "vocab_size": 53}
    content["grid"] |= {"embed_dim": [32], "seq_len": [16], "batch_size": [1], "dtype": ["float32"]}
    content["grid"]["mode"] = content["grid"]["mode"][-1:]
    if config.grid.num_heads:
        content["grid"]["num_heads"] = config.grid.num_heads[:2]
    kept = [name for name, v in config.variants.items() if v.baseline is None][:2]
    content["variants"] = {name: content["variants"][name] for name in kept}
    if content["report"]:
        content["report"]["paper"] = []  # sentences are of the whole grid
    content |= {"device": "cpu", "timing": {"warmup": 0, "repeats": 2}}
    return SweepConfig.model_validate(content)


def _sweep(name: str, stage: str, place: Place) -> list[Phase]:
    config = sweep_config(place, name)
    folder = place.out / stage / "sweep"
    known = load_predictions(f"configs/profiling/{name}.yaml", "cuda")
    units = [
        Unit(point.point_id, partial(_swept, config, folder, known, point), _seconds(point, known))
        for point in make_plan(config, Path.cwd())
    ]
    return [Phase(units)]


def _seconds(point: Point, known: Predictions) -> float:
    """Predict the seconds of a point from its prepared count."""
    found = known.of(point)
    macs = 0 if found is None or found.macs is None else found.macs
    speed = 3e13 if point.dtype == "float32" else 1e14
    calls = (
        4 if point.quantity == "memory" else 1 + point.timing["warmup"] + point.timing["repeats"]
    )
    longest = point.timing.get("max_seconds", 60.0)
    return 0.4 + min(calls * (2 * macs / speed + 2e-3), longest + 2.0)


def _swept(config: SweepConfig, folder: Path, known: Predictions, point: Point) -> list[Row]:
    """Measure a point of a sweep here; its rows go to the sweep's own file."""
    found = known.of(point)
    predicted = None if found is None else found.memory
    rows = cannot_fit(point, predicted) or measure_point(point, predicted)
    claim_folder(config, folder)
    path = folder / "rows.jsonl"
    without(path, repair(path), {point.point_id})
    append_rows(path, rows)
    first = rows[0]
    reason = f"{point.label}: {first.reason}"
    if first.status == "skipped" or any(t in reason for t in ("cannot hold", "out of memory")):
        raise Skipped(reason)
    if first.status != "ok":
        raise RuntimeError(reason)
    macs = None if found is None else found.macs
    values = ("peak_memory_bytes", "time_median_s", "time_p20_s", "time_p80_s")
    row: Row = {
        "point": point.label,
        "macs": macs,
        **{name: getattr(first, name) for name in values},
    }
    if first.time_median_s and macs:
        row["flops_per_s"] = 2 * macs / first.time_median_s
    if first.peak_memory_bytes and predicted is not None:
        row["predicted_over_measured"] = predicted[0] / first.peak_memory_bytes
    return [row]


def _sweep_page(name: str, stage: str, place: Place, rows: list[Row]) -> str | None:
    folder = place.out / stage / "sweep"
    if not (folder / "rows.jsonl").exists():
        return None
    write_tables(repair(folder / "rows.jsonl"), folder)
    write_report(sweep_config(place, name), folder, place.out / stage)
    return None


def sweep_stage(name: str, config: str, about: str, minutes: float) -> Stage:
    """Return the stage of a sweep file."""
    return Stage(
        name, about, minutes, partial(_sweep, config, name), partial(_sweep_page, config, name)
    )
