"""Shared code of all studies: options, timing of all sides in one run, table, figure, report.

A study is a module of `examples/studies/`. Its `run` measures and returns a `Report`, and
`main = command(...)` prints it and, with `--out`, writes it.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from lit_probattn.analysis.drawing import CHEAPER, dot, label_rows, marker_legend
from lit_probattn.attention import recorded_choices
from lit_probattn.base import provenance
from lit_probattn.base.arguments import Parser, at_least
from lit_probattn.base.errors import ChildError, ConfigError, DataError
from lit_probattn.experiments.page import Made, Page, as_csv, image, refuse_foreign_files
from lit_probattn.measure.memory import peak_bytes
from lit_probattn.measure.timing import Side, round_ratios, spread, time_columns, time_sides
from lit_probattn.records.figures import ReportFigure, palette_of, panels
from lit_probattn.records.tables import markdown_lines, span


def add_seed(parser: argparse.ArgumentParser) -> None:
    """Add the seed of a study without timing."""
    parser.add_argument("--seed", type=int, default=0, help="seed of PyTorch's generator")


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Add the number of threads and of timed rounds."""
    add = parser.add_argument
    text = "CPU threads; 0: PyTorch's default; use 1 on a shared machine"
    add("--threads", type=int, default=0, help=text)
    add("--warmup", type=at_least(0), default=1, help="untimed rounds")
    add("--repeats", type=at_least(1), default=5, help="timed rounds")
    text = "start no new round after this time; at least 3 rounds run"
    add("--max_seconds", type=float, default=math.inf, help=text)


def add_timing(parser: argparse.ArgumentParser) -> None:
    """Add the seed, the device and the options of `add_rounds`."""
    add_seed(parser)
    parser.add_argument("--device", default="cpu", help="torch device")
    add_rounds(parser)


@dataclass(frozen=True)
class Report:
    """The result of a study.

    Args:
        tables: the tables to print, by caption.
        figure: columns (x, y, *groups) of a chart of `y` over the variants `x`, with quantiles.
            Ratios of a side to itself are not drawn.
        drawn_rows: rows of the figure; all by default.
        passed: False makes the exit status 1.
        finding: one sentence that summarises the result.
    """

    title: str
    rows: pd.DataFrame
    tables: Mapping[str, pd.DataFrame]
    notes: Sequence[str] = ()
    figure: tuple[str, ...] = ()
    drawn_rows: pd.DataFrame | None = None
    passed: bool = True
    finding: str = ""

    def page(self, facts: Mapping[str, str]) -> Page:
        """Return the page with the provenance of its rows (`provenance.facts`)."""
        body = [*(f"- {note}" for note in self.notes), *([""] if self.notes else [])]
        body += [f"Finding: {self.finding}", ""] if self.finding else []
        for caption, table in self.tables.items():
            body += [f"{caption}:", "", *markdown_lines(table), ""]
        figures, rows = self.figures(), self.rows.assign(**facts)
        tables = {"rows": as_csv(rows)}
        if any("_over_" in name for name in self.rows):
            kept = [n for n in self.rows if not n.endswith(("_s", "_bytes", "_repeats"))]
            tables["ratios"] = self.rows[kept].to_csv(index=False, float_format="%.4f")
        return Page(
            kind="study",
            title=self.title,
            made=Made.of(rows, command=facts["command"]),
            finding=self.finding,
            body=[*body, *(line for name in figures for line in (image(name), ""))],
            tables=tables,
            figures=figures,
        )

    def figures(self) -> dict[str, ReportFigure]:
        """Return the figure, if any; a study with another figure overrides `drawn`."""
        if not self.figure:
            return {}
        x, y, *groups = self.figure
        claim = self.finding.removesuffix(".") or self._claim(x, y, groups)
        caption = f"{heading(y).capitalize()} by {heading(x)}"
        caption += f" and {' and '.join(map(heading, groups))}" if groups else ""
        caption += f"; {CHEAPER}; the denominator has the same settings" if "_over_" in y else ""
        repeats = self.rows.get("time_repeats", pd.Series(dtype=float)).dropna().astype(int)
        if f"{y}_p20" in self.rows and len(repeats):
            counts = " or ".join(map(str, sorted(repeats.unique())))
            caption += f". Medians of n = {counts} rounds; error bars: 20 % and 80 % quantiles"
        return {y: ReportFigure(claim, f"{caption}.", self.drawn)}

    @property
    def _shown(self) -> pd.DataFrame:
        """The rows of the figure, without ratios of a side to itself."""
        rows = self.rows if self.drawn_rows is None else self.drawn_rows
        y = self.figure[1]
        if "_over_" not in y or f"{y}_p20" not in rows:
            return rows
        is_one = (rows[[y, f"{y}_p20", f"{y}_p80"]] == 1.0).all(axis=1)
        return rows[~is_one]

    def _claim(self, x: str, y: str, groups: Sequence[str]) -> str:
        """Return the smallest value per `x`, in ascending order."""
        told = []
        for name, part in self._shown.groupby(x, sort=False):
            told.append(f"{name} {span(part[y])}")
        what = heading(y) + (f" ({', '.join(map(heading, groups))})" if groups else "")
        return f"{what.capitalize()}: {'; '.join(told)}"

    def drawn(self) -> Any:
        """Return the figure: a dot with quantiles for each row, in the variant's colour."""
        x, y, *groups = self.figure
        rows = self._shown
        names = list(dict.fromkeys(rows[x]))
        colours = palette_of(map(str, names))
        keys = list(dict.fromkeys(rows[groups].itertuples(index=False, name=None)))
        figure, [[axis]] = panels(1, 1, 7.0, 1.6 + 0.25 * len(names) * max(1, len(keys)))
        for number, key in enumerate(keys):
            part = rows[(rows[groups] == list(key)).all(axis=1)] if groups else rows
            shift = 0.6 * ((number + 0.5) / len(keys) - 0.5)
            for row in part.to_dict("records"):
                ends = (row[f"{y}_p20"], row[f"{y}_p80"]) if f"{y}_p20" in row else None
                place = -names.index(row[x]) - shift
                style: dict[str, Any] = {"marker": _marker(number), "is_hollow": number > 0}
                dot(axis, row[y], place, ends, colour=colours[str(row[x])], **style)
        if "_over_" in y:
            axis.axvline(1.0, color="0.5", lw=0.8, ls=":")
            axis.set_xlim(left=0.0)
        else:
            axis.set_xscale("log")
        label_rows(axis, list(map(str, names)))
        axis.set_xlabel(heading(y) + (f" ({CHEAPER})" if "_over_" in y else ""))
        if groups:
            words = [", ".join(map(_told, groups, key)) for key in keys]
            marker_legend(figure, {w: _marker(n) for n, w in enumerate(words)}, words[1:])
        return figure


def _marker(number: int) -> str:
    return "oDsv^<>"[number % 7]


def _told(column: str, value: object) -> str:
    """Return a value with the name of its column, unless it is a string."""
    return str(value) if isinstance(value, str) else f"{heading(column)} {value:g}"


Run = Callable[[argparse.Namespace], Report]


def command(
    module: str,
    description: str | None,
    run: Run,
    add_options: Callable[[argparse.ArgumentParser], None],
) -> Callable[..., int]:
    """Return the `main` of a study, which accepts arguments and returns the exit status.

    Args:
        module: `__name__` of the study; if it is `__main__`, `main` runs now.
        description: description in its help text.
        run: function that returns the report.
        add_options: function that adds the options of the study to its parser.
    """
    is_program = module == "__main__"
    name = Path(sys.argv[0]).stem if is_program else module.rpartition(".")[2]
    start = ["python", "-m", f"examples.studies.{name}"]

    def main(arguments: Sequence[str] | None = None) -> int:
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        parser = Parser(" ".join(start), description)
        add_options(parser)
        parser.add_argument("--out", type=Path, help="report folder (default: print the report)")
        options = parser.parse_args(arguments)
        device = getattr(options, "device", "cpu")
        if getattr(options, "threads", 0):
            torch.set_num_threads(options.threads)
        torch.manual_seed(getattr(options, "seed", 0))
        try:
            if device.startswith("cuda") and not torch.cuda.is_available():
                raise ConfigError(f"--device {device}: no CUDA device is available")
            if options.out is not None:
                refuse_foreign_files(options.out, "rows", "ratios")
            report = run(options)
        except (ConfigError, DataError, ChildError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        facts = provenance.facts(shlex.join([*start, *arguments]), device)
        page = report.page(facts)
        print(page.summary(), end="")
        if options.out is not None:
            page.write(options.out)
            print(f"\nreport: {options.out / 'report.md'}")
        return 0 if report.passed else 1

    if is_program:
        sys.exit(main())
    return main


def measure_sides(
    sides: Mapping[Side, Callable[[], object]],
    options: argparse.Namespace,
    over: Callable[[Side], Mapping[str, Side]],
) -> dict[Side, dict[str, Any]]:
    """Time all sides in turns in one process, and measure the peak memory of one call of each.

    A side that exceeds the GPU's memory in its first warm-up is excluded: its column "failed" is
    set, and the others are NaN, as are ratios to it.

    Args:
        options: values of the options of `add_rounds`, and `device`.
        over: returns the baselines of a side by label.

    Returns:
        Columns by side: time, peak memory above resident memory, and for each label the ratios of
        time (within rounds) and of memory.
    """
    device = torch.device(options.device)
    limits = {name: getattr(options, name) for name in ("warmup", "repeats", "max_seconds")}
    if limits["warmup"]:
        limits["warmup"] -= 1
        fitting = {name: side for name, side in sides.items() if _fits(side)}
    else:
        fitting = dict(sides)
    times = time_sides(fitting, device=device, **limits)
    peaks = {name: peak_bytes(side, device) for name, side in fitting.items()}
    rows: dict[Side, dict[str, Any]] = {}
    for name, seconds in times.items():
        rows[name] = {**time_columns(seconds), "peak_memory_bytes": peaks[name]}
        for label, other in over(name).items():
            ratios = round_ratios(seconds, times.get(other, [math.nan] * len(seconds)))
            rows[name] |= spread(f"time_over_{label}", ratios)
            rows[name][f"memory_over_{label}"] = peaks[name] / peaks.get(other, math.nan)
    columns = dict.fromkeys((column for row in rows.values() for column in row), math.nan)
    return {name: rows.get(name, {**columns, "failed": "out of memory"}) for name in sides}


def _fits(side: Callable[[], object]) -> bool:
    """Run a side once; return whether it fits into the GPU's memory."""
    try:
        side()
    except torch.OutOfMemoryError:
        pass
    else:
        return True
    torch.cuda.empty_cache()  # the tensors of the call are released only here
    return False


def backend_of(side: Callable[[], object]) -> str:
    """Run a side once; return the backend of its last attention call."""
    side()
    return list(recorded_choices().values())[-1]


def heading(column: str) -> str:
    """Return the displayed name of a column."""
    return column.replace("_over_", " / ").replace("_", " ")


def shown(rows: pd.DataFrame, *cases: str) -> pd.DataFrame:
    """Format the rows for display: cases, median time, memory, ratios with quantiles.

    Unknown values are dashes.
    """
    table = rows[list(cases)].rename(columns=heading)
    for name in rows:
        if name.endswith("_bytes"):
            unit = f"{heading(name.removesuffix('_bytes'))}, MiB"
            table[unit] = (rows[name] / 2**20).map("{:.1f}".format)
        elif name == "time_median_s":
            table["median, s"] = rows[name]
        elif f"{name}_p20" in rows:
            parts = rows[[name, f"{name}_p20", f"{name}_p80"]].itertuples(index=False)
            table[f"{heading(name)} [p20, p80]"] = [
                f"{middle:.3f} [{low:.3f}, {high:.3f}]" for middle, low, high in parts
            ]
        elif name.startswith("memory_over_"):
            table[heading(name)] = rows[name].map("{:.3f}".format)
    return table.replace(["nan", "nan [nan, nan]"], "–")
