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
from lit_probattn.compare.tables import Part
from lit_probattn.experiments.page import refuse_foreign_files
from lit_probattn.reproduce import uea
from lit_probattn.reproduce.analyses.approximation import ApproximationTable
from lit_probattn.reproduce.analyses.report import AnalysisReport
from lit_probattn.reproduce.analyses.table import Analysis
from lit_probattn.reproduce.commands import DRAWING, missing_parts, trained_table
from lit_probattn.reproduce.figures.registry import figure_class
from lit_probattn.reproduce.figures.sweeps import SweepFigure
from lit_probattn.reproduce.head_size.experiment import HeadSizeReport
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
    if part["kind"] == "drawing":
        _refuse(options, given, "dry_run", "report", "runs", "out")
        print(f"{part.name}: {part['title']}: {DRAWING}")
        return 0
    if part["kind"] in ("sweep_figure", "sweep_table"):
        return _measure(options, arguments, part, given)
    return _train(options, arguments, part, given)


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


def _train(options: argparse.Namespace, arguments: Sequence[str], part: Part, given: Given) -> int:
    kind, place, protocol = part["kind"], place_of(options), _protocol(options)
    reports: dict[str, Callable[..., Report]] = {"uea": uea.UEAReport, "grid": HeadSizeReport}
    report = reports.get(kind, Report)
    if kind == "figure":
        figure = figure_class(part)
        report = partial(figure, part=part)
        if figure.has_reduced_runs:
            every = set(vars(options)) - {"as_published", "as_released", "max_seq_len"}
            _refuse(options, given, *every)
            report, protocol = partial(report, reduced=options.shortened), protocol_of(options)
    elif kind == "analysis":
        report = partial(AnalysisReport, analysis=Analysis(part))
    elif "studies" in part:
        report = partial(ApproximationTable, part=part)
    skipped: dict[str, str] = {}
    if kind == "uea":
        # The number of steps depends on the training files, so the tasks need the selection.
        path = part.folder / f"{part.name}.yaml"
        table, skipped = uea.make_table(
            path,
            place,
            archives=uea.archives_of(path, options.only),
            select_on="test" if options.as_published else "val",
        )
    else:
        table = trained_table(part, place, options.shortened)
    for name in missing_parts(table):
        print(f"missing part: {name}: its rows are skipped", file=sys.stderr)
    return run(
        table,
        options,
        arguments,
        module=MODULE,
        protocol=protocol,
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
