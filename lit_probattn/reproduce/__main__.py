"""Reproduce a published table or figure: train its models and compare with published values.

    lit-probattn reproduce --list
    lit-probattn reproduce mgk_table1 --only listops --dry-run
    lit-probattn reproduce mgk_table1 --only listops softmax_8 'mgk_*' --seeds 4096 0 1 \\
        --accelerator gpu --trainer one_gpu --jobs 4

Each run (task, row, seed) is trained by `fit`, then `test` evaluates the best checkpoint. Finished
runs are never repeated, even for another table with the same model; to resume interrupted ones from
their newest checkpoint, rerun the command. Failed runs are retried after the others, and when the
command is rerun. The report is written after each run.

Array jobs: use --shard 0/8 … 7/8 with a common --runs folder, then once without --shard; or
--executor slurm --shards 8, which submits them and writes the report. Under torchrun, each process
runs a part of the runs on one GPU; --launch 'torchrun --nproc-per-node 8' uses all GPUs for each
run. --jobs N runs N at a time, on one GPU or distributed over those of --devices.

A table of studies (fish_table8) trains models or uses those of other tables, and runs its study on
each once. value_aware_table2 runs `approximate` on its trained models, and `approximate_compare` on
the rows of each seed.

A table of measured costs (mgk_table7) runs its sweep of `python -m profiling` and compares each
printed number with the measured one; --accelerator gpu selects the sweep for a GPU.

A figure is judged by the sentences of its paper about it. A figure of trained models (mgk_figure1,
mgk_figure2) is drawn from its runs and from studies, which run when all models are trained;
--shortened selects the reduced protocol, or smaller models (low_rank_figure1). A figure of costs
(mgk_figure3) runs its sweep of `python -m profiling`.

The published protocol is the default. The report lists the settings changed by --shortened,
--steps, --max_seq_len and --set.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError, DataError, nearest
from lit_probattn.base.progress import replace_unprintable
from lit_probattn.compare.cells import portable
from lit_probattn.compare.command import add_flags, place_of, protocol_of, run
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.report import Report, refuse_foreign_files
from lit_probattn.compare.tables import FOLDER, kinds, read_table
from lit_probattn.reproduce import uea
from lit_probattn.reproduce.analyses.approximation import ApproximationTable
from lit_probattn.reproduce.analyses.report import AnalysisReport
from lit_probattn.reproduce.analyses.table import Analysis
from lit_probattn.reproduce.commands import DRAWING, list_lines, missing_parts
from lit_probattn.reproduce.figures.cells import CellFigure
from lit_probattn.reproduce.figures.registry import figure_class
from lit_probattn.reproduce.figures.sweeps import SweepFigure
from lit_probattn.reproduce.sweep_table import table_of

MODULE = "lit_probattn.reproduce"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; flags must be spelled out."""
    parser = Parser("lit-probattn reproduce", __doc__)
    add = parser.add_argument
    add("table", nargs="?", help="table or figure, such as mgk_table1; --list prints all")
    add("--list", action="store_true", help="print all tables and figures with their state")
    add("--tables", type=Path, default=FOLDER, help="folder of the table files")
    add("--shortened", action="store_true", help="use the reduced protocol, or the reduced figure")
    add("--max_seq_len", type=int, help="length of sequences")
    add(
        "--as_published",
        action="store_true",
        help="published selection on test data, precision, padding",
    )
    add("--as_released", action="store_true", help="use attention as in the released code")
    add_flags(parser, accelerator=None)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        See `lit_probattn.compare.command.run`; 2 for misuse and for unavailable tables.
    """
    replace_unprintable()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    try:
        if options.list:
            print("\n".join(list_lines(place_of(options), options.tables)))
            return 0
        return _dispatch(options, arguments)
    except (ConfigError, DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _dispatch(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    known = kinds(options.tables)
    if options.table not in known:
        hint = nearest(options.table or "", known)
        raise ConfigError(f"expected a table, received {options.table!r}{hint}; see --list")
    part = known[options.table]
    if part["kind"] in ("fits", "uea"):
        return _train(options, arguments, part)
    if part["kind"] == "figure":
        return _draw(options, arguments, part)
    if part["kind"] == "analysis":
        return _study(options, arguments, part)
    if part["kind"] in ("sweep_figure", "sweep_table"):
        return _measure(options, arguments, part)
    _refuse(options, "dry_run", "report", "runs", "out")
    print(f"{options.table}: {part['title']}: {DRAWING}")
    return 0


def _draw(options: argparse.Namespace, arguments: Sequence[str], part: Mapping[str, Any]) -> int:
    figure, place = figure_class(options.table, part), place_of(options)
    if figure.has_reduced_cells:
        every = set(vars(options)) - {"as_published", "as_released", "max_seq_len"}
        _refuse(options, *every)
    protocol = None if figure.has_reduced_cells else _protocol(options)
    table = figure.table_of(options.table, part, options.tables, place, options.shortened)
    more = {"is_short": options.shortened} if issubclass(figure, CellFigure) else {}
    made = figure.for_part(part, options.shortened and figure.has_reduced_cells, **more)
    return run(table, options, arguments, module=MODULE, protocol=protocol, report=made)


def _study(options: argparse.Namespace, arguments: Sequence[str], part: Mapping[str, Any]) -> int:
    analysis = Analysis.read(options.table, part, options.tables)
    protocol = _protocol(options)
    report = partial(AnalysisReport, analysis=analysis)
    return run(analysis.table, options, arguments, module=MODULE, protocol=protocol, report=report)


def _measure(options: argparse.Namespace, arguments: Sequence[str], part: Mapping[str, Any]) -> int:
    is_table = part["kind"] == "sweep_table"
    _refuse(options, "dry_run", "report", "runs", "out", *(["accelerator"] if is_table else []))
    command = shlex.join([*f"python -m {MODULE}".split(), *portable(arguments)])
    figure = SweepFigure(options.table, part, options.runs, command)
    if is_table:
        place = (options.runs, options.accelerator)
        figure = table_of(options.table, part, *place, command, options.tables)
    out = options.out or options.runs / "reproduce" / "reports" / options.table
    refuse_foreign_files(out)
    if options.dry_run:
        print(figure.plan())
        return 0
    if not options.report:
        figure.run()
    print(f"{figure.write(out)}\n\nreport: {out}/report.md")
    return 0


def _refuse(options: argparse.Namespace, *taken: str) -> None:
    """Reject options that a table of this kind does not support.

    Raises:
        ConfigError: such an option is set.
    """
    defaults = vars(make_parser().parse_args([]))
    for name, value in vars(options).items():
        if name not in (*taken, "table", "tables") and value != defaults[name]:
            flag = f"--{'dry-run' if name == 'dry_run' else name}"
            raise ConfigError(f"{flag} does not apply to {options.table}")


def _train(options: argparse.Namespace, arguments: Sequence[str], part: Mapping[str, Any]) -> int:
    kind = part["kind"]
    path = options.tables / f"{options.table}.yaml"
    skipped: dict[str, str] = {}
    if kind == "uea":
        # The selection changes the training files, which determine the number of steps.
        table, skipped = uea.make_table(
            path,
            place_of(options),
            archives=uea.archives_of(path, options.only),
            select_on="test" if options.as_published else "val",
        )
    else:
        table = read_table(options.table, options.tables)
    for name in missing_parts(table):
        print(f"missing part: {name}: its rows are skipped", file=sys.stderr)
    report: Callable[..., Report] = uea.UEAReport if kind == "uea" else Report
    if "studies" in part:
        report = partial(ApproximationTable, part=part, is_short=options.shortened)
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


if __name__ == "__main__":
    sys.exit(main())
