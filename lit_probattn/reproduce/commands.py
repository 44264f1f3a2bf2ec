"""The state of every table and figure. PyTorch is imported only where a task has results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from lit_probattn.base.config_files import is_there
from lit_probattn.base.errors import ConfigError, DataError, nearest
from lit_probattn.compare.flags import Place
from lit_probattn.compare.tables import FOLDER, Kind, Part, Table, kinds, read_published, read_table
from lit_probattn.reproduce.analyses.models import models_of
from lit_probattn.reproduce.figures.registry import entry_of
from lit_probattn.reproduce.head_size.grid import Grid

if TYPE_CHECKING:
    from lit_probattn.compare.runs import Run

DRAWING = "a drawing without data: nothing to train or measure"


def missing_parts(table: Table) -> list[str]:
    """Return the files that a table requires but this package lacks."""
    needed = [part.config for task in table.tasks.values() for part in task.chain()]
    needed += [row.attention for row in table.rows.values()]
    return sorted({name for name in needed if not is_there(name)})


def list_lines(place: Place, folder: Path = FOLDER) -> list[str]:
    """Return one line per table: kind, printed numbers, state."""
    numbers = Counter(row["table"] for row in read_published(folder))
    lines = []
    for name, part in kinds(folder).items():
        state = _state(part, place)
        head = f"{name:20} {part['kind']:13} {numbers[name]:3} numbers"
        lines.append(f"{head}  {part.get('title', name)}: {state}")
    return lines


def finished(table: Table, place: Place) -> list[Run]:
    """Return the runs of a table that have a result.

    Composing runs takes seconds, so it is done for those tasks that have any result.
    """
    kept = [path.name for path in (place.runs / "reproduce" / "results").glob("*.jsonl")]
    tasks = {part.name for task in table.tasks.values() for part in task.chain()}
    begun = {task for task in tasks if any(name.startswith(f"{task}-") for name in kept)}
    if not begun:
        return []
    from lit_probattn.compare.command import make_runs
    from lit_probattn.compare.protocol import Options

    runs = make_runs(table, [], table.seeds, Options(), place)
    return [run for run in runs if run.task.name in begun and run.result() is not None]


def trained_table(part: Part, place: Place, shortened: bool = False) -> Table:
    """Return the runs of a table or figure of trained models, other than the UEA archives.

    Raises:
        ConfigError: a part of its file is missing or unknown, or its kind is another.
        DataError: sizes depend on data that are missing.
    """
    name, kind = part.name, part["kind"]
    if kind == "fits":
        return read_table(name, part.folder)
    if kind == "grid":
        return Grid.read(part.folder / f"{name}.yaml").table(name, place)
    if kind == "analysis":
        return models_of(part)
    if kind == "figure":
        return entry_of(part).table(part, place, shortened)
    raise ConfigError(f"{name}: unknown kind: {kind!r}{nearest(kind, get_args(Kind))}")


def _state(part: Part, place: Place) -> str:
    kind = part["kind"]
    if kind == "drawing":
        return DRAWING
    if kind == "uea":
        return "run by python -m lit_probattn.reproduce.uea"
    if kind == "sweep_figure":
        with_rows = sum(_has_rows(sweep, place) for sweep in part["sweeps"])
        return f"{with_rows} of {len(part['sweeps'])} sweeps have results"
    if kind == "sweep_table":
        sweep = part["sweep_on_gpu" if place.accelerator in ("gpu", "cuda") else "sweep"]
        return f"{int(_has_rows(sweep, place))} of 1 sweeps have results"
    try:
        table = trained_table(part, place)
    except DataError as error:
        return str(error)
    done, parts = finished(table, place), missing_parts(table)
    if kind == "analysis":
        studied = _num_studied(part, done)
        told = f"{len(done)} of {table.num_runs} runs finished, {studied} studied ({part['study']})"
    else:
        told = f"{len(done)} of {table.num_runs} runs finished (full protocol)"
    return told + (f"; missing parts: {', '.join(parts)}" if parts else "")


def _has_rows(sweep: str, place: Place) -> bool:
    return any((place.runs / "profiling" / Path(sweep).stem).glob("rows*.jsonl"))


def _num_studied(part: Part, done: Sequence[Run]) -> int:
    if not done:
        return 0
    from lit_probattn.reproduce.analyses.table import Analysis

    study = Analysis(part).study
    return sum(study.is_done(run) for run in done)
