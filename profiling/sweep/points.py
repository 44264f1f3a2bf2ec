"""Measure one point: build the model, count or run it, and return the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lit_probattn.attention import Attention
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.memory import predicted_bytes, resident_bytes
from lit_probattn.base.provenance import command_line, device_name, git_revision, versions
from lit_probattn.measure.memory import (
    cuda_peak_bytes,
    measured_cpu_bytes,
    nvml_energy_j,
    nvml_used_bytes,
)
from lit_probattn.measure.timing import alone_on, captured, quantile, time_columns, time_sides
from profiling.measure.rows import ProfileRow, Source
from profiling.sweep.count import count_costs
from profiling.sweep.models import make_step
from profiling.sweep.plan import Point


def point_rows(
    point: Point, entries: list[dict[str, Any]], layer: Attention | None
) -> list[ProfileRow]:
    """Complete the entries of a point with the columns that all its rows share.

    Settings and sizes of the point are the columns of the same names.
    """
    settings = {**point.sizes, **vars(point)}
    shared: dict[str, Any] = {
        **{name: settings[name] for name in ProfileRow.model_fields if name in settings},
        "point_id": point.point_id,
        "rows_in_point": len(entries),
        "attention_class": point.class_path.rsplit(".", 1)[-1],
        "attention_args": json.dumps(dict(point.init_args), sort_keys=True),
        "num_heads": point.init_args.get("num_heads") if layer is None else layer.num_heads,
        "source": "measured",
        "scope": "attention" if point.model == "attention" else "model",
        "status": "ok",
        "device": point.device if point.quantity != "cost" else "meta",
        "versions": versions(),
        "git_revision": git_revision(),
        "command": command_line(),
    }
    name = device_name("meta") if point.quantity == "cost" else _safe_device_name(point.device)
    return [
        ProfileRow.of({**shared, "device_name": name, **entry, "row_index": index})
        for index, entry in enumerate(entries)
    ]


def _safe_device_name(device: str) -> str:
    try:
        return device_name(device)
    except (RuntimeError, AssertionError):
        return f"{device} (not available)"


def failed_rows(point: Point, reason: str, status: str = "failed") -> list[ProfileRow]:
    """Return the single row of a point that could not be measured, with the reason."""
    return point_rows(point, [_without_numbers(reason, status)], None)


def skipped_rows(point: Point, reason: str, peak: int, resident: int) -> list[ProfileRow]:
    """Return the rows of a point that was skipped because of its predicted memory."""
    entries = [_without_numbers(reason, "skipped")]
    if point.quantity == "memory":
        entries.append(_memory("predicted", peak, resident))
    return point_rows(point, entries, None)


def _without_numbers(reason: str, status: str) -> dict[str, Any]:
    return {"status": status, "reason": " ".join(reason.split())[:500]}


def _memory(source: Source, peak: int, resident: int, **more: Any) -> dict[str, Any]:
    sizes = {"peak_memory_bytes": peak, "resident_memory_bytes": resident}
    return {"source": source, **sizes, **more}


# ---------------------------------------------------------------------- quantities
def measure_cost(point: Point) -> list[ProfileRow]:
    """Count multiply-adds and parameters on the meta device; add the closed forms."""
    layer, entries = count_costs(point)
    return point_rows(point, entries, layer)


def measure_memory(point: Point, predicted: tuple[int, int] | None = None) -> list[ProfileRow]:
    """Measure the peak memory of one step; add the prediction by fake tensors.

    Args:
        predicted: peak above resident memory, and resident memory, if known. Otherwise they are
            predicted now, except on a GPU, which would be idle meanwhile.
    """
    device = torch.device(point.device)
    build_on_cpu = partial(make_step, point, torch.device("cpu"))
    torch.manual_seed(point.seed)
    if predicted is None and device.type == "cpu":
        predicted = predicted_bytes(build_on_cpu)
    if device.type == "cpu":
        measured = _memory("measured", *measured_cpu_bytes(build_on_cpu))
    else:
        step, resident = make_step(point, device)
        for _ in range(3):
            step()
        allocated, reserved = cuda_peak_bytes(step, device)
        measured = _memory(
            "measured",
            allocated,
            resident_bytes(resident),
            peak_reserved_bytes=reserved,
            nvml_memory_bytes=nvml_used_bytes(device),
        )
    entries = [measured] if predicted is None else [measured, _memory("predicted", *predicted)]
    return point_rows(point, entries, None)


def measure_time(point: Point) -> list[ProfileRow]:
    """Time one step: warm-up, repeats, median, quantiles, and energy if the device reports it.

    On a GPU also the replayed CUDA graph of a step.
    """
    device, timing = torch.device(point.device), point.timing
    torch.manual_seed(point.seed)
    step, _ = make_step(point, device)
    for _ in range(timing["warmup"]):
        step()
    limits: dict[str, Any] = {"repeats": timing["repeats"], "max_seconds": timing["max_seconds"]}

    def seconds_of(function: Callable[[], object]) -> list[float]:
        return time_sides({"step": function}, device=device, warmup=0, **limits)["step"]

    with alone_on(device):  # the energy of other timings does not count, nor that of the warm-up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before = nvml_energy_j(device)
        seconds = seconds_of(step)
        after = nvml_energy_j(device)
    energy = None if before is None or after is None else (after - before) / len(seconds)
    entry: dict[str, Any] = {**time_columns(seconds), "energy_j": energy}
    if device.type == "cuda":
        try:
            entry["graph_median_s"] = quantile(seconds_of(captured(step, device)), 0.5)
        except UnsupportedError as error:
            entry["reason"] = f"no CUDA graph: {error}"
    return point_rows(point, [entry], None)


def measure_point(point: Point, predicted: tuple[int, int] | None = None) -> list[ProfileRow]:
    """Return the rows of a point; an error becomes a failed row with the reason.

    Args:
        predicted: its memory, see `measure_memory`.
    """
    if point.problem is not None:
        return failed_rows(point, point.problem)
    try:
        if point.quantity == "memory":
            return measure_memory(point, predicted)
        return measure_cost(point) if point.quantity == "cost" else measure_time(point)
    except Exception as error:
        kind = type(error).__name__
        return failed_rows(point, f"{kind}: {error}" if str(error) else kind)
