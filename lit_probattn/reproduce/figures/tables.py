"""The table of runs of a figure, read from its file; PyTorch is not imported.

Arguments of each function: the figure, the folders of the data, and whether to return the reduced
version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.flags import Place
from lit_probattn.compare.tables import Part, Row, Table, read_table, read_tasks
from lit_probattn.reproduce.head_size.grid import Grid


def rows_of_tables(part: Part, place: Place, reduced: bool) -> Table:
    """Return the selected rows of several tables.

    Raises:
        ConfigError: two tables have a row of the same name.
    """
    tables = {key: read_table(key, part.folder) for key in part["runs"]}
    tasks, rows = {}, {}
    for key, only in part["runs"].items():
        for task, row in tables[key].select(only):
            if row.name in rows:
                raise ConfigError(f"{part.name}: duplicate row {row.name} in its tables")
            tasks[task.name] = task
            rows[row.name] = row
    first = next(iter(tables.values()))
    return Table(
        name=part.name,
        title=part["title"],
        seeds=first.seeds,
        published_runs=first.published_runs,
        baseline=part.get("baseline", next(iter(rows))),
        tasks=tasks,
        rows={key: _of_tasks(row, tasks) for key, row in rows.items()},
    )


def _of_tasks(row: Row, tasks: Mapping[str, Any]) -> Row:
    published = {task: values for task, values in row.published.items() if task in tasks}
    return replace(row, published=published)


def points_of_grid(part: Part, place: Place, reduced: bool) -> Table:
    """Return the selected points of a grid of head sizes."""
    chosen = part["shortened"] if reduced else part
    grid = Grid.read(part.folder / f"{chosen['grid']}.yaml", chosen["points"])
    return grid.table(part.name, place, part["title"] + (", reduced" if reduced else ""))


def fine_tuned_models(part: Part, place: Place, reduced: bool) -> Table:
    """Return the models of both rules for head sizes, for all tasks.

    Raises:
        ConfigError: a width is not divisible by the number of heads.
    """
    fixed, baseline, factor = part["fixed"], part["baseline"], part["shortened"]["divided_by"]
    layers = part["num_layers"], part["shortened"]["num_layers"]
    model = partial(_model, layers=layers, factor=factor)
    sizes = [fixed[key] for key in ("embed_dim", "head_dim", "mlp_dim")]
    rows = [model("fixed", f"head size {sizes[1]}", heads, *sizes) for heads in fixed["heads"]]
    for width in baseline["widths"]:
        if width % (baseline["heads"] * factor):
            raise ConfigError(
                f"{part.folder / part.name}.yaml: baseline: width {width} is not divisible by "
                f"{baseline['heads']} heads and by {factor}"
            )
        head_dim = width // baseline["heads"]
        rows.append(
            model("width", f"d / h, width {width}", baseline["heads"], width, head_dim, 4 * width)
        )
    tasks = read_tasks(part.folder)
    return Table(
        name=part.name,
        title=part["title"] + (", reduced" if reduced else ""),
        seeds=part["seeds"],
        published_runs=0,
        baseline=rows[-1].name,
        tasks={task: tasks[task] for task in part["tasks"]},
        rows={row.name: row for row in rows},
    )


def _model(
    rule: str,
    method: str,
    heads: int,
    embed_dim: int,
    head_dim: int,
    mlp_dim: int,
    *,
    layers: tuple[int, int],
    factor: int,
) -> Row:
    """Return the row of a model; the reduced version divides all widths."""
    sizes = {"embed_dim": embed_dim, "head_dim": head_dim, "mlp_dim": mlp_dim}
    full = {f"model.init_args.{key}": value for key, value in sizes.items()}
    small = {key: value // factor for key, value in full.items()}
    return Row(
        name=f"{rule}-h{heads}-d{embed_dim}",
        method=method,
        heads=str(heads),
        attention="configs/attention/softmax.yaml",
        set={"num_heads": heads},
        overrides={**full, "model.init_args.num_layers": layers[0]},
        shortened={**small, "model.init_args.num_layers": layers[1]},
    )
