"""Command line of `python -m profiling`; flags must be spelled out."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lit_probattn.base.allowed_code import add_flag
from lit_probattn.base.arguments import Parser
from lit_probattn.base.config_files import output_folder
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import refuse_to_replace
from lit_probattn.base.progress import leave_closed_output, prepare_streams
from lit_probattn.base.provenance import command_line
from lit_probattn.cli.shards import add_shard_flags, shard_of
from lit_probattn.experiments.page import FRONT, refuse_foreign_files, write_front_page
from profiling.kernels.command import add_arguments, refuse_flags_not_read, run
from profiling.kernels.config import load_kernels, narrowed
from profiling.sweep.config import load_sweep
from profiling.sweep.run import describe_plan, run_sweep

REPORTS = ("reports", "runs")  # committed reports, new results


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="python -m profiling",
        description="FLOPs, parameters, peak memory and time of attention variants, measured "
        "and compared with the papers' formulas.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sweep = commands.add_parser(
        "sweep", prog="lit-probattn sweep", help="measure every point of a grid"
    )
    sweep.add_argument("--config", required=True, help="name or file of configs/profiling")
    sweep.add_argument("--out", help="results folder (default runs/profiling/NAME)")
    add_shard_flags(sweep.add_argument)
    report = commands.add_parser(
        "report", prog="lit-probattn report", help="tables and figures of a sweep, or --index"
    )
    which = report.add_mutually_exclusive_group(required=True)
    which.add_argument("--config", help="sweep file")
    which.add_argument(
        "--index",
        nargs="*",
        metavar="FOLDER",
        help="write README.md of these folders instead: the findings of their reports (default: "
        "reports and runs)",
    )
    report.add_argument("--results", help="results folder (default runs/profiling/NAME)")
    report.add_argument("--out", help="report folder (default reports/NAME)")
    report.add_argument("--html", action="store_true", help="also write one self-contained page")
    kernels = commands.add_parser("kernels", help="compare backends after parity tests")
    add_arguments(kernels)
    for command, function in ((sweep, _sweep), (report, _report), (kernels, _kernels)):
        command.set_defaults(run=function)
        add_flag(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status, 141 if standard output is closed early."""
    prepare_streams()
    options = make_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # for example, `| head` has exited
        return leave_closed_output()
    except OSError as error:
        place = getattr(options, "out", None) if error.filename is None else error.filename
        text = (error.strerror or str(error)).lower()
        print(f"error: {place}: {text}" if place else f"error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; rerun the command to resume", file=sys.stderr)
        return 130


def _sweep(options: argparse.Namespace) -> int:
    config, root = load_sweep(options.config), Path.cwd()
    config.check_classes(root)
    index, count = shard_of(options)
    if options.dry_run:
        print(describe_plan(config, root, index, count))
        return 0
    folder = Path(options.out or f"runs/profiling/{config.name}")
    output_folder(folder)
    rows = run_sweep(config, folder, root, index=index, count=count)
    counts = Counter(status for status, _ in {(row.status, row.point_id) for row in rows})
    print(
        f"{folder}: {', '.join(f'{number} {status}' for status, number in sorted(counts.items()))}"
    )
    for reason, number in Counter(r.reason for r in rows if r.status == "failed").most_common(3):
        print(f"{number} failed: {reason}", file=sys.stderr)
    nothing = "failed" in counts and "ok" not in counts
    return 1 if "mismatch" in counts or nothing else 0


def _report(options: argparse.Namespace) -> int:
    if options.index is not None:
        return _index(options)
    from profiling.report.page import write_report

    config = load_sweep(options.config)
    out = Path(options.out or f"reports/{config.name}")
    results = Path(options.results or f"runs/profiling/{config.name}")
    refuse_foreign_files(out, "rows", "ratios", beside="sweep.json")
    written = write_report(config, results, out, html=options.html, command=command_line())
    print(*written, sep="\n")
    return 0


def _index(options: argparse.Namespace) -> int:
    from profiling.report.efficiency import efficiency_lines

    for name in ("results", "out", "html"):
        if getattr(options, name):
            raise ConfigError(f"--index does not support --{name}, which applies to one sweep")
    folders = [Path(name) for name in options.index or REPORTS]
    there = [folder for folder in folders if folder.is_dir()]
    refuse_to_replace(folder / FRONT for folder in there)
    command = shlex.join(["lit-probattn", "report", "--index", *options.index])
    for folder in (there if not options.index else folders) or folders:
        print(write_front_page(folder, command, efficiency_lines))
    return 0


def _kernels(options: argparse.Namespace) -> int:
    from profiling.kernels.speed import run_kernels

    refuse_flags_not_read(options)
    if options.out:
        refuse_foreign_files(Path(options.out), "rows")
    if options.config:
        names = options.dtypes and [str(dtype).removeprefix("torch.") for dtype in options.dtypes]
        config = narrowed(
            load_kernels(options.config),
            seq_lens=options.seq_lens,
            head_dims=options.head_dims,
            num_threads=options.threads,
            dtypes=names,
            cases=options.cases,
        )
        folder = None if options.out is None else Path(options.out)
        page, passed = run_kernels(config, Path.cwd(), folder, options.jobs)
    else:
        page, passed = run(options)
    print(page.summary(), end="")
    if options.out:
        page.write(Path(options.out))
    return 0 if passed else 1
