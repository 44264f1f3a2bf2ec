"""The report of a table: published beside reproduced, cost, differences of protocol, a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

from lit_probattn.compare.cells import Cell
from lit_probattn.compare.protocol import Difference, differences
from lit_probattn.compare.statistics import Sample, ranked_differences, significance
from lit_probattn.compare.tables import AVERAGE, Metric, Row, Table, TaskEntry

SHORTENED = "SHORTENED PROTOCOL"
_LEGEND = [
    "Mean ± standard deviation over seeds (n − 1). Notes are ours − published with a 95 % "
    "interval, for which the published runs, printed without deviations, are assumed to vary as "
    "ours do; and ours − baseline with Welch's interval, * where it excludes 0 (no correction for "
    "several comparisons). FLOP ratio: multiply-adds of one forward pass at the published length "
    "by the equations, without the output layer of a language model, to the baseline's.",
]


@dataclass
class Report:
    """Finished cells of a table, and how they were asked for.

    Args:
        table: the table.
        cells: all cells of the command, finished or not.
        command: the command.
    """

    table: Table
    cells: Sequence[Cell]
    command: str

    @cached_property
    def results(self) -> list[tuple[Cell, dict[str, Any]]]:
        """Finished cells with their results."""
        return [(cell, found) for cell in self.cells if (found := cell.result()) is not None]

    @cached_property
    def differences(self) -> dict[tuple[str, str], list[Difference]]:
        """Differences of protocol by task and row."""
        return {
            (cell.task.name, cell.row.name): differences(cell.task, cell.row, cell.options)
            for cell, _ in self.results
        }

    @property
    def shortened(self) -> bool:
        """Whether any cell was trained for fewer steps, or by an option that shortens."""
        steps = [d for found in self.differences.values() for d in found if "max_steps" in d.key]
        return bool(steps) or any(cell.options.shortens for cell, _ in self.results)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """One row per finished cell."""
        return pd.DataFrame([flat_result(result) for _, result in self.results])

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per task, row and metric: mean, deviation, published, notes, ratios of cost."""
        found = [
            entry
            for task in self.table.tasks.values()
            for metric in task.metrics.values()
            for entry in self._rows_of(task, metric)
        ]
        return pd.DataFrame(found + self._averages(found))

    def _rows_of(self, task: TaskEntry, metric: Metric) -> list[dict[str, Any]]:
        by_row: dict[str, list[dict[str, Any]]] = {}
        for cell, result in self.results:
            if cell.task.name == task.name:
                by_row.setdefault(cell.row.name, []).append(result)
        samples = {
            name: Sample(tuple(result["values"][metric.name] for result in results))
            for name, results in by_row.items()
        }
        base = samples.get(self.table.baseline)
        notes = ranked_differences(list(samples.items()), base) if base else {}
        entries = []
        for name, sample in samples.items():
            row, cost = self.table.rows[name], by_row[name][0]
            base_cost = by_row.get(self.table.baseline, [None])[0]
            ratio = None
            if base_cost is not None:
                ratio = cost["macs_published_length"] / base_cost["macs_published_length"]
            published = row.published.get(task.name, {}).get(metric.name)
            entries.append(
                self._entry(task, row, metric, sample, published, cost)
                | {"flop_ratio": ratio, "difference_from_baseline": notes.get(name, "")}
            )
        return entries

    def _entry(
        self,
        task: TaskEntry,
        row: Row,
        metric: Metric,
        sample: Sample,
        published: float | None,
        cost: dict[str, Any],
    ) -> dict[str, Any]:
        size = cost.get("num_test") if metric.unit == "%" else None
        comparable = not self.shortened or metric.command == "count"
        return {
            "task": task.name,
            "row": row.name,
            "method": row.label,
            "metric": metric.name,
            "unit": metric.unit,
            "num_seeds": sample.count,
            "mean": sample.mean,
            "std": sample.std,
            "published": published,
            "note": significance(
                sample, published, self.table.published_runs, size, comparable=comparable
            ),
            "num_parameters": cost["parameters"],
            "macs_published_length": cost["macs_published_length"],
            "selected_on_test": cost["selected_on_test"],
        }

    def _averages(self, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Mean over the tasks, of rows that have all of them."""
        found = []
        for row in self.table.rows.values():
            mine = [e for e in entries if e["row"] == row.name]
            if AVERAGE in row.published and len(mine) == len(self.table.tasks):
                (published,) = row.published[AVERAGE].values()
                mean = sum(e["mean"] for e in mine) / len(mine)
                note = "" if self.shortened else f"{mean - published:+.2f}: no interval"
                found.append(
                    {**mine[0], "task": AVERAGE, "mean": mean, "std": None, "note": note}
                    | {"published": published, "difference_from_baseline": ""}
                )
        return found

    # ---- writing -------------------------------------------------------------------------------

    def write(self, folder: Path) -> str:
        """Write `report.md`, `rows.csv`, `ratios.csv` and the picture; return the table.

        Raises:
            ValueError: no cell is finished.
        """
        if not self.results:
            raise ValueError("no finished cell: nothing to report")
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        self.rows.to_csv(folder / "rows.csv", index=False)
        self.summary.to_csv(folder / "ratios.csv", index=False, float_format="%.6g")
        title = f"{self.table.title}{f' ({SHORTENED})' if self.shortened else ''}"
        draw(self.summary, self.rows, title, folder / "figures" / "results.png")
        table = "\n".join(table_lines(self.summary))
        unfinished = [c.label for c in self.cells if c.result() is None]
        text = [
            f"# {title}",
            "",
            f"Command: `{self.command}`",
            *self._provenance(),
            f"{len(self.results)} of {len(self.cells)} cells are finished"
            + (f"; missing: {'; '.join(unfinished)}." if unfinished else "."),
            "",
            *self._warning(),
            table,
            "",
            *_LEGEND,
            "",
            "![results](figures/results.png)",
            "",
            "## Differences from the published protocol",
            "",
            *self._difference_lines(),
            "",
            "## Runs",
            "",
            *self._run_lines(),
        ]
        (folder / "report.md").write_text("\n".join(text) + "\n", encoding="utf-8")
        return table

    def _provenance(self) -> list[str]:
        machines = sorted({str(row["device"]) for row in self.rows.to_dict("records")})
        versions = sorted(set(self.rows["versions"]))
        revisions = sorted(set(self.rows["git_revision"]))
        return [
            f"Machine: {'; '.join(machines)}. {'; '.join(versions)}. Revision "
            f"{', '.join(revisions)}."
        ]

    def _warning(self) -> list[str]:
        lines = []
        if self.shortened:
            lines.append(
                f"**{SHORTENED}: these runs are shorter than the published ones. They show that "
                "the machinery works and how the rows compare with each other under this "
                "protocol; they say nothing about the published values.**"
            )
        if self.summary["selected_on_test"].any():
            lines.append("**Checkpoints were selected on the test split.**")
        return [part for line in lines for part in (line, "")]

    def _difference_lines(self) -> list[str]:
        """Differences that all cells of a task share once, the others with their rows."""
        lines = ["Computed from the configurations; seeds of the published runs are not printed."]
        for task in self.table.tasks.values():
            mine = {
                row: found for (name, row), found in self.differences.items() if name == task.name
            }
            if not mine:
                continue
            counts: dict[str, list[str]] = {}
            for row, found in mine.items():
                for difference in found:
                    counts.setdefault(str(difference), []).append(row)
            lines += ["", f"{task.name}:", ""]
            for text, rows in counts.items():
                where = "" if len(rows) == len(mine) else f" ({', '.join(rows)})"
                lines.append(f"- {text}{where}")
            lines += [f"- {note}" for note in task.not_in_config]
            seeds = sorted({cell.seed for cell, _ in self.results if cell.task.name == task.name})
            lines.append(
                f"- seeds: published {self.table.published_runs} runs, here "
                f"{', '.join(map(str, seeds))}"
            )
        return lines

    def _run_lines(self) -> list[str]:
        lines = ["| cell | steps | selected step | starts | minutes | command |"]
        lines.append("| --- | --- | --- | --- | --- | --- |")
        for cell, result in self.results:
            seconds = result["fit_seconds_of_last_start"]
            least = "at least " if result["num_starts"] > 1 else ""
            minutes = f"{least}{seconds / 60:.1f}" if seconds > 1 else "unknown"
            lines.append(
                f"| {cell.label} | {result['max_steps']} | {result['selected_step']} | "
                f"{result['num_starts']} | {minutes} | `{result['command']}` |"
            )
        return lines


def table_lines(summary: pd.DataFrame) -> list[str]:
    """The summary as Markdown."""
    lines = [
        "| task | method | metric | seeds | reproduced | published | ours − published | "
        "ours − baseline | parameters | FLOP ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in summary.to_dict("records"):
        spread = f" ± {row['std']:.2f}" if pd.notna(row["std"]) else ""
        ratio = f"{row['flop_ratio']:.3f}" if pd.notna(row["flop_ratio"]) else "–"
        published = f"{row['published']:.2f}" if pd.notna(row["published"]) else "–"
        lines.append(
            f"| {row['task']} | {row['method']} | {row['metric']}, {row['unit']} | "
            f"{row['num_seeds']} | {row['mean']:.2f}{spread} | {published} | {row['note']} | "
            f"{row['difference_from_baseline']} | {row['num_parameters']:,} | {ratio} |"
        )
    return lines


def flat_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return what rows.csv says of a finished cell."""
    hardware, git = result.get("hardware") or {}, result.get("git") or {}
    gpus = [gpu["name"] for gpu in hardware.get("gpus") or []]
    backends = result.get("backends") or {}
    on_gpu = any("(cuda" in call for call in backends)
    packages = result.get("packages") or {}
    shown = ("torch", "lightning", "triton", "lit-probattn")
    versions = [f"{name} {packages[name]}" for name in shown if packages.get(name)]
    return {
        **{key: result[key] for key in ("task", "row", "seed")},
        **{f"value {name}": value for name, value in result["values"].items()},
        **{
            key: result[key]
            for key in (
                *(
                    "parameters",
                    "macs",
                    "macs_published_length",
                    "num_test",
                    "max_steps",
                    "selected_step",
                ),
                *("selected_step", "selected_on_test", "num_starts", "fit_seconds_of_last_start"),
            )
        },
        "backends": "; ".join(f"{call}: {name}" for call, name in backends.items()),
        "device": gpus[0]
        if on_gpu and gpus
        else f"{hardware.get('processor')}, {hardware.get('num_cores')} cores",
        "versions": ", ".join([f"python {result.get('python')}", *versions]),
        "git_revision": f"{str(git.get('revision'))[:7]}{'+' if git.get('dirty') else ''}",
        "run_folder": result["run_folder"],
        "command": result["command"],
    }


def draw(summary: pd.DataFrame, rows: pd.DataFrame, title: str, path: Path) -> None:
    """Draw one panel per task and metric; rows of the table from top to bottom.

    Args:
        summary: the report's summary.
        rows: one row per finished cell.
        title: above the panels.
        path: PNG file.
    """
    panels = [
        (key, part)
        for key, part in summary.groupby(["task", "metric"], sort=False)
        if f"value {key[1]}" in rows and key[0] in set(rows["task"])
    ]
    tallest = max(len(part) for _, part in panels)
    sns.set_theme(style="whitegrid")
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(1.5 + 4.2 * len(panels), 1.9 + 0.33 * tallest),
        layout="constrained",
        squeeze=False,
    )
    for axis, ((task, metric), part) in zip(axes[0], panels, strict=True):
        places = {name: -index for index, name in enumerate(part["row"])}
        seeds = rows[(rows["task"] == task) & rows["row"].isin(places)]
        axis.scatter(
            seeds[f"value {metric}"],
            [places[name] for name in seeds["row"]],
            s=14,
            color="tab:blue",
            alpha=0.6,
            label="one seed",
            zorder=3,
        )
        heights = [places[name] + 0.22 for name in part["row"]]
        axis.errorbar(
            part["mean"],
            heights,
            xerr=part["std"].astype(float).fillna(0.0),
            fmt="o",
            color="black",
            markersize=5,
            capsize=3,
            label="mean ± std",
        )
        known = part["published"].notna()
        axis.scatter(
            part["published"][known],
            [places[name] - 0.22 for name in part["row"][known]],
            marker="D",
            facecolors="none",
            edgecolors="tab:red",
            label="published (its own protocol)",
        )
        axis.set_yticks(list(places.values()), list(part["method"]))
        axis.set_ylim(-len(places) + 0.4, 0.6)
        axis.set(xlabel=f"{task}: {metric}, {part['unit'].iloc[0]}")
        axis.grid(axis="y", visible=False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(textwrap.fill(title, 24 + 32 * len(panels)), fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
