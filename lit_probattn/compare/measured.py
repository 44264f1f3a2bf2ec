"""The report of `compare`: adds learning curves and a measured training step of each row."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.analysis.studies.curves import by_step, read_run
from lit_probattn.attention import recorded_choices
from lit_probattn.compare.model import build_task, counts, loss_unit, make_inputs, training_step
from lit_probattn.compare.protocol import differing, setting
from lit_probattn.compare.report import Report
from lit_probattn.compare.runs import Run
from lit_probattn.measure.memory import peak_bytes
from lit_probattn.measure.timing import quantile, time_sides
from lit_probattn.records.figures import OTHERS, ReportFigure, palette_of, panels, readable
from lit_probattn.training.logs import FILE_NAME as METRICS

_RATIOS = {
    "parameters": "parameters",
    "macs": "multiply-adds",
    "step_time": "step time",
    "peak_memory_bytes": "peak memory",
}
_STEP_BATCH = 2  # of the measured step
_SMOOTH = 5  # number of logged training losses per average
_LABEL_WIDTH = 28  # characters of a line


class MeasuredReport(Report):
    """Report with learning curves and a comparison of one training step of all rows."""

    after_every_run: ClassVar[bool] = False

    # ---- one training step -----------------------------------------------------------------------

    @cached_property
    def measured(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Parameters, operations, time and memory of a training step, by task and row."""
        print("\nmeasuring one training step of each row …", flush=True)
        groups: dict[str, dict[str, Run]] = {}
        for run, _ in reversed(self.results):
            groups.setdefault(run.task.name, {})[run.row.name] = run
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for task, runs in groups.items():
            ordered = {name: runs[name] for name in self.table.rows if name in runs}
            found |= {(task, name): row for name, row in self._measure(ordered).items()}
        return found

    def _measure(self, runs: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
        on_cpu = next(iter(runs.values())).place.accelerator == "cpu"
        device = torch.device("cuda" if torch.cuda.is_available() and not on_cpu else "cpu")
        steps: dict[str, Callable[[], None]] = {}
        rows: dict[str, dict[str, Any]] = {}
        for name, run in runs.items():
            data = run.data()
            torch.manual_seed(run.seed)
            with device:
                task = build_task(run, data)
                steps[name] = training_step(task, *make_inputs(task, data, _STEP_BATCH))
            rows[name] = {**counts(run)}
        seconds = time_sides(steps, device=device, warmup=1, repeats=9, max_seconds=45.0)
        base = self._base_of(next(iter(runs.values())).task.name, seconds)
        for name, step in steps.items():  # after timing: what libraries keep is allocated then
            rows[name]["peak_memory_bytes"] = peak_bytes(step, device)
        for name, times in seconds.items():
            ratios = [a / b for a, b in zip(times, seconds[base], strict=True)]
            rows[name] |= {
                **{f"step_time_ratio_p{p}": quantile(ratios, p / 100) for p in (20, 50, 80)},
                "step_time_ratio": quantile(ratios, 0.5),
                "num_timed_steps": len(times),
            }
            for key in ("parameters", "macs", "peak_memory_bytes"):
                rows[name][f"{key}_ratio"] = rows[name][key] / rows[base][key]
        return rows

    def _base_of(self, task: str, rows: Iterable[str]) -> str:
        """Return the row to which ratios of a task's steps refer, by default the baseline."""
        base = self.table.baseline_of(task)
        return base if base in rows else next(iter(rows))

    def columns(self, run: Run, result: dict[str, Any]) -> dict[str, Any]:
        """Return the measurements of a step."""
        row = self.measured[run.task.name, run.row.name]
        return {f"full {key}": value for key, value in row.items() if key != "step_time_ratio"}

    def shown(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return parameters, operations, time and memory of a step."""
        row = self.measured[entry["task"], entry["row"]]
        low, middle, high = (row[f"step_time_ratio_p{p}"] for p in (20, 50, 80))
        memory, millions = row["peak_memory_bytes"] / 2**20, row["macs"] / 1e6
        return {
            "FLOP ratio": None,
            "parameters": f"{row['parameters']:,} ({row['parameters_ratio']:.3f})",
            "multiply-adds per sequence, M (ratio)": f"{millions:.{0 if millions >= 10 else 2}f} "
            f"({row['macs_ratio']:.3f})",
            "step time, ratio [p20, p80]": f"{middle:.2f} [{low:.2f}, {high:.2f}]",
            "peak memory of a step, MiB (ratio)": f"{memory:.{0 if memory >= 10 else 2}f} "
            f"({row['peak_memory_bytes_ratio']:.2f})",
        }

    def cheapest(self) -> list[str]:
        """Return a sentence per task that names the cheapest row of each quantity.

        Another one names the row to which ratios refer if the baseline has no finished run.
        """
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for (task, row), values in self.measured.items():
            found.setdefault(task, {})[row] = values
        sentences = []
        for task, rows in found.items():
            parts, to = [], "the baseline"
            base, wanted = self._base_of(task, rows), self.table.baseline_of(task)
            if base != wanted:
                to = self.table.rows[base].label
                sentences.append(
                    f"**The baseline {self.table.rows[wanted].label} has no finished run on "
                    f"{task}: ratios of costs are relative to {to}.**"
                )
            for key, what in _RATIOS.items():
                name = min(rows, key=lambda row: rows[row][f"{key}_ratio"])
                ratio = rows[name][f"{key}_ratio"]
                parts.append(f"{what}: {self.table.rows[name].label} ({ratio:.2f})")
            if len(rows) > 1:
                sentences.append(f"Cheapest on {task}, ratio to {to}: {'; '.join(parts)}.")
        return sentences

    def text(self) -> list[str]:
        """Return differences other than attention, the cheapest rows, and their measurement."""
        counts = sorted({row["num_timed_steps"] for row in self.measured.values()})
        rounds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        chosen = {call: name for call, name in recorded_choices().items() if "(meta" not in call}
        backends = "; ".join(f"{call}: {name}" for call, name in chosen.items())
        return [
            *self._differing(),
            *self.cheapest(),
            *self._without_log(),
            "One training step: multiply-adds in the matrix products of a forward pass, from "
            "the equations (1 multiply-add = 2 FLOP; a mixture that is reduced to fused "
            "attention costs 2K products per pair and head instead of the K + 1 of the "
            "equation); time and peak memory of forward and backward passes (batch "
            f"{_STEP_BATCH}, full length, float32, training dropout). Rows alternate in one "
            f"process; ratios are medians over {rounds} rounds. Peak memory is measured by the "
            f"allocator, above resident memory. Attention backends: {backends}.",
        ]

    def _differing(self) -> list[str]:
        """Return the settings other than attention in which the rows of a task differ."""
        lines = []
        for task in self.table.tasks:
            runs = {run.row.name: run for run, _ in self.results if run.task.name == task}
            found = differing({name: run.config for name, run in runs.items()})
            if found:
                keys = ", ".join(f"`{key}`" for key in found)
                lines.append(
                    f"**Rows of {task} also differ in settings other than attention: {keys}.**"
                )
        return lines

    def _without_log(self) -> list[str]:
        drawn = {run.label for run, _ in logs_of(self.results)}
        lost = [run.label for run, _ in self.results if run.label not in drawn]
        told = f"**Without learning curves, because {METRICS} is missing: {'; '.join(lost)}.**"
        return [told] if lost else []

    # ---- learning curves -------------------------------------------------------------------------

    def figures(self) -> dict[str, ReportFigure]:
        """Return the learning curves."""
        seeds = {run.seed for run, _ in logs_of(self.results)}
        if not seeds:
            return {}
        caption = (
            f"Loss: mean of {_SMOOTH} logged values. Lines: means over seeds (n = {len(seeds)}); "
            "bands: lowest to highest seed; dashed lines: test split, if runs evaluated it "
            f"during training.{self.shared_options()}"
        )
        claim = self.finding().removesuffix(".")
        return {"learning_curves": ReportFigure(claim, caption, self.learning_curves)}

    def learning_curves(self) -> Figure:
        """Draw training loss and validation score over optimiser steps, one row of panels per task.

        Tasks with more than 16 variants have several rows of panels, since there are not more
        colours. Lines are means over seeds, bands are the range of the seeds; dashed lines are
        scores of the test split, if runs computed them during training.
        """
        by_task: dict[str, dict[str, list[tuple[Run, pd.DataFrame]]]] = {}
        for run, log in logs_of(self.results):
            by_row = by_task.setdefault(run.task.name, {})
            by_row.setdefault(readable(run.row.label), []).append((run, log))
        parts = [
            (task, part) for task, by_row in by_task.items() for part in _parts(by_row, len(OTHERS))
        ]
        figure, panes = panels(len(parts), 2, 4.5, 3.6)
        for pane, (task, by_label) in zip(panes, parts, strict=True):
            colours, dashed = palette_of(by_label), ""
            of_loss = loss_unit(next(iter(by_label.values()))[0][0].config)
            for label, found in by_label.items():
                style: dict[str, Any] = {"color": colours[label]}
                logs = [log for _, log in found]
                monitor = setting(found[0][0].config, "run.monitor") or "val/accuracy"
                scale = 100 if "accuracy" in monitor else 1
                named = textwrap.fill(label, _LABEL_WIDTH)
                _curve(pane[0], logs, "train/loss", named, smooth=_SMOOTH, style=style)
                _curve(pane[1], logs, monitor, label, scale=scale, marker="o", style=style)
                tested = test_curve_of(monitor, logs)
                if tested is not None:
                    style = {**style, "linestyle": "--"}
                    _curve(pane[1], logs, tested, "", scale=scale, marker="o", style=style)
                    dashed = " (dashed: test)"
            unit = ", %" if "accuracy" in monitor else ""
            name = f"validation {monitor.removeprefix('val/')}{dashed}"
            pane[0].set(xlabel="optimiser step", ylabel=f"training loss, {of_loss}")
            pane[1].set(xlabel="optimiser step", ylabel=f"{name}{unit}")
            title = task if len(by_task) > 1 else None
            handles, names = pane[0].get_legend_handles_labels()
            beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
            pane[1].legend(handles, names, title=title, **beside)
        return figure


def _parts(rows: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """Return the rows in parts of at most `most`."""
    items = list(rows.items())
    return [dict(items[first : first + most]) for first in range(0, len(items), most)]


def logs_of(
    results: Sequence[tuple[Run, Mapping[str, Any]]],
) -> list[tuple[Run, pd.DataFrame]]:
    """Return the finished runs whose metrics.csv exists, with the rows of `read_run`."""
    folders = [(run, run.folder_of(result)) for run, result in results]
    return [(run, read_run(place)) for run, place in folders if (place / METRICS).is_file()]


def test_curve_of(monitor: str, logs: Sequence[pd.DataFrame]) -> str | None:
    """Return the test metric that corresponds to a validation metric; None unless all logged it."""
    name = f"test/{monitor.removeprefix('val/')}"
    return name if all(name in set(log["metric"]) for log in logs) else None


def _curve(
    axis: Axes,
    logs: list[pd.DataFrame],
    key: str,
    label: str,
    *,
    scale: float = 1,
    smooth: int = 1,
    marker: str = "",
    style: Mapping[str, Any] | None = None,
) -> None:
    """Draw mean and range of several runs over their common steps."""
    curves = [found for log in logs if len(found := by_step(log, key))]
    series = [one.rolling(smooth, min_periods=1).mean() for one in curves]
    if not series:
        return
    table = scale * pd.concat(series, axis=1, join="inner")
    (line,) = axis.plot(
        table.index, table.mean(axis=1), label=label, marker=marker, **(style or {})
    )
    if len(series) > 1:
        low, high = table.min(axis=1), table.max(axis=1)
        axis.fill_between(table.index, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
