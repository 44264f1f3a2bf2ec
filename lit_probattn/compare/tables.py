"""The files of configs/reproduce: tables, rows, tasks, published values."""

from __future__ import annotations

import csv
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from lit_probattn.base.config_files import files_in, find, is_there
from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.configs import read_yaml
from lit_probattn.experiments.expectations import digits_of

FOLDER = Path("configs/reproduce")
# Name of the column with the mean over the tasks.
AVERAGE = "average"
_OF_LOSSES = ("nats", "squared error")

Record = TypeVar("Record")
Kind = Literal[
    "fits", "uea", "grid", "figure", "sweep_figure", "sweep_table", "analysis", "drawing"
]


@dataclass(frozen=True)
class Metric:
    """A compared number.

    Args:
        command: `test` or `validate`, whose report contains `key`; `count` for counts of the model;
            `study` for results of a study of the trained run.
        key: name in the command's report, or `parameters` or `macs`; a pattern, such as
            `test/ppl_*`, is the only name that it matches.
        scale: factor from the report to the printed unit.
        flags: settings of the command.
        printed: metric and split in published.csv.
    """

    name: str
    command: Literal["test", "validate", "count", "study"]
    key: str
    printed: Sequence[str]
    unit: str
    scale: float = 1.0
    flags: Mapping[str, Any] = field(default_factory=dict)

    def value(self, report: Mapping[str, Any]) -> float:
        """Return the number in the printed unit.

        Raises:
            KeyError: the report does not contain it.
        """
        return self.scale * float(report[self.key_in(report)])

    def key_in(self, report: Mapping[str, Any]) -> str:
        """Return the name in a report; the key if the report has no or several such names."""
        found = fnmatch.filter(report, self.key)
        return found[0] if len(found) == 1 else self.key


@dataclass(frozen=True)
class TaskEntry:
    """A task of the tables.

    Args:
        config: task file.
        metrics: metrics by name; the first one is drawn.
        settings: settings of all its runs, overriding the task file.
        published: settings of the published runs that differ from the task file.
        not_in_config: properties of the published runs that no setting reproduces.
        length: settings of --max_seq_len: factors of that length, or texts.
        shortened: settings of --shortened.
        sizes: published sizes of the data, if they are otherwise read from the files.
        as_released: settings used with attention as in the released code.
        checkpoint: the evaluated checkpoint: `best`, `last`, or `average-10`, the mean of the ten
            newest.
        files: SHA-256 of the data files, if they are part of the run's identity.
        starts_from: name of a task; runs start from its trained model of the same row.
        start: entry of that task.
        shortened_alone: whether it starts from random weights with --shortened.
    """

    name: str
    config: str
    metrics: dict[str, Metric]
    settings: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    not_in_config: Sequence[str] = ()
    length: Mapping[str, float | str] = field(default_factory=dict)
    shortened: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    as_released: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str = "best"
    files: Mapping[str, str] = field(default_factory=dict)
    starts_from: str | None = None
    start: TaskEntry | None = None
    shortened_alone: bool = False

    def chain(self) -> list[TaskEntry]:
        """Return its chain of starts, the first one first, and itself."""
        return [*(self.start.chain() if self.start else ()), self]


@dataclass(frozen=True)
class Row:
    """A row of a table: an attention variant.

    Args:
        name: name in the table file.
        method: method as printed.
        heads: heads as printed; may be empty.
        attention: file of configs/attention.
        set: arguments of the attention.
        overrides: other settings.
        as_released: file of the attention as in the released code, or None.
        published: published values by task and metric.
        spread: published values after ±, by task and metric.
        shortened: further settings of --shortened, such as smaller sizes.
        not_in_config: properties of the published row that no setting reproduces.
    """

    name: str
    method: str
    heads: str
    attention: str
    set: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    as_released: str | None = None
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    spread: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    shortened: Mapping[str, Any] = field(default_factory=dict)
    not_in_config: Sequence[str] = ()

    @property
    def label(self) -> str:
        """Method and heads as printed."""
        if not self.heads:
            return self.method
        return f"{self.method}, {self.heads} head{'' if self.heads == '1' else 's'}"


@dataclass(frozen=True)
class Trend:
    """A trend of a table: scores that rise or fall with a property of the rows.

    Args:
        over: the property.
        rows: its value by row.
        says: the direction according to the paper, `rises` or `falls`.
        tasks: tasks of the claim; empty means all with printed numbers.
    """

    over: str
    rows: Mapping[str, float]
    says: Literal["rises", "falls"]
    tasks: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """A table of runs.

    Args:
        title: title in one line.
        seeds: default seeds.
        published_runs: number of runs of a published mean; 0 without published values.
        baseline: row with which the others are compared.
        tasks: by name, in printed order.
        rows: by name, in printed order.
        baselines: baselines by task, overriding `baseline`.
        trends: trends of its rows.
        shared_options: options of attention that all rows set and no label repeats.
    """

    name: str
    title: str
    seeds: Sequence[int]
    published_runs: int
    baseline: str
    tasks: dict[str, TaskEntry]
    rows: dict[str, Row]
    baselines: Mapping[str, str] = field(default_factory=dict)
    trends: Sequence[Trend] = ()
    shared_options: str = ""

    def baseline_of(self, task: str) -> str:
        """Return the baseline of a task."""
        return self.baselines.get(task, self.baseline)

    def digits(self, metric: str) -> int:
        """Return the number of decimals of the printed values of a metric, on any task."""
        values = (found for row in self.rows.values() for found in row.published.values())
        printed = (one[metric] for one in values if metric in one)
        return max((digits_of(f"{value:.12g}") for value in printed), default=0)

    def pairs(self) -> list[tuple[TaskEntry, Row]]:
        """Pairs of task and row of the table; a row without published values has all tasks."""
        return [
            (task, row)
            for task in self.tasks.values()
            for row in self.rows.values()
            if task.name in row.published or not row.published
        ]

    def select(self, only: Sequence[str]) -> list[tuple[TaskEntry, Row]]:
        """Return the selected pairs of task and row.

        Args:
            only: names or patterns (`mgk_*`) of tasks and rows; without tasks or rows all of them.

        Raises:
            ConfigError: a name is unknown.
        """
        rows, tasks = set(self.rows), set(self.tasks)
        named_tasks: set[str] = set()
        named_rows: set[str] = set()
        for name in only:
            found_tasks, found_rows = (set(fnmatch.filter(found, name)) for found in (tasks, rows))
            if not found_tasks and not found_rows:
                hint = nearest(name, [*tasks, *rows])
                raise ConfigError(f"{self.name} has no task or row {name!r}{hint}")
            named_tasks |= found_tasks
            named_rows |= found_rows
        return [
            (task, row)
            for task, row in self.pairs()
            if task.name in (named_tasks or tasks) and row.name in (named_rows or rows)
        ]

    def present(self, only: Sequence[str] = ()) -> list[tuple[TaskEntry, Row]]:
        """Return the pairs of `select` whose task and attention files exist."""
        return [
            (task, row)
            for task, row in self.select(only)
            if is_there(row.attention) and is_there(task.config)
        ]

    @property
    def num_runs(self) -> int:
        """Number of runs over all seeds of the table, including the runs that others start from."""
        found = {(part.name, row.name) for task, row in self.present() for part in task.chain()}
        return len(found) * len(set(self.seeds))


def check_keys(
    where: str,
    entry: Mapping[str, Any],
    required: Sequence[str],
    optional: Sequence[str] | None = None,
) -> None:
    """Reject an entry with an unknown or missing key; `optional` None allows any other key.

    Raises:
        ConfigError: there is such a key.
    """
    known = (*required, *(optional or ()))
    for key in entry if optional is not None else ():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, known)}")
    for key in required:
        if key not in entry:
            raise ConfigError(f"{where} does not set {key}")


def record(kind: type[Record], where: str, entry: Mapping[str, Any], **others: Any) -> Record:
    """Return an entry as a dataclass whose fields are the keys, except for the fields `others`.

    Raises:
        ConfigError: a key is unknown or missing.
    """
    dataclass_type: Any = kind
    own = {one.name: one for one in fields(dataclass_type) if one.name not in others}
    required = [n for n, one in own.items() if one.default is one.default_factory is MISSING]
    check_keys(where, entry, required, [*own])
    return kind(**entry, **others)


def read_tasks(folder: Path = FOLDER) -> dict[str, TaskEntry]:
    """Read tasks.yaml.

    Raises:
        ConfigError: the file or a part of it is missing, a key is unknown, or a task starts from an
            unknown task or from itself.
    """
    tasks: dict[str, TaskEntry] = {}
    for name, part in read_yaml(folder / "tasks.yaml").items():
        where = f"{folder / 'tasks.yaml'}: task {name}"
        task = record(TaskEntry, where, part, name=name, start=None)
        metrics = {
            key: record(Metric, f"{where}: metric {key}", entry, name=key)
            for key, entry in part["metrics"].items()
        }
        tasks[name] = replace(task, metrics=metrics)
    return {name: _with_start(task, tasks, folder) for name, task in tasks.items()}


def _with_start(
    task: TaskEntry, tasks: Mapping[str, TaskEntry], folder: Path, before: Sequence[str] = ()
) -> TaskEntry:
    """Return a task with the entry of its start."""
    if task.starts_from is None:
        return task
    path, chain = folder / "tasks.yaml", [*before, task.name]
    if task.starts_from in chain:
        words = " -> ".join([*chain, task.starts_from])
        raise ConfigError(f"{path}: starts_from is circular: {words}")
    if task.starts_from not in tasks:
        hint = nearest(task.starts_from, tasks)
        raise ConfigError(
            f"{path}: {task.name} starts_from the unknown task {task.starts_from!r}{hint}"
        )
    return replace(task, start=_with_start(tasks[task.starts_from], tasks, folder, chain))


def read_table(name: str, folder: Path = FOLDER) -> Table:
    """Read a table of runs.

    Raises:
        ConfigError: the file, a part of it, or a task is missing, or a key is unknown.
    """
    path = folder / f"{name}.yaml"
    content = read_yaml(path)
    required = ("title", "tasks", "seeds", "published_runs", "baseline", "rows")
    check_keys(str(path), content, required)
    known = read_tasks(folder)
    missing = [task for task in content["tasks"] if task not in known]
    if missing:
        raise ConfigError(
            f"{path}: unknown task {missing[0]}: {folder / 'tasks.yaml'} has no entry"
        )
    tasks = {task: known[task] for task in content["tasks"]}
    rows = {
        key: _row(f"{path}: row {key}", key, part, tasks) for key, part in content["rows"].items()
    }
    baselines = content.get("baselines", {})
    strange = [task for task in baselines if task not in tasks]
    if strange:
        raise ConfigError(
            f"{path}: baselines: unknown task {strange[0]}; tasks: {', '.join(tasks)}"
        )
    for row in (content["baseline"], *baselines.values()):
        if row not in rows:
            raise ConfigError(f"{path}: unknown baseline {row}; rows: {', '.join(rows)}")
    trends = [_trend(part, tasks, rows, path) for part in content.get("trends", [])]
    chosen = {key: content[key] for key in ("title", "seeds", "published_runs", "baseline")}
    return Table(name, tasks=tasks, rows=rows, baselines=baselines, trends=trends, **chosen)


def _trend(
    part: Mapping[str, Any], tasks: Mapping[str, TaskEntry], rows: Mapping[str, Row], path: Path
) -> Trend:
    found = record(Trend, f"{path}: trends", part)
    for kind, names, known in (("row", found.rows, rows), ("task", found.tasks, tasks)):
        strange = [name for name in names if name not in known]
        if strange:
            raise ConfigError(
                f"{path}: trends: unknown {kind} {strange[0]}; {kind}s: {', '.join(known)}"
            )
    if found.says not in ("rises", "falls"):
        raise ConfigError(f"{path}: trends: says must be rises or falls, received {found.says!r}")
    return found


def _row(where: str, name: str, part: Mapping[str, Any], tasks: Mapping[str, TaskEntry]) -> Row:
    published: dict[str, dict[str, float]] = {}
    for task, value in part.get("published", {}).items():
        if not isinstance(value, Mapping):
            first = next(iter(tasks.values())) if task == AVERAGE else tasks[task]
            value = {next(iter(first.metrics)): value}
        published[task] = {key: float(number) for key, number in value.items()}
    return record(Row, where, {**part, "published": published}, name=name)


def decimals_of(unit: str) -> int:
    """Return the decimals of a score in reports: losses, which are small, have four."""
    return 4 if unit in _OF_LOSSES else 2


class Part(dict[str, Any]):
    """The content of the file of a published table or figure: `title`, `kind` and other keys.

    Args:
        name: name of the table or figure, and of the file.
        folder: folder of the file, of the tables that it names, of tasks, and of printed numbers.
        content: the content.
    """

    def __init__(self, name: str, folder: Path, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.name, self.folder = name, folder


def kinds(folder: Path = FOLDER) -> dict[str, Part]:
    """Return all published tables and figures, by name."""
    contents = {path.stem: read_yaml(path) for path in files_in(folder).values()}
    found = {name: content for name, content in contents.items() if "kind" in content}
    return {name: Part(name, folder, found[name]) for name in sorted(found, key=_natural)}


def _natural(name: str) -> tuple[str, int, str]:
    head, word, tail = name.rpartition("table" if "table" in name else "figure")
    head += word
    digits = "".join(c for c in tail if c.isdecimal())
    return (head, int(digits), tail) if head and digits else (name, 0, "")


def read_published(folder: Path = FOLDER) -> list[dict[str, str]]:
    """Rows of published.csv: table, task, method, heads, metric, split, value."""
    with find(folder / "published.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def printed_numbers(table: str, folder: Path = FOLDER) -> dict[tuple[str, ...], str]:
    """Return the printed numbers of a table by task, method, heads, metric and split."""
    keys = ("task", "method", "heads", "metric", "split")
    rows = [row for row in read_published(folder) if row["table"] == table]
    return {tuple(row[key] for key in keys): row["value"] for row in rows}
