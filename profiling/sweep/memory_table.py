"""`python -m profiling memory`: predicted beside measured peak memory of a sweep's points."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch

from profiling.measure.environment import device_name, git_revision, versions
from profiling.measure.rows import ProfileRow
from profiling.report.tables import markdown_table
from profiling.sweep.config import SweepConfig
from profiling.sweep.plan import make_plan
from profiling.sweep.points import failed_rows
from profiling.sweep.run import cannot_fit, missing_device
from profiling.sweep.worker import Worker, WorkerFailure

# What fake tensors do not see: numbers of Python that autograd keeps, 8 bytes each, and the fused
# kernel's own workspace, a block of scores (at most 256 x 512, twice in backward) per thread.
_NUMBERS_KEPT_BYTES = 128
_WORKSPACE_BYTES = 2 * 256 * 512 * 8 + 2**16


def memory_table(config: SweepConfig, root: Path) -> tuple[str, bool]:
    """Measure every place of a sweep and compare with the prediction.

    Returns:
        The table as text, and whether no point failed and, on the CPU, all are equal but for what
        fake tensors cannot see: numbers that autograd keeps, and the fused kernel's workspace.
    """
    only = config.model_copy(update={"measure": ["memory"]})
    worker = Worker(config.memory_limit_bytes, "python -m profiling memory")
    lines, good = [], True
    try:
        for point in make_plan(only, root):
            reason = point.problem or missing_device(point.device)
            rows = failed_rows(point, reason) if reason else cannot_fit(point)
            if not rows:
                try:
                    rows = worker.run(point, config.point_timeout_s)
                except WorkerFailure as error:
                    rows = failed_rows(point, str(error))
            line, equal = _line(rows)
            lines.append({"point": point.label.removeprefix("memory "), **line})
            good = good and rows[0].status == "ok" and (equal or point.device != "cpu")
    finally:
        worker.close()
    device = missing_device(config.device) or device_name(config.device)
    head = [
        "Peak memory of one step above what is resident (parameters, buffers, inputs), in bytes.",
        "Measured: the allocator. Predicted: fake tensors, nothing allocated. They do not see",
        "numbers of Python that autograd keeps (8 bytes each), nor the fused kernel's workspace",
        "on the CPU (a block of scores per thread).",
        f"{device}; {versions()}; revision {git_revision()}",
        "",
    ]
    return "\n".join([*head, *markdown_table(pd.DataFrame(lines))]), good


def _line(rows: list[ProfileRow]) -> tuple[dict[str, object], bool]:
    by_source = {row.source: row for row in rows}
    measured, predicted = by_source["measured"], by_source.get("predicted")
    if predicted is None or measured.peak_memory_bytes is None:
        guess = None if predicted is None else f"{predicted.peak_memory_bytes:,}"
        return {"measured": None, "predicted": guess, "difference": measured.reason}, False
    assert predicted.peak_memory_bytes is not None
    difference = predicted.peak_memory_bytes - measured.peak_memory_bytes
    numbers: dict[str, object] = {
        "resident": f"{measured.resident_memory_bytes:,}",
        "measured": f"{measured.peak_memory_bytes:,}",
        "predicted": f"{predicted.peak_memory_bytes:,}",
        "difference": f"{difference:,}",
    }
    unseen = _NUMBERS_KEPT_BYTES
    if measured.backend in ("sdpa", "auto"):
        unseen += _WORKSPACE_BYTES * torch.get_num_threads()
    return numbers, -unseen <= difference <= 0
