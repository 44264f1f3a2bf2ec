"""State of all tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from lit_probattn.base.config_files import is_there
from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.compare.cells import Cell, Place
from lit_probattn.compare.command import make_cells
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.tables import FOLDER, Kind, Table, kinds, read_published, read_table
from lit_probattn.reproduce.analyses.table import Analysis
from lit_probattn.reproduce.figures.registry import figure_class
from lit_probattn.reproduce.figures.sweeps import SweepFigure
from lit_probattn.reproduce.sweep_table import table_of

DRAWING = "a drawing without data; there is nothing to train or to measure"


def missing_parts(table: Table) -> list[str]:
    """Return the files that a table requires but this package lacks."""
    needed = [part.config for task in table.tasks.values() for part in task.chain()]
    needed += [row.attention for row in table.rows.values()]
    return sorted({name for name in needed if not is_there(name)})


def list_lines(place: Place, folder: Path = FOLDER) -> list[str]:
    """Return one line per table: kind, printed numbers, state."""
    numbers: dict[str, int] = {}
    for row in read_published(folder):
        numbers[row["table"]] = numbers.get(row["table"], 0) + 1
    lines = []
    for name, part in kinds(folder).items():
        state = _state(name, part, place, folder)
        head = f"{name:20} {part['kind']:13} {numbers.get(name, 0):3} numbers"
        lines.append(f"{head}  {part['title']}: {state}")
    return lines


def finished(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with a result; only cells of tasks with results are composed.

    Composing the cells of all tables takes seconds.
    """
    folders = {cell.folder / "cells" for cell in cells}
    kept = [path.name for folder in folders for path in folder.glob("*.jsonl")]
    tasks = {cell.task.name for cell in cells}
    begun = {task for task in tasks if any(name.startswith(f"{task}-") for name in kept)}
    return [cell for cell in cells if cell.task.name in begun and cell.result() is not None]


def _state(name: str, part: Mapping[str, Any], place: Place, folder: Path) -> str:
    kind = part["kind"]
    if kind == "fits":
        table = read_table(name, folder)
        cells = make_cells(table, [], table.seeds, Options(), place)
        text = f"{len(finished(cells))} of {len(cells)} runs finished (full protocol)"
        parts = missing_parts(table)
        return f"{text}; missing parts: {', '.join(parts)}" if parts else text
    if kind == "figure":
        table = figure_class(name, part).table_of(name, part, folder, place, False)
        cells = make_cells(table, [], table.seeds, Options(), place)
        return f"{len(finished(cells))} of {len(cells)} runs finished (full protocol)"
    if kind == "drawing":
        return DRAWING
    if kind == "sweep_figure":
        return SweepFigure(name, part, place.runs).state
    if kind == "sweep_table":
        return table_of(name, part, place.runs, place.accelerator).state
    if kind == "uea":
        return "run by python -m lit_probattn.reproduce.uea"
    if kind == "analysis":
        analysis = Analysis.read(name, part, folder)
        cells = make_cells(analysis.table, [], analysis.table.seeds, Options(), place)
        done = finished(cells)
        studied = sum(analysis.study.is_done(cell) for cell in done)
        return (
            f"{len(done)} of {len(cells)} runs finished, {studied} studied ({analysis.study.name})"
        )
    raise ConfigError(f"{name}: unknown kind: {kind!r}{nearest(kind, get_args(Kind))}")
