"""Compare attention variants on tasks with several seeds, in one resumable command.

    lit-probattn compare --task lra_listops --seeds 0 1 2 \\
        --attention softmax "smgk num_heads=4" hard_gfish

Tasks and variants are names listed by `lit-probattn list tasks` and `list attention`, or paths of
files. In quotes, KEY=VALUE after a variant sets its options, and a dotted key
(model.lr=0.001) sets any other setting. The first variant is the baseline. Each variant
is trained by `fit`, then its best checkpoint is evaluated by `test`. The report contains means and
deviations, paired differences with 95 % intervals, learning curves, parameters, operations, step
time and memory. Variants that differ in their data or number of steps are rejected; other
differences, such as dropout, are flagged.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_probattn.base.arguments import Parser
from lit_probattn.base.config_files import file_named, run_stem, shipped
from lit_probattn.base.errors import ConfigError, DataError, nearest, reports
from lit_probattn.compare.command import protocol_of, run
from lit_probattn.compare.flags import add_flags
from lit_probattn.compare.measured import MeasuredReport
from lit_probattn.compare.model import loss_unit
from lit_probattn.compare.protocol import (
    ATTENTION,
    ENTRY,
    STEPS,
    Options,
    attention_option,
    differing,
    run_config,
    setting,
)
from lit_probattn.compare.tables import Metric, Row, Table, TaskEntry
from lit_probattn.configs import (
    class_of,
    compose,
    flatten,
    parameters_of,
    parse_settings,
    takes_any_name,
)
from lit_probattn.records.figures import readable

SEEDS = (0, 1, 2)


# ---- table -----------------------------------------------------------------------------------


def make_table(
    tasks: Sequence[str],
    attention: Sequence[str],
    metrics: Sequence[str] = (),
    name: str | None = None,
) -> Table:
    """Return the table of a comparison; the first variant is the baseline.

    Args:
        tasks: names or files of tasks.
        attention: names or files of variants, each optionally followed by KEY=VALUE settings.
        metrics: names of test scores, such as `accuracy`; default: the score that selects the best
            checkpoint.
        name: name of the report.

    Raises:
        ConfigError: a name or key is unknown, or an argument is duplicate.
    """
    entries: dict[str, TaskEntry] = {}
    for given in tasks:
        config = _portable(file_named("task", given))
        entry = TaskEntry(run_stem(config), config, _metrics(config, metrics))
        if entry.name in entries:
            raise ConfigError(f"duplicate --task {entry.name}")
        entries[entry.name] = entry
    rows: dict[str, Row] = {}
    for given in attention:
        row = read_row(given)
        if row.name in rows:
            raise ConfigError(f"duplicate --attention {given!r}")
        rows[row.name] = row
    rows, shared = _without_shared(rows)
    rows = _told_apart(rows)
    title = f"{'; '.join(row.label for row in rows.values())}, on {' and '.join(entries)}"
    return Table(
        name=name or f"compare-{'-'.join(entries)}",
        title=title,
        seeds=SEEDS,
        published_runs=0,
        baseline=next(iter(rows)),
        tasks=entries,
        rows=rows,
        shared_options=shared,
    )


def _without_shared(rows: Mapping[str, Row]) -> tuple[dict[str, Row], str]:
    """Return the rows without the options that all of them show, and these options."""
    words = {name: re.split(r" (?=[\w.]+=)", row.method) for name, row in rows.items()}
    first, *others = words.values()
    shared = [word for word in first[1:] if others and all(word in one for one in others)]
    shorter = {
        name: replace(row, method=" ".join(w for w in words[name] if w not in shared))
        for name, row in rows.items()
    }
    return shorter, " ".join(shared)


def _told_apart(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows, with the file in labels that several of them have.

    Raises:
        ConfigError: two rows are one variant.
    """
    counts = Counter(readable(row.label) for row in rows.values())
    found: dict[str, Row] = {}
    for name, row in rows.items():
        if counts[readable(row.label)] > 1:
            row = replace(row, method=f"{row.method} ({row.attention})")
        if any(row.label == other.label for other in found.values()):
            raise ConfigError(f"duplicate --attention {row.label!r}")
        found[name] = row
    return found


def read_row(text: str) -> Row:
    """Return the row of `NAME [KEY=VALUE …]`.

    Raises:
        ConfigError: the name or a key is unknown, or a word is not KEY=VALUE.
    """
    try:
        name, *words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--attention {text!r}: expected NAME KEY=VALUE …") from error
    path = _portable(file_named("attention", name))
    given = parse_settings(words, f"--attention {text!r}")
    settings = {key if "." in key else f"{ATTENTION}.{key}": v for key, v in given.items()}
    of_attention = {key: v for key, v in settings.items() if key.startswith(f"{ATTENTION}.")}
    config = compose([path], of_attention)
    _check_options(text, config, [key for key in given if "." not in key])
    heads = attention_option(config, "num_heads")
    shown = [word for word in words if not word.startswith("num_heads=")]
    return Row(
        name=re.sub(r"[^\w.=-]+", "_", text.strip()),
        method=" ".join([run_stem(path), *shown]),
        heads="" if heads is None else str(heads),
        attention=path,
        overrides=settings,
    )


def _portable(path: str) -> str:
    """Return the path of a shipped file as `configs/…`, which is independent of the machine."""
    inside = Path(path).absolute()
    if inside.is_relative_to(shipped()):
        return str(Path("configs") / inside.relative_to(shipped()))
    return path


def _check_options(text: str, config: Mapping[str, Any], options: Sequence[str]) -> None:
    try:
        path = config["model"]["init_args"]["attention"]["class_path"]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"--attention {text!r}: the file does not set {ENTRY}") from error
    cls = class_of(path)
    known = parameters_of(cls)
    for key in options:
        if key not in known and not takes_any_name(cls):
            raise ConfigError(
                f"--attention {text!r}: {path} has no option {key!r}{nearest(key, known)}"
            )


def _metrics(config: str, names: Sequence[str]) -> dict[str, Metric]:
    content = compose([config], {})
    if "model.class_path" not in flatten(content):
        raise ConfigError(f"{config}: the file does not set model.class_path")
    monitor = setting(content, "run.monitor") or "val/accuracy"
    first = monitor.removeprefix("val/")
    if first.startswith("ppl_"):  # the test split can have another scoring mode
        first = "ppl_*"
    pattern = next((name for name in names if {*"*?["} & {*name}), None)
    if pattern is not None:  # it could match several scores, which is known only after the test
        raise ConfigError(
            f"--metric: expected the name of a score, received the pattern {pattern!r}"
        )
    found = {}
    for given in names or [first]:
        key = given.removeprefix("test/")
        name = key.removesuffix("_*")
        percent = name.startswith("accuracy")
        unit = "%" if percent else loss_unit(content) if name.endswith("loss") else "as logged"
        found[name] = Metric(
            name,
            "test",
            f"test/{key}",
            ("", ""),
            unit,
            100 if percent else 1,
        )
    return found


def refuse_unequal(table: Table, options: Options) -> None:
    """Reject rows that differ in their data or number of steps.

    Raises:
        ConfigError: rows differ in these settings.
    """
    for task in table.tasks.values():
        rows = {name: run_config(task, row, options) for name, row in table.rows.items()}
        unequal = [k for k in differing(rows) if k.startswith("data.") or k == STEPS]
        if unequal:
            raise ConfigError(
                f"{task.name}: the variants differ in {', '.join(unequal)}, so their scores are "
                "not comparable: use --set to set these for all"
            )


# ---- the command -----------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; flags must be spelled out."""
    parser = Parser("lit-probattn compare", __doc__)
    add = parser.add_argument_group("tasks and variants").add_argument
    add("--task", nargs="+", required=True, metavar="NAME", help="names or files of tasks")
    add(
        "--attention",
        nargs="+",
        required=True,
        metavar="NAME",
        help='names or files of variants, or "NAME KEY=VALUE …"; the first is the baseline',
    )
    add(
        "--metric",
        nargs="+",
        default=[],
        help="test scores (default: the score that selects checkpoints)",
    )
    add("--name", help="name of the report folder (default: compare-TASK)")
    add_flags(parser, seeds=" ".join(map(str, SEEDS)), out="RUNS/reproduce/reports/NAME")
    return parser


@reports(ConfigError, DataError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is that of `run` in `compare.command`, or 2 for misuse."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    for number, seed in enumerate(options.seeds or ()):
        if seed in options.seeds[:number]:
            raise ConfigError(f"--seeds: duplicate {seed}")
    if options.name is not None and Path(options.name).name != options.name:
        raise ConfigError(f"--name must be the name of a folder, received {options.name!r}")
    protocol = protocol_of(options)
    table = make_table(options.task, options.attention, options.metric, options.name)
    refuse_unequal(table, protocol)
    module = "lit_probattn compare"
    return run(table, options, arguments, module=module, protocol=protocol, report=MeasuredReport)


if __name__ == "__main__":
    sys.exit(main())
