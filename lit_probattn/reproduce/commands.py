"""The state of every table and figure. PyTorch is imported only where a task has results."""

from __future__ import annotations

from collections import Counter
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


def _state(part: Part, place: Place) -> str:
    name, kind, folder = part.name, part["kind"], part.folder
    if kind == "fits":
        table = read_table(name, folder)
        parts = missing_parts(table)
        return _done(table, place) + (f"; missing parts: {', '.join(parts)}" if parts else "")
    if kind == "figure":
        return _done(entry_of(part).table(part, place, False), place)
    if kind == "grid":
        try:
            return _done(Grid.read(folder / f"{name}.yaml").table(name, place), place)
        except DataError as error:  # of a vocabulary that the sizes depend on
            return str(error)
    if kind == "drawing":
        return DRAWING
    if kind == "sweep_figure":
        done = sum(_has_rows(sweep, place) for sweep in part["sweeps"])
        return f"{done} of {len(part['sweeps'])} sweeps have results"
    if kind == "sweep_table":
        sweep = part["sweep_on_gpu" if place.accelerator in ("gpu", "cuda") else "sweep"]
        return f"{int(_has_rows(sweep, place))} of 1 sweeps have results"
    if kind == "uea":
        return "run by python -m lit_probattn.reproduce.uea"
    if kind == "analysis":
        return _studied(part, place)
    raise ConfigError(f"{name}: unknown kind: {kind!r}{nearest(kind, get_args(Kind))}")


def _done(table: Table, place: Place) -> str:
    done = len(finished(table, place))
    return f"{done} of {table.num_runs} runs finished (full protocol)"


def _has_rows(sweep: str, place: Place) -> bool:
    return any((place.runs / "profiling" / Path(sweep).stem).glob("rows*.jsonl"))


def _studied(part: Part, place: Place) -> str:
    table, studied = models_of(part), 0
    done = finished(table, place)
    if done:
        from lit_probattn.reproduce.analyses.table import Analysis

        study = Analysis(part).study
        studied = sum(study.is_done(run) for run in done)
    return f"{len(done)} of {table.num_runs} runs finished, {studied} studied ({part['study']})"
