"""Shared code of commands that run a table: flags, dry runs, execution, report.

`compare`, `reproduce` and `reproduce.uea` build a table and call `run`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from lit_probattn.base.config_files import file_named, output_folder
from lit_probattn.base.errors import ConfigError, DataError, prefixed
from lit_probattn.base.progress import duration
from lit_probattn.base.provenance import shown_command
from lit_probattn.cli.app import check_arguments
from lit_probattn.cli.shards import shard_of
from lit_probattn.compare.flags import Place, place_of, without_executor
from lit_probattn.compare.model import (
    counts,
    missing_data,
    rows_of_step,
    step_bytes,
    step_operations,
)
from lit_probattn.compare.protocol import (
    Options,
    overrides,
    refuse_flags,
    refuse_reserved_in_files,
    refuse_settings,
    refuse_unknown_tasks,
    refuse_unlogged_metrics,
    setting,
    settings_of,
)
from lit_probattn.compare.report import TABLES, Report, unfinished_label
from lit_probattn.compare.runner import run_all
from lit_probattn.compare.runs import Run, share_of, with_starts
from lit_probattn.compare.tables import Table
from lit_probattn.configs import class_of, parse_settings
from lit_probattn.experiments.launch import submit
from lit_probattn.experiments.page import refuse_file, refuse_foreign_files
from lit_probattn.records.tables import markdown_lines
from lit_probattn.tasks.base import check_whole_steps
from lit_probattn.training.run_folder import RunSettings
from lit_probattn.training.saving import reject_worst

_PLAN = (
    "Multiply-adds of a forward pass, and predicted memory of a training step on one device "
    "with the CPU's backends; both exclude the output layer of a language model."
)
INTERRUPTED = 130  # exit status after Ctrl-C


def protocol_of(options: argparse.Namespace, **more: Any) -> Options:
    """Return the changes of the protocol that the flags set for all runs.

    Raises:
        ConfigError: --tflops is not positive, or a setting is not KEY=VALUE.
    """
    if options.tflops is not None and not 0 < options.tflops < float("inf"):
        raise ConfigError(f"--tflops must be above 0, received {options.tflops:g}")
    settings = parse_settings([*(f"data.{text}" for text in options.data), *options.set])
    trainer = options.trainer and file_named("trainer", options.trainer)
    return Options(
        steps=options.steps,
        settings=settings,
        trainer=trainer,
        start_seed=options.start_seed,
        **more,
    )


def make_runs(
    table: Table, only: Sequence[str], seeds: Sequence[int], options: Options, place: Place
) -> list[Run]:
    """Return the selected runs of a table, ordered by seed.

    Starts come first and have the seed `options.start_seed`.

    Raises:
        ConfigError: `only` selects no run.
    """
    there = table.present(only)
    starts = {part.name for task, _ in there for part in task.chain()[:-1]}
    common = options.start_seed
    return with_starts(
        Run(task, row, seed, options, place)
        for seed in seeds
        for task, row in there
        if common in (None, seed) or task.name not in starts
    )


def run(
    table: Table,
    options: argparse.Namespace,
    arguments: Sequence[str],
    *,
    module: str,
    protocol: Options | None = None,
    report: Callable[[Table, Sequence[Run], str], Report] = Report,
    skipped: Mapping[str, str] | None = None,
) -> int:
    """Train, plan or report the runs of a table according to the flags.

    Args:
        table: the table.
        options: the parsed flags.
        arguments: the arguments of the command line.
        module: the command's module, optionally followed by subcommands.
        protocol: changes of the protocol; None means those of the flags.
        report: builds the command's report from table, runs and command.
        skipped: tasks that cannot be built, and the reasons.

    Returns:
        0 if all selected runs are finished, and after a dry run; 1 if a run failed, lacks its data
        or is running in another process; 130 after an interrupt.

    Raises:
        ConfigError: a flag is invalid.
    """
    protocol, skipped = protocol or protocol_of(options), skipped or {}
    if options.executor == "here" and (options.shards > 1 or options.slurm):
        raise ConfigError("--shards and --slurm require --executor slurm, local or debug")
    parameters = parse_settings(options.slurm, "--slurm")
    place = place_of(options)
    seeds = options.seeds or table.seeds
    refuse_unknown_tasks((p.name for t in table.tasks.values() for p in t.chain()), protocol)
    runs = make_runs(table, options.only, seeds, protocol, place)
    check_runs(runs)
    if options.start_seed is not None and not any(run.start for run in runs):
        raise ConfigError(f"--start_seed: no run of {table.name} starts from another run")
    index, count = shard_of(options)
    mine = share_of(runs, index, count)
    command = f"python -m {module} {shown_command(arguments)}"
    out = options.out or options.runs / "reproduce" / "reports" / table.name
    refuse_foreign_files(out, *TABLES)
    refuse_file(options.runs, "--runs")
    made = report(table, runs, command)
    if options.dry_run:
        dry_run(mine, options.tflops, options.commands, skipped)
        for line in made.plan(mine, options.commands):
            print(line)
        return 0
    try:
        if options.executor != "here" and not options.report:
            _submit(options, arguments, module, parameters)
        elif not options.report:
            return _run_all(made, mine, options, out if count == 1 else None, skipped)
    except KeyboardInterrupt:
        done = sum(run.result() is not None for run in mine)
        told = f"interrupted: {done} of {len(mine)} runs are finished; rerun the command to resume"
        if options.executor == "slurm":
            told += "; its jobs continue, and --report writes the report"
        print(told, file=sys.stderr)
        return INTERRUPTED
    if not made.has_numbers:
        changed = [unfinished_label(run) for run in runs if run.changed_sources()]
        why = f"; {'; '.join(changed)}" if changed else ""
        raise ConfigError(f"no run of {table.name} is finished: nothing to report{why}")
    print(f"{made.write(out)}\n\nreport: {out}/report.md")
    return 0 if len(made.results) == len(runs) and not skipped else 1


def check_runs(runs: Sequence[Run]) -> None:
    """Validate metrics, settings and flags before the first run.

    Command lines with user settings are parsed once per task, set of keys, and row with settings.

    Raises:
        ConfigError: a metric is not logged, the number of steps is not set, or a key is unknown,
            set by the command, or affects results although it must not.
    """
    if not runs:
        return
    options, place = runs[0].options, runs[0].place
    refuse_settings(options, place.settings)
    refuse_flags(place.flags, [run.task for run in runs])
    if place.launch and shutil.which(place.launch[0]) is None:
        raise ConfigError(f"--launch: program {place.launch[0]!r} not found")
    refuse_reserved_in_files([(run.task, run.row) for run in runs], options)
    parsed = set()
    for run in runs:
        _ = run.max_steps  # raises if it is not set
        keys = frozenset(overrides(run.task, run.row, options))
        own = json.dumps(dict(run.row.overrides), sort_keys=True)
        kind = run.task.name, run.config["model"]["class_path"], keys, own
        if kind in parsed:
            continue
        parsed.add(kind)
        refuse_unlogged_metrics(run.task, run.config)
        _check_selection(run)
        _check_validations(run)
        if options.settings or options.trainer or place.flags or run.row.overrides:
            with prefixed(f"{run.task.name}, {run.row.label}", ConfigError):
                check_arguments(run.fit_arguments(run.name))


def _check_selection(run: Run) -> None:
    """Raise if a run would select its worst checkpoint."""
    logged = getattr(class_of(run.config["model"]["class_path"]), "logged", ())
    monitor = setting(run.config, "run.monitor") or RunSettings.monitor
    mode = setting(run.config, "run.monitor_mode") or RunSettings.monitor_mode
    with prefixed(run.task.name, ValueError):
        reject_worst("run.monitor_mode", monitor, mode, logged)


def _check_validations(run: Run) -> None:
    """Raise if a run would validate in the middle of an optimiser step."""
    names = ("limit_val_batches", "val_check_interval", "accumulate_grad_batches")
    limit, interval, parts = (setting(run.config, f"trainer.{name}") for name in names)
    if limit == 0 or not isinstance(parts, int) or parts < 1:
        return
    with prefixed(run.task.name, ValueError):
        check_whole_steps("val_check_interval", interval, parts)


def _submit(
    options: argparse.Namespace,
    arguments: Sequence[str],
    module: str,
    parameters: Mapping[str, Any],
) -> None:
    """Run the command as an array of shards; failed ones leave unfinished runs."""
    if options.shard:
        raise ConfigError("--executor creates the shards: remove --shard")
    name, *words = module.split()
    submit(
        name,
        [*words, *without_executor(arguments)],
        executor=options.executor,
        count=options.shards,
        folder=options.runs / "reproduce" / "submitit",
        parameters=parameters,
    )


# ---- data and predictions ----------------------------------------------------------------------


def missing_by_task(runs: Iterable[Run]) -> dict[str, str]:
    """Return the reasons why data cannot be read, by task."""
    reasons: dict[str, str | None] = {}
    found: dict[str, str] = {}
    for run in runs:
        key = run.data_key
        if key not in reasons:
            try:
                reasons[key] = missing_data(run.data())
            except DataError as error:
                reasons[key] = str(error)
        reason = reasons[key]
        if reason is not None:
            found[run.task.name] = reason
    return found


def dry_run(
    runs: Sequence[Run], tflops: float | None, commands: bool, skipped: Mapping[str, str]
) -> None:
    """Print the runs, their predicted cost, and missing data, without training.

    Args:
        runs: the runs.
        tflops: speed for the prediction of training times; None omits times.
        commands: whether to print commands.
        skipped: tasks that cannot be built, and the reasons.
    """
    missing = missing_by_task(runs)
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task.name, run.row.name), []).append(run)
    plan = []
    for group in groups.values():
        try:
            plan.append(plan_of(group, tflops, missing))
        except DataError as error:  # sizes that are known only from the data
            missing.setdefault(group[0].task.name, str(error))
    if plan:
        print("\n".join([*markdown_lines(pd.DataFrame(plan)), "", _PLAN]))
    for name, reason in {**missing, **skipped}.items():
        print(f"missing: {_named(name, reason)}")
    if commands:
        for run in runs:
            print(shlex.join(["python", "-m", "lit_probattn", *run.fit_arguments()]))


def _named(task: str, reason: str) -> str:
    return reason if reason.startswith(f"{task}:") else f"{task}: {reason}"


def plan_of(
    group: Sequence[Run], tflops: float | None, missing: Mapping[str, str]
) -> dict[str, str]:
    """Return a row of the plan for runs that differ only in their seeds.

    Args:
        group: the runs.
        tflops: speed for the prediction of the training time; None omits it.
        missing: reasons for missing data, by task.

    Raises:
        DataError: the model's sizes depend on data that are missing.
    """
    run = group[0]
    counted, batch = counts(run), rows_of_step(run.config)
    left = [run for run in group if run.result() is None]
    changed = sorted({name for run in left for name in run.changed_sources()})
    data = "missing" if run.task.name in missing else "present"
    found = {
        "task": run.task.name,
        "method": run.row.label,
        "steps": str(run.max_steps),
        "batch": str(batch),
        "parameters": f"{counted['parameters']:,}",
        "MACs per sample, M": f"{counted['macs'] / 1e6:,.0f}",
        "memory of a step, MiB": f"{step_bytes(run) / 2**20:,.0f}",
        "runs left": f"{len(left)} of {len(group)}",
        "data": f"changed: {', '.join(changed)}" if changed else data,
    }
    if tflops is not None:
        operations = run.max_steps * step_operations(run, counted["macs"])
        found["training time"] = duration(operations / (tflops * 1e12))
    return found


# ---- running -----------------------------------------------------------------------------------


class Counted:
    """Adds counts of model and data to a result; equal runs are counted once."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._tests: dict[str, int] = {}

    def prepare(self, runs: Sequence[Run]) -> dict[str, str]:
        """Build the caches of the runs' data; return the reasons of failures by task."""
        failed: dict[str, str] = {}
        for run in with_starts(runs):
            key = run.data_key
            if key in self._tests or run.task.name in failed:
                continue
            if run.start is not None and run.start.task.name in failed:
                start = run.start.task.name
                failed[run.task.name] = f"it starts from {start}, whose data cannot be read"
                continue
            try:
                data = run.data()
                data.setup()
            except DataError as error:
                failed[run.task.name] = str(error)
                continue
            self._tests[key] = len(data.split("test"))
        return failed

    def __call__(self, run: Run) -> dict[str, Any]:
        """Return parameters, multiply-adds here and at published length, size of the test split."""
        named = settings_of(run.task.name, run.options).items()
        shorter = {*run.task.length, *run.task.shortened}
        reading = {k: v for k, v in named if k.startswith("data.") and k not in shorter}
        published = replace(run, options=Options(settings=reading))
        return {
            **self._count(run),
            "macs_published_length": self._count(published)["macs"],
            "num_test": self._tests.get(run.data_key),
        }

    def _count(self, run: Run) -> dict[str, int]:
        key = json.dumps(run.config, sort_keys=True)
        if key not in self._counts:
            self._counts[key] = counts(run)
        return self._counts[key]


def _run_all(
    report: Report,
    mine: Sequence[Run],
    options: argparse.Namespace,
    out: Path | None,
    skipped: Mapping[str, str],
) -> int:
    """Train and evaluate the runs and write the report after each, except in one of several shards.

    Raises:
        ConfigError: the flags require a GPU and none is available.
    """
    if options.accelerator in ("gpu", "cuda") and not torch.accelerator.is_available():
        raise ConfigError(
            f"--accelerator {options.accelerator}: no GPU is available; use --accelerator cpu, or "
            "see `lit-probattn --version --verbose`"
        )
    if out is not None:
        output_folder(out)  # before training starts
    counted = Counted()
    failed = counted.prepare([run for run in mine if run.result() is None])
    without = {**skipped, **failed}
    for name, reason in without.items():
        print(f"skipped: {_named(name, reason)}", file=sys.stderr, flush=True)

    def write() -> str:
        made = replace(report)  # results are read again
        return made.write(out) if out is not None and made.has_numbers else ""

    devices = options.devices.split(",") if options.devices else []
    if not devices and "LOCAL_RANK" in os.environ:  # the device of this process under torchrun
        devices = [os.environ["LOCAL_RANK"]]
    there = [run for run in mine if run.task.name not in failed]
    outcome = run_all(
        there,
        counted,
        options.jobs,
        devices,
        options.attempts,
        after=write if report.after_every_run else lambda: None,
    )
    outcome.failed |= report.complete(there, options.jobs, devices)
    text = write()
    if text:
        print(f"\n{text}\n\nreport: {out}/report.md")
    for label, reason in outcome.failed.items():
        print(f"failed: {label}: {reason}", file=sys.stderr)
    skips = f"{len(outcome.skipped)} skipped, " if outcome.skipped else ""
    print(
        f"{len(outcome.finished)} of {len(mine)} runs finished ({outcome.ran} new); "
        f"{len(outcome.failed)} failed, {len(outcome.elsewhere)} in other processes, "
        f"{skips}{len(without)} tasks without data",
        flush=True,
    )
    whole = len(outcome.finished) == len(mine) and not outcome.failed
    return 0 if whole and not skipped else 1
