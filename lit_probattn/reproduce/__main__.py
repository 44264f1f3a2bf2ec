"""Reproduce a published table: train its cells, write published beside reproduced.

    python -m lit_probattn.reproduce --list
    python -m lit_probattn.reproduce mgk_table1 --only listops --dry-run
    python -m lit_probattn.reproduce mgk_table1 --only listops softmax_8 'mgk_*' --seeds 4096 0 1 \\
        --accelerator gpu --trainer configs/trainer/one_gpu.yaml --jobs 4

Every cell (task, row, seed) is an ordinary run of the command line, `fit` and then `test` of the
best checkpoint. A finished cell is never run again, also not for another table that prints the same
model; an interrupted one goes on from its newest checkpoint: run the same command again. The report
is written after every cell, and by the same command at the end.

Array jobs: --shard 0/8 … 7/8 with one --runs folder, then once without. torchrun shares the cells
among its processes, one GPU each; --launch 'torchrun --nproc-per-node 8' gives every run all GPUs.
--jobs N runs N cells at a time, on one GPU or in turn on those of --devices.

The published protocol is the default. --shortened, --steps, --max_seq_len and --set make another
one, which the report says and compares setting by setting.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from datamodules.core.errors import DataError
from lit_probattn.cli.shards import parse_shard, torchrun_shard
from lit_probattn.compare.cells import Place, parse_settings, portable
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.tables import FOLDER, kinds, read_table
from lit_probattn.configs import ConfigError, nearest
from lit_probattn.reproduce.commands import (
    dry_run,
    list_lines,
    make_cells,
    missing_parts,
    other_lines,
    run_table,
)
from lit_probattn.reproduce.uea.__main__ import main as run_benchmark
from lit_probattn.reproduce.uea.recipes import Table as Benchmark

PROGRAM = "python -m lit_probattn.reproduce"
# Options that the command of the UEA archives takes.
_UEA = (
    *("only", "seeds", "shard", "dry_run", "as_published"),
    *("accelerator", "data_dir", "cache_dir", "runs", "out"),
)


def make_parser() -> argparse.ArgumentParser:
    """The command's flags; none is matched by a prefix."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("table", nargs="?", help="a table, such as mgk_table1; --list shows all")
    add("--list", action="store_true", help="print all tables with their state")
    add("--only", nargs="+", default=[], help="names of tasks and rows, `mgk_*` for several")
    add("--seeds", nargs="+", type=int, help="default: the table's")
    add("--shard", help="i/n: every n-th cell from i, for array jobs")
    add("--dry-run", action="store_true", help="predict time and memory, train nothing")
    add("--tflops", type=float, help="with --dry-run: time from operations at this speed, TFLOP/s")
    add("--commands", action="store_true", help="with --dry-run: print the command of every cell")
    protocol = parser.add_argument_group("another protocol (flagged in the report)")
    add = protocol.add_argument
    add("--shortened", action="store_true", help="the task's shortened protocol")
    add("--steps", type=int, help="optimiser steps; warm-up and schedule shrink with them")
    add("--max_seq_len", type=int, help="length of sequences")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all runs")
    add("--as_published", action="store_true", help="selection on test data, precision")
    add("--as_released", action="store_true", help="attention as the released code computes it")
    machine = parser.add_argument_group("where")
    add = machine.add_argument
    add("--trainer", help="file of configs/trainer")
    add("--accelerator", help="Lightning's name: cpu, gpu; default: the trainer file's")
    add("--jobs", type=int, default=1, help="cells at a time")
    add("--devices", default="", help="CUDA devices of the jobs in turn, such as 0,1,2,3")
    add("--launch", default="", help="words in place of `python`, such as torchrun with its flags")
    add("--flags", default="", help="further flags of every run that decide no number")
    add("--data_dir", help="folder of the data (or LIT_PROBATTN_DATA)")
    add("--cache_dir", help="folder of the caches (or LIT_PROBATTN_CACHE)")
    add("--tables", type=Path, default=FOLDER, help="folder of the table files")
    add("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    add("--out", type=Path, help="folder of the report; default runs/reproduce/reports/TABLE")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 if everything asked for is finished; 1 if a cell failed, is missing its data or runs
        elsewhere; 2 for wrong usage and for tables that are not made.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    try:
        if options.list:
            print("\n".join(list_lines(_place(options), options.tables)))
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
    if part["kind"] == "fits":
        return _fits(options, arguments)
    if part["kind"] == "uea":
        _refuse(options, *_UEA)
        return _uea(options)
    _refuse(options, "accelerator", "dry_run", "runs")
    print("\n".join(other_lines(options.table, part, _place(options), options.tables)))
    if part["kind"] == "sweep" and not options.dry_run:
        on_gpu = options.accelerator in ("gpu", "cuda")
        for command in part["commands" if on_gpu else "without_gpu"]:
            subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    return 0


def _refuse(options: argparse.Namespace, *taken: str) -> None:
    """Refuse options that a table of another kind does not take.

    Raises:
        ConfigError: one is given.
    """
    defaults = vars(make_parser().parse_args([]))
    for name, value in vars(options).items():
        if name not in (*taken, "table", "tables") and value != defaults[name]:
            flag = f"--{'dry-run' if name == 'dry_run' else name}"
            raise ConfigError(f"{flag} does not apply to {options.table}")


def _fits(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    table = read_table(options.table, options.tables)
    for name in missing_parts(table):
        print(f"missing part: {name}: its rows are left out", file=sys.stderr)
    if options.jobs < 1 or (options.steps or 1) < 1:
        raise ConfigError(f"--jobs and --steps must be at least 1: {options.jobs}, {options.steps}")
    protocol = Options(
        steps=options.steps,
        max_seq_len=options.max_seq_len,
        shortened=options.shortened,
        as_released=options.as_released,
        as_published=options.as_published,
        settings=parse_settings(options.set),
        trainer=options.trainer,
    )
    place, seeds = _place(options), options.seeds or table.seeds
    cells = make_cells(table, options.only, seeds, protocol, place)
    index, count = parse_shard(options.shard) if options.shard else torchrun_shard()
    mine = cells[index::count]
    if options.dry_run:
        return dry_run(mine, options.tflops, options.commands)
    command = shlex.join([*PROGRAM.split(), *portable(arguments)])
    out = options.out or options.runs / "reproduce" / "reports" / table.name
    return run_table(
        table,
        mine,
        cells,
        jobs=options.jobs,
        devices=_devices(options.devices),
        out=out if count == 1 else None,
        command=command,
    )


def _place(options: argparse.Namespace) -> Place:
    return Place(
        runs=options.runs,
        data_dir=options.data_dir,
        cache_dir=options.cache_dir,
        accelerator=options.accelerator,
        launch=tuple(shlex.split(options.launch)),
        flags=tuple(shlex.split(options.flags)),
    )


def _devices(text: str) -> list[str]:
    """CUDA devices: those given, or under torchrun this process's own."""
    if text:
        return text.split(",")
    return [os.environ["LOCAL_RANK"]] if "LOCAL_RANK" in os.environ else []


def _uea(options: argparse.Namespace) -> int:
    """Hand the table of the UEA archives to its own command."""
    given = Benchmark.read(str(options.tables / f"{options.table}.yaml"))
    own = [name for name in options.only if name in given.variants]
    archives = [name for name in options.only if name not in given.variants]
    more: list[str] = ["--runs", str(options.runs), "--table", given.path]
    for flag, values in (("--archives", archives), ("--variants", own), ("--seeds", options.seeds)):
        more += [flag, *map(str, values)] if values else []
    for flag in ("data_dir", "cache_dir", "accelerator", "out"):
        value = getattr(options, flag)
        more += [f"--{flag}", str(value)] if value is not None else []
    if options.shard:
        index, count = parse_shard(options.shard)
        more += ["--part", f"{index + 1}/{count}"]
    more += ["--select_on", "test"] if options.as_published else []
    more += ["--dry-run"] if options.dry_run else []
    print(f"$ python -m lit_probattn.uea_benchmark {shlex.join(more)}", flush=True)
    return run_benchmark(more)


if __name__ == "__main__":
    sys.exit(main())
