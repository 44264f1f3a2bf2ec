"""Figure 2 of the paper on fixed head sizes: fine-tuned pre-trained models.

Source: "Low-Rank Bottleneck in Multi-head Attention Models" (Bhojanapalli et al., ICML 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.cells import Cell, Place
from lit_probattn.compare.tables import Row, Table, read_tasks
from lit_probattn.experiments.expectations import Finding, Sample, missing, sided
from lit_probattn.records.figures import panels
from lit_probattn.reproduce.figures.low_rank import at_equal
from lit_probattn.reproduce.figures.report import FigureReport, Judge
from lit_probattn.reproduce.head_size.curves import draw_curves, in_millions, limits_of

__all__ = ["FineTuned"]

_SCORES = {"f1": "F1", "exact_match": "exact match", "accuracy": "accuracy, %"}


class FineTuned(FigureReport):
    """Scores of fine-tuned models against their parameters.

    Each row is a model that is pre-trained and fine-tuned with the tasks of `tasks.yaml`. The
    reduced version divides all widths and keeps the numbers of heads.
    """

    @classmethod
    def table_of(
        cls, name: str, part: Mapping[str, Any], folder: Path, place: Place, reduced: bool
    ) -> Table:
        """Return the models, on both tasks."""
        fixed, baseline, factor = part["fixed"], part["baseline"], part["shortened"]["divided_by"]
        layers = part["num_layers"], part["shortened"]["num_layers"]
        model = partial(_model, layers=layers, factor=factor)
        sizes = [fixed[key] for key in ("embed_dim", "head_dim", "mlp_dim")]
        rows = [model("fixed", f"head size {sizes[1]}", heads, *sizes) for heads in fixed["heads"]]
        for width in baseline["widths"]:
            if width % (baseline["heads"] * factor):
                raise ConfigError(
                    f"{folder / name}.yaml: baseline: width {width} is not divisible by "
                    f"{baseline['heads']} heads and by {factor}"
                )
            head_dim = width // baseline["heads"]
            rows.append(
                model(
                    "width", f"d / h, width {width}", baseline["heads"], width, head_dim, 4 * width
                )
            )
        tasks = read_tasks(folder)
        return Table(
            name=name,
            title=part["title"] + (", reduced" if reduced else ""),
            seeds=part["seeds"],
            published_runs=0,
            baseline=rows[-1].name,
            tasks={task: tasks[task] for task in part["tasks"]},
            rows={row.name: row for row in rows},
        )

    def columns(self, cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
        """Return rule and sizes of a model."""
        sizes = cell.config["model"]["init_args"]
        return {
            "rule": cell.row.name.partition("-")[0],
            "num_heads": sizes["attention"]["init_args"]["num_heads"],
            **{key: sizes[key] for key in ("head_dim", "embed_dim", "mlp_dim")},
            "num_parameters": result["parameters"],
        }

    def scores(self, metric: str) -> pd.DataFrame:
        """Return the cells with a score, in a column of its name."""
        column = f"value {metric}"
        known = self.rows.reindex(columns=[*self.rows.columns.difference([column]), column])
        return known.dropna(subset=[column]).rename(columns={column: _SCORES[metric]})

    def drawn(self) -> dict[str, Callable[[], Figure]]:
        """Return the function that draws a panel per score."""
        return {"figure": self._draw}

    def _draw(self) -> Figure:
        there = {key: cells for key in _SCORES if len(cells := self.scores(key))}
        figure, [axes] = panels(1, max(1, len(there)), 3.9, 3.6)
        for axis, (metric, cells) in zip(axes, there.items(), strict=False):
            words = {"fixed": "one head size", "width": "d / h, several widths"}
            series = {words[str(rule)]: part for rule, part in cells.groupby("rule")}
            limits = limits_of(cells, _SCORES[metric])
            draw_curves(axis, series, "num_parameters", limits, score=_SCORES[metric])
            in_millions(axis)
            axis.set_xlabel("parameters")
        return figure

    def judges(self) -> Mapping[str, Judge]:
        """Return what judges each sentence."""
        found: dict[str, Judge] = {}
        for metric in _SCORES:
            found[f"{metric}_smaller_width"] = partial(self._smaller_width, metric)
            found[f"{metric}_equal_parameters"] = partial(self._equal_parameters, metric)
        return found

    def _parts(self, metric: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        cells = self.scores(metric)
        return cells[cells["rule"] == "fixed"], cells[cells["rule"] == "width"]

    def _smaller_width(self, metric: str) -> Finding:
        """Compare the fixed model with most heads and the widest baseline."""
        fixed, widths = self._parts(metric)
        if fixed.empty or widths.empty:
            return missing()
        most = fixed[fixed["num_heads"] == fixed["num_heads"].max()]
        widest = widths[widths["embed_dim"] == widths["embed_dim"].max()]
        words = (
            f"width {int(most['embed_dim'].iloc[0])} with {int(most['num_heads'].iloc[0])} heads − "
            f"width {int(widest['embed_dim'].iloc[0])}"
        )
        score = _SCORES[metric]
        return sided(Sample.of(most, score), Sample.of(widest, score), 1, words)

    def _equal_parameters(self, metric: str) -> Finding:
        fixed, widths = self._parts(metric)
        groups = [part for _, part in widths.groupby("embed_dim")]
        words = "one head size − baseline at equal parameters"
        return at_equal(fixed, groups, "num_parameters", 1, words, score=_SCORES[metric])


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
    """Return the row of a model, with the divided widths of its reduced version."""
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
