"""Make a table or figure: train its runs, make its studies or sweep, and write its report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.provenance import shown_command
from lit_probattn.compare.command import protocol_of, run
from lit_probattn.compare.flags import place_of
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.report import TABLES, Report
from lit_probattn.compare.tables import Part, read_table
from lit_probattn.experiments.page import refuse_foreign_files
from lit_probattn.reproduce import uea
from lit_probattn.reproduce.analyses.approximation import ApproximationTable
from lit_probattn.reproduce.analyses.report import AnalysisReport
from lit_probattn.reproduce.analyses.table import Analysis
from lit_probattn.reproduce.commands import DRAWING, missing_parts
from lit_probattn.reproduce.figures.registry import entry_of, figure_class
from lit_probattn.reproduce.figures.sweeps import SweepFigure
from lit_probattn.reproduce.head_size.experiment import HeadSizeReport
from lit_probattn.reproduce.head_size.grid import Grid
from lit_probattn.reproduce.sweep_table import table_of

MODULE = "lit_probattn.reproduce"
Given = Collection[str]


def make(options: argparse.Namespace, arguments: Sequence[str], part: Part, given: Given) -> int:
    """Make a table or figure.

    Args:
        options: the parsed flags.
        arguments: the command's arguments.
        part: the table or figure.
        given: names of the flags that differ from their defaults.

    Returns:
        See `lit_probattn.compare.command.run`.

    Raises:
        ConfigError: a flag does not apply, or is wrong.
    """
    if part["kind"] in ("fits", "uea", "grid"):
        return _train(options, arguments, part)
    if part["kind"] == "figure":
        return _draw(options, arguments, part, given)
    if part["kind"] == "analysis":
        return _study(options, arguments, part)
    if part["kind"] in ("sweep_figure", "sweep_table"):
        return _measure(options, arguments, part, given)
    _refuse(options, given, "dry_run", "report", "runs", "out")
    print(f"{part.name}: {part['title']}: {DRAWING}")
    return 0


def _draw(options: argparse.Namespace, arguments: Sequence[str], part: Part, given: Given) -> int:
    figure = figure_class(part)
    if figure.has_reduced_runs:
        every = set(vars(options)) - {"as_published", "as_released", "max_seq_len"}
        _refuse(options, given, *every)
    protocol = None if figure.has_reduced_runs else _protocol(options)
    table = entry_of(part).table(part, place_of(options), options.shortened)
    reduced = options.shortened and figure.has_reduced_runs
    made = partial(figure, part=part, reduced=reduced)
    return run(table, options, arguments, module=MODULE, protocol=protocol, report=made)


def _study(options: argparse.Namespace, arguments: Sequence[str], part: Part) -> int:
    analysis = Analysis(part)
    protocol = _protocol(options)
    report = partial(AnalysisReport, analysis=analysis)
    return run(analysis.table, options, arguments, module=MODULE, protocol=protocol, report=report)


def _measure(
    options: argparse.Namespace, arguments: Sequence[str], part: Part, given: Given
) -> int:
    is_table = part["kind"] == "sweep_table"
    _refuse(
        options, given, "dry_run", "report", "runs", "out", *(["accelerator"] if is_table else [])
    )
    command = f"python -m {MODULE} {shown_command(arguments)}"
    figure = SweepFigure(part, options.runs, command)
    if is_table:
        figure = table_of(part, options.runs, options.accelerator, command)
    out = options.out or options.runs / "reproduce" / "reports" / part.name
    refuse_foreign_files(out, *TABLES)
    if options.dry_run:
        print(figure.plan())
        return 0
    if not options.report:
        figure.run()
    print(f"{figure.write(out)}\n\nreport: {out}/report.md")
    return 0


def _refuse(options: argparse.Namespace, given: Collection[str], *taken: str) -> None:
    """Reject flags that do not apply to this kind of table.

    Raises:
        ConfigError: such a flag is set.
    """
    for name in given:
        if name not in (*taken, "table", "tables"):
            flag = f"--{'dry-run' if name == 'dry_run' else name}"
            raise ConfigError(f"{flag} does not apply to {options.table}")


def _train(options: argparse.Namespace, arguments: Sequence[str], part: Part) -> int:
    kind = part["kind"]
    path = part.folder / f"{part.name}.yaml"
    skipped: dict[str, str] = {}
    if kind == "uea":
        # The number of steps depends on the training files, so the tasks need the selection.
        table, skipped = uea.make_table(
            path,
            place_of(options),
            archives=uea.archives_of(path, options.only),
            select_on="test" if options.as_published else "val",
        )
    elif kind == "grid":
        table = Grid.read(path).table(part.name, place_of(options))
    else:
        table = read_table(part.name, part.folder)
    for name in missing_parts(table):
        print(f"missing part: {name}: its rows are skipped", file=sys.stderr)
    reports: dict[str, Callable[..., Report]] = {"uea": uea.UEAReport, "grid": HeadSizeReport}
    report = reports.get(kind, Report)
    if "studies" in part:
        report = partial(ApproximationTable, part=part)
    return run(
        table,
        options,
        arguments,
        module=MODULE,
        protocol=_protocol(options),
        report=report,
        skipped=skipped,
    )


def _protocol(options: argparse.Namespace) -> Options:
    return protocol_of(
        options,
        max_seq_len=options.max_seq_len,
        shortened=options.shortened,
        as_released=options.as_released,
        as_published=options.as_published,
    )
