"""The report of a table: published and reproduced values, cost, protocol differences, figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import pandas as pd

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.protocol import (
    Difference,
    attention_option,
    differences,
    draws_noise_at_eval,
    setting,
    switched,
)
from lit_probattn.compare.runner import minutes_of
from lit_probattn.compare.runs import Run
from lit_probattn.compare.scores import scores_figure
from lit_probattn.compare.tables import AVERAGE, Metric, Row, Table, TaskEntry, decimals_of
from lit_probattn.compare.trends import Agreement, agreements, trend_lines, trends_figure
from lit_probattn.configs import different_keys
from lit_probattn.experiments.expectations import (
    Finding,
    Printed,
    Reference,
    Sample,
    Verdict,
    against_printed,
    difference,
    half_width_of_test_set,
)
from lit_probattn.experiments.page import Made, Page, as_csv, image
from lit_probattn.records.figures import ReportFigure
from lit_probattn.records.markdown import code_span, escaped, one_line
from lit_probattn.records.tables import markdown_lines, unequal_sides

SHORTENED = "SHORTENED PROTOCOL"
_PUBLISHED_LEGEND = (
    "The 95 % interval of ours − published assumes that the published runs, printed {}, vary "
    "like ours. "
)
_MOST_NAMED = 4  # rows in a sentence
TABLES = ("rows", "ratios", "verdicts")  # of all reports of runs and of measured costs
_COUNTS = ("num_parameters", "macs_published_length")
_LEGEND = (
    "Mean ± standard deviation over seeds (n − 1). {}The 95 % interval of ours − baseline is "
    "paired if both rows have at least two common seeds, otherwise Welch's; * marks intervals "
    "that exclude 0 (not corrected for multiple comparisons)."
)
_NOT_ALONE = "differences are not due to the attention alone"
_EFFECTS = {  # of settings in which rows may differ
    "attention dropout": _NOT_ALONE,
    "precision": _NOT_ALONE,
    "backend": "this affects time, and scores only by rounding",
}
_COLUMN_LEGENDS = {
    "FLOP ratio": "FLOP ratio: multiply-adds of one forward pass at full length, from the "
    "equations, relative to the baseline and without the output layer of a language model.",
    "minutes": "Minutes: mean training time on this machine.",
}


@dataclass
class Report:
    """Report of the finished runs of a table.

    A command with additional columns, figures or text overrides `columns`, `shown`, `figures` and
    `text`.

    Args:
        table: the table.
        runs: all runs of the command, finished or not.
        command: the command.
    """

    table: Table
    runs: Sequence[Run]
    command: str
    # Whether scores are drawn by row; False if another figure of the report shows them.
    draws_scores: ClassVar[bool] = True
    # Whether the report is written after each run, or only at the end.
    after_every_run: ClassVar[bool] = True

    def columns(self, run: Run, result: dict[str, Any]) -> dict[str, Any]:
        """Return additional columns of rows.csv for a finished run."""
        return {}

    def shown(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return additional columns of the table for an entry of the summary; None removes one."""
        return {}

    def figures(self) -> dict[str, ReportFigure]:
        """Return additional figures, by name."""
        return {}

    def copies(self) -> dict[str, Path]:
        """Return existing PNG files to copy, by name; the text shows them."""
        return {}

    def further_tables(self) -> dict[str, str]:
        """Return additional CSV files, by name."""
        return {}

    def text(self) -> list[str]:
        """Return additional paragraphs after the table."""
        return []

    def metrics(self, task: TaskEntry) -> Sequence[Metric]:
        """Return the compared metrics."""
        return list(task.metrics.values())

    def legend(self) -> str:
        """Return the explanation of the table's columns."""
        spread = any(row.spread for row in self.table.rows.values())
        how = "with an undefined ±" if spread else "without deviations"
        published = _PUBLISHED_LEGEND.format(how) if self.table.published_runs else ""
        named = [text for name, text in _COLUMN_LEGENDS.items() if f" {name} " in self.lines[0]]
        return " ".join([_LEGEND.format(published), *named])

    def plan(self, runs: Sequence[Run], commands: bool) -> list[str]:
        """Return the lines of a dry run about the steps after training.

        Args:
            runs: runs of this process.
            commands: whether to list commands.
        """
        return []

    def complete(self, runs: Sequence[Run], jobs: int, devices: Sequence[str]) -> dict[str, str]:
        """Compute the additional results of trained runs for the report.

        Args:
            runs: runs of this process.
            jobs: number of concurrent processes.
            devices: CUDA devices to distribute them over.

        Returns:
            Reasons of failures, by run label.
        """
        return {}

    @cached_property
    def results(self) -> list[tuple[Run, dict[str, Any]]]:
        """Finished runs with their results."""
        found = [(run, r) for run in self.runs if (r := run.result()) is not None]
        _refuse_other_data(found)
        return found

    @property
    def has_numbers(self) -> bool:
        """Whether there are results to report."""
        return bool(self.results)

    @property
    def judged(self) -> list[Finding]:
        """Findings on printed numbers and on the table's trends."""
        numbers = []
        for e in self.summary.to_dict("records"):
            if isinstance(e["verdict"], str):
                says = f"{e['task']}, {e['method']}: {e['metric']} {e['published']:g}"
                numbers.append(Finding(e["note"], cast(Verdict, e["verdict"]), says))
        return [*numbers, *(one.finding for one in self.agreements)]

    def finding(self) -> str:
        """Return a one-sentence summary: the first score over seeds of the first rows."""
        told = self.summary[self.summary["mean"].notna()]
        if told.empty:
            return ""
        first = told[(told[["task", "metric"]] == told.iloc[0][["task", "metric"]]).all(axis=1)]
        named = [
            f"{e['method']} {e['mean']:.{decimals_of(e['unit'])}f}"
            for e in first.head(_MOST_NAMED).to_dict("records")
        ]
        more = f"; and {len(first) - _MOST_NAMED} more" if len(first) > _MOST_NAMED else ""
        entry = first.iloc[0]
        about = f"{entry['task']}, {entry['metric']}, {entry['unit']}"
        return f"{about}: {'; '.join(named)}{more}."

    @cached_property
    def tasks(self) -> list[TaskEntry]:
        """The table's tasks, each after its starts."""
        named = {run.task.name: run.task for run in self.runs}
        order = (part.name for task in self.table.tasks.values() for part in task.chain())
        return [named[name] for name in dict.fromkeys(order) if name in named]

    @cached_property
    def agreements(self) -> list[Agreement]:
        """Printed and reproduced trends of the table."""
        return agreements(self.table, self.rows)

    @cached_property
    def differences(self) -> dict[tuple[str, str], list[Difference]]:
        """Differences of protocol by task and row."""
        return {
            (run.task.name, run.row.name): differences(run.task, run.row, run.options)
            for run, _ in self.results
        }

    @property
    def shortened(self) -> bool:
        """Whether any run has fewer steps, or an option reduces the protocol."""
        steps = [d for found in self.differences.values() for d in found if "max_steps" in d.key]
        return bool(steps) or any(run.options.shortens for run, _ in self.results)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """One row per finished run."""
        return pd.DataFrame([flat_result(c, r) | self.columns(c, r) for c, r in self.results])

    def sample(self, row: str, column: str) -> Sample | None:
        """Return a column of a row's runs over seeds, for reports of one task; None without any."""
        if column not in self.rows:
            return None
        mine = self.rows[self.rows["row"] == row]
        return Sample.of(mine.dropna(subset=[column]), column)

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per task, row and metric: mean, deviation, published value, note, cost ratios."""
        found = [
            entry
            for task in (self.tasks if self.results else ())
            for metric in self.metrics(task)
            for entry in self._rows_of(task, metric)
        ]
        counts = dict.fromkeys(_COUNTS, "Int64") if found else {}  # averages have none
        return pd.DataFrame(found + self._averages(found)).astype(counts)

    def _rows_of(self, task: TaskEntry, metric: Metric) -> list[dict[str, Any]]:
        macs, mine = "macs_published_length", self.rows[self.rows["task"] == task.name]
        runs = {str(name): part for name, part in mine.groupby("row", sort=False)}
        samples = {
            name: found
            for name, part in runs.items()
            if (found := Sample.of(part, f"value {metric.name}")) is not None
        }
        baseline = self.table.baseline_of(task.name)
        base = samples.get(baseline)
        base_macs = None if base is None else runs[baseline][macs].iloc[0]
        return [
            self._entry(task, self.table.rows[name], metric, sample, runs[name], base)
            | {
                "flop_ratio": runs[name][macs].iloc[0] / base_macs if base_macs else None,
                "difference_from_baseline": ""
                if base is None
                else beside(sample, base, decimals_of(metric.unit)),
            }
            for name, sample in samples.items()
        ]

    def _entry(
        self,
        task: TaskEntry,
        row: Row,
        metric: Metric,
        sample: Sample,
        runs: pd.DataFrame,
        base: Sample | None,
    ) -> dict[str, Any]:
        published = row.published.get(task.name, {}).get(metric.name)
        # Other percentages are of tokens, not of samples.
        is_of_samples = metric.unit == "%" and "accuracy" in metric.key
        size: Any = runs["num_test"].iloc[0] if is_of_samples else None
        smaller = bool(row.shortened) and any(run.options.shortened for run in self.runs)
        comparable = not self.shortened or (metric.command == "count" and not smaller)
        found = self._judged(task, row, metric.name, sample, base) if comparable else None
        note = "no published value" if published is None else "not compared: different protocol"
        if found is not None:
            note = found.measured
            if sample.count == 1 and pd.notna(size):
                half = half_width_of_test_set(sample.mean, size)
                note += f"; sampling error of the test set ± {half:.2f}"
        # The minutes of a resumed fit count only from its last start.
        seconds = runs.loc[runs["num_starts"] == 1, "fit_seconds_of_last_start"]
        return {
            "task": task.name,
            "row": row.name,
            "method": row.label,
            "metric": metric.name,
            "unit": metric.unit,
            "num_seeds": sample.count,
            "mean": sample.mean,
            "std": sample.std,
            "lowest": min(sample.values),
            "published": published,
            "published_spread": row.spread.get(task.name, {}).get(metric.name),
            "note": note,
            "verdict": None if found is None else found.verdict,
            "num_parameters": runs["parameters"].iloc[0],
            "macs_published_length": runs["macs_published_length"].iloc[0],
            "fit_minutes": seconds.astype(float).mean() / 60,
            "selected_on_test": runs["selected_on_test"].iloc[0],
        }

    def _judged(
        self, task: TaskEntry, row: Row, name: str, ours: Sample, base: Sample | None
    ) -> Finding | None:
        """Judge a printed number; its order is relative to the printed baseline."""
        published = row.published.get(task.name, {}).get(name)
        if published is None:
            return None
        reference, baseline = None, self.table.rows.get(self.table.baseline_of(task.name))
        if base is not None and base is not ours and baseline is not None:
            printed = baseline.published.get(task.name, {}).get(name)
            reference = None if printed is None else Reference(base, printed)
        number = Printed.rounded(published, self.table.digits(name))
        return against_printed(ours, number, self.table.published_runs, reference)

    def _averages(self, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Mean of the published metric over the tasks, for rows with all tasks.

        Parameters and operations differ between tasks; the number of seeds is the smallest.
        """
        found = []
        for row in self.table.rows.values():
            if AVERAGE not in row.published:
                continue
            ((metric, published),) = row.published[AVERAGE].items()
            mine = [e for e in entries if e["row"] == row.name and e["metric"] == metric]
            if len(mine) == len(self.table.tasks):
                mean = sum(e["mean"] for e in mine) / len(mine)
                note = "" if self.shortened else f"{mean - published:+.2f}: no interval"
                found.append(
                    {**mine[0], "task": AVERAGE, "mean": mean, "std": None, "note": note}
                    | {"published": published, "difference_from_baseline": ""}
                    | {"published_spread": None, "verdict": None}
                    | {"lowest": None, "fit_minutes": None, "flop_ratio": None}
                    | {"num_seeds": min(e["num_seeds"] for e in mine), **dict.fromkeys(_COUNTS)}
                )
        return found

    @property
    def lines(self) -> list[str]:
        """The summary as Markdown; published numbers have columns only if there are any."""
        shown = []
        has_published = self.summary["published"].notna().any()
        entries: list[dict[str, Any]] = cast(Any, self.summary.to_dict("records"))
        for entry in entries:
            digits = decimals_of(entry["unit"])
            spread = f" ± {entry['std']:.{digits}f}" if pd.notna(entry["std"]) else ""
            known = pd.notna(entry["published_spread"])
            printed_spread = f" ± {entry['published_spread']:.2f}" if known else ""
            published = {
                "published": _number(entry["published"], ".2f") + printed_spread,
                "ours − published": entry["note"],
                "verdict": entry["verdict"],
            }
            shown.append(
                {
                    "task": entry["task"],
                    "method": entry["method"],
                    "metric": f"{entry['metric']}, {entry['unit']}",
                    "seeds": entry["num_seeds"],
                    "reproduced": f"{entry['mean']:.{digits}f}{spread}",
                    **(published if has_published else {}),
                    "ours − baseline": entry["difference_from_baseline"],
                    "parameters": _number(entry["num_parameters"], ","),
                    "FLOP ratio": _number(entry["flop_ratio"], ".3f"),
                    "minutes": _number(entry["fit_minutes"], ".1f"),
                    **self.shown(entry),
                }
            )
        return markdown_lines(pd.DataFrame(shown).dropna(axis=1, how="all"))

    # ---- writing -------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The heading."""
        return f"{self.table.title}{f' ({SHORTENED})' if self.shortened else ''}"

    def page(self) -> Page:
        """Return the report.

        Raises:
            ValueError: no run is finished, and the report has no other results.
        """
        if not self.has_numbers:
            raise ValueError("no run is finished: nothing to report")
        figures: dict[str, ReportFigure] = {}
        if self.results and self.draws_scores:
            figures["results"] = self._scores()
        if self.agreements:
            figures["trends"] = trends_figure(self.agreements)
        figures |= self.figures()
        found = (*map(one_line, (*self._noise_lines(), *self._start_lines())), *self.text())
        return Page(
            kind="runs",
            title=self.title,
            made=self._made(),
            finding=self.finding(),
            body=[
                *(self._finished_line(), "", *self._warning(), *self.lines, "", self.legend()),
                *(line for part in found for line in ("", part)),
                *(line for name in figures for line in ("", image(name))),
                *trend_lines(self.agreements),
                *(self._difference_lines() if self.table.published_runs else []),
                *("", "## Runs", "", *self._run_lines()),
            ],
            findings=self.judged,
            tables={
                "rows": as_csv(self.rows),
                "ratios": as_csv(self.summary, 6),
                **self.further_tables(),
            },
            figures={**figures, **self.copies()},
        )

    def write(self, folder: Path) -> str:
        """Write the report and return its table.

        Raises:
            ValueError: see `page`.
        """
        self.page().write(folder)
        return "\n".join(self.lines)

    def _scores(self) -> ReportFigure:
        measured = self.summary[self.summary["mean"].notna() & (self.summary["task"] != AVERAGE)]
        found = scores_figure(
            measured, self.rows, self.table.baseline_of, compared=not self.shortened
        )
        return replace(found, caption=found.caption + self.shared_options())

    def shared_options(self) -> str:
        """Return a sentence on options that all rows set; their labels omit these."""
        found = code_span(self.table.shared_options)
        return f" All variants: {found}." if self.table.shared_options else ""

    def _made(self) -> Made:
        if not self.results:
            return Made.here(self.command)
        return Made.of(self.rows, command=self.command)

    def _finished_line(self) -> str:
        finished = {run.name for run, _ in self.results}
        unfinished = [unfinished_label(run) for run in self.runs if run.name not in finished]
        missing = f"; missing: {one_line('; '.join(unfinished))}." if unfinished else "."
        return f"{len(finished)} of {len(self.runs)} runs are finished{missing}"

    def _warning(self) -> list[str]:
        lines = []
        if self.shortened:
            than, beyond = "those of the task file", ""
            if self.table.published_runs:
                than = "the published ones"
                beyond = ", but not with the published values"
            lines.append(
                f"**{SHORTENED}: these runs are shorter than {than}. They compare the rows with "
                f"each other under this protocol{beyond}.**"
            )
        if self.results and self.summary["selected_on_test"].eq(True).any():
            lines.append("**Checkpoints were selected on the test split.**")
        if any((r.get("report") or {}).get("test_during_training") for _, r in self.results):
            lines.append(
                "**The test split was evaluated during training, for curves "
                "(`run.test_during_training`); these scores selected no checkpoint.**"
            )
        lines += [*self._unlearned(), *self._unequal_sides()]
        return [part for line in lines for part in (one_line(line), "")]

    def _unlearned(self) -> list[str]:
        """Return a warning that names the rows with accuracy at chance level."""
        seeds: dict[str, list[str]] = {}
        for run, result in self.results:
            if (result.get("report") or {}).get("above_chance") is False:
                name = f"{run.task.name}, {run.row.label}"
                seeds.setdefault(name, []).append(str(run.seed))
        named = "; ".join(f"{row} (seed {', '.join(found)})" for row, found in seeds.items())
        text = "Not above chance, so not comparable: accuracy within 1.96 standard errors"
        return (
            [f"**{text} of always predicting the most frequent label. {named}.**"] if named else []
        )

    def _unequal_sides(self) -> list[str]:
        """Return the settings in which rows of a task differ; of some tasks, with their names."""
        by_task: dict[str, dict[str, dict[str, object]]] = {}
        for run, result in reversed(self.results):  # the first run of a row counts
            chosen = sorted(set((result.get("backends") or {}).values()))
            by_task.setdefault(run.task.name, {})[run.row.name] = {
                "attention dropout": attention_option(run.config, "dropout"),
                "precision": setting(run.config, "trainer.precision"),
                "backend": ", ".join(chosen) or None,
            }
        found: dict[str, list[str]] = {}
        for task in (one.name for one in self.tasks if one.name in by_task):
            baselines = dict.fromkeys(by_task[task], self.table.baseline_of(task))
            for key, effect in _EFFECTS.items():
                sides = {name: {key: settings[key]} for name, settings in by_task[task].items()}
                for line in unequal_sides(sides, baselines, effect):
                    found.setdefault(line, []).append(task)
        return [
            line if len(tasks) == len(by_task) else f"{', '.join(tasks)}: {line}"
            for line, tasks in found.items()
        ]

    def _noise_lines(self) -> list[str]:
        """Return whether rows with noise were evaluated with noise."""
        rows: dict[bool, dict[str, None]] = {}
        for run, _ in self.results:
            drawn = draws_noise_at_eval(run.config)
            if drawn is not None:
                rows.setdefault(drawn, {})[run.row.label] = None
        how = {
            True: "on, as a function of seed and sample",
            False: "off, so these are evaluated as their Hard variants",
        }
        return [f"Noise at evaluation is {how[k]}: {'; '.join(v)}." for k, v in rows.items()]

    def _start_lines(self) -> list[str]:
        """Return the starts of runs that start from other runs."""
        begun = {c.task.name: c.start.task.name for c, _ in self.results if c.start is not None}
        seed = next((run.options.start_seed for run in self.runs), None)
        of = "the same seed, so the spread includes all trainings"
        if seed is not None:
            of = f"seed {seed}, so the spread excludes the training on the first task"
        named = "; ".join(f"{task} from {start}" for task, start in begun.items())
        return (
            [f"Runs start from the trained model of their row: {named}, with {of}."]
            if begun
            else []
        )

    def _difference_lines(self) -> list[str]:
        """Differences of all runs of a task, then those of single rows."""
        lines = [
            "",
            "## Differences from the published protocol",
            "",
            "Computed from the configurations. The paper does not print its seeds.",
        ]
        for task in self.tasks:
            mine = {
                row: found for (name, row), found in self.differences.items() if name == task.name
            }
            if not mine:
                continue
            counts: dict[str, list[str]] = {}
            for row, found in mine.items():
                for one in found:
                    counts.setdefault(str(one), []).append(row)
            lines += ["", f"{task.name}:", ""]
            for row in mine:
                for note in self.table.rows[row].not_in_config:
                    counts.setdefault(note, []).append(row)
            for text, rows in counts.items():
                where = "" if len(rows) == len(mine) else f" ({', '.join(rows)})"
                lines.append(f"- {escaped(text + where)}")
            lines += self._switched_lines(task)
            lines += [f"- {one_line(note)}" for note in task.not_in_config]
            seeds = sorted({run.seed for run, _ in self.results if run.task.name == task.name})
            lines.append(
                f"- seeds: published {self.table.published_runs} runs, here "
                f"{', '.join(map(str, seeds))}"
            )
        return lines

    def _switched_lines(self, task: TaskEntry) -> list[str]:
        """Published settings that --as_published has applied."""
        options = next(run.options for run, _ in self.results if run.task.name == task.name)
        lines = []
        for found in switched(task, options):
            published, here = (json.dumps(value) for value in (found.published, found.here))
            usual = "" if published == here else f", otherwise {here}"
            text = f"- as published (`--as_published`): `{found.key}` {published}{usual}"
            lines.append(escaped(text))
        return lines

    def _run_lines(self) -> list[str]:
        shown = []
        for run, result in self.results:
            shown.append(
                {
                    "run": run.label,
                    "steps": result["max_steps"],
                    "selected step": result["selected_step"],
                    "starts": result["num_starts"],
                    "minutes": minutes_of(result),
                    "command": code_span(result["command"]),
                }
            )
        return markdown_lines(pd.DataFrame(shown)) if shown else ["No run is finished."]


def unfinished_label(run: Run) -> str:
    """Return the label of an unfinished run, with the data files that changed since its result."""
    changed = run.changed_sources()
    return run.label + (f" (its data changed: {', '.join(changed)})" if changed else "")


def _refuse_other_data(results: Sequence[tuple[Run, dict[str, Any]]]) -> None:
    """Reject results of one task that were trained on different data.

    If the data are present, only their results count.

    Raises:
        ConfigError: results differ; the message names their files.
    """
    first: dict[str, tuple[Run, dict[str, Any]]] = {}
    for run, result in results:
        other, before = first.setdefault(run.data_key, (run, result))
        if changed := different_keys(before["sources"], result["sources"]):
            raise ConfigError(
                f"{run.label} and {other.label} were trained on different data (files: "
                f"{', '.join(changed)}), and the data are missing: set --data_dir to the folder of "
                f"the valid data, or remove {run.result_path} or {other.result_path}"
            )


def beside(ours: Sample, base: Sample, digits: int = 2) -> str:
    """Return the difference of a row from the baseline; * marks significant ones.

    Args:
        digits: number of decimals.
    """
    if ours is base:
        return "baseline"
    found = difference(ours, base)
    how = " " * bool(found.how) + found.how
    return f"{found.text(digits)}{how}{' *' if found.direction else ''}"


def _number(value: float | None, form: str) -> str:
    return "–" if pd.isna(value) else format(value, form)


def flat_result(run: Run, result: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of rows.csv for a finished run, which may belong to several tables."""
    hardware, git = result.get("hardware") or {}, result.get("git") or {}
    gpus = [gpu["name"] for gpu in hardware.get("gpus") or []]
    backends = result.get("backends") or {}
    on_gpu = any("(cuda" in call for call in backends)
    processor = f"{hardware.get('processor')}, {hardware.get('num_cores')} cores"
    packages = result.get("packages") or {}
    shown = ("torch", "lightning", "triton", "lit-probattn")
    versions = [f"{name} {packages[name]}" for name in shown if packages.get(name)]
    kept = (
        *("parameters", "macs", "macs_published_length", "num_test", "max_steps"),
        *("selected_step", "selected_on_test", "num_starts", "fit_seconds_of_last_start"),
    )
    return {
        **{"task": run.task.name, "row": run.row.name, "seed": run.seed},
        **{f"value {name}": value for name, value in result["values"].items()},
        **{key: result[key] for key in kept},
        "backends": "; ".join(f"{call}: {name}" for call, name in backends.items()),
        "device": gpus[0] if on_gpu and gpus else processor,
        "versions": ", ".join([f"python {result.get('python')}", *versions]),
        "git_revision": (git.get("revision") or "unknown")[:7] + ("+" if git.get("dirty") else ""),
        "run_folder": result["run_folder"],
        "command": result["command"],
    }
