"""Figure 2 of the paper on fixed head sizes: fine-tuned pre-trained models.

Source: "Low-Rank Bottleneck in Multi-head Attention Models" (Bhojanapalli et al., ICML 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.compare.runs import Run
from lit_probattn.experiments.expectations import Finding, Sample, missing, sided
from lit_probattn.records.figures import panels
from lit_probattn.reproduce.figures.low_rank import at_equal
from lit_probattn.reproduce.figures.report import FigureReport, Judge
from lit_probattn.reproduce.head_size.curves import draw_curves, in_millions, limits_of
from lit_probattn.reproduce.head_size.experiment import sizes_of

__all__ = ["FineTuned"]

_SCORES = {"f1": "F1", "exact_match": "exact match", "accuracy": "accuracy, %"}


class FineTuned(FigureReport):
    """Scores of fine-tuned models against their parameters.

    Each row is a model that is pre-trained and fine-tuned with the tasks of `tasks.yaml`. The
    reduced version divides all widths and keeps the numbers of heads.
    """

    def columns(self, run: Run, result: dict[str, Any]) -> dict[str, Any]:
        """Return rule, sizes and parameters of a model."""
        return {**sizes_of(run), "num_parameters": result["parameters"]}

    def scores(self, metric: str) -> pd.DataFrame:
        """Return the runs with a score, in a column of its name."""
        column = f"value {metric}"
        known = self.rows.reindex(columns=[*self.rows.columns.difference([column]), column])
        return known.dropna(subset=[column]).rename(columns={column: _SCORES[metric]})

    def draw(self) -> Figure:
        """Draw a panel per score."""
        there = {key: runs for key in _SCORES if len(runs := self.scores(key))}
        figure, [axes] = panels(1, max(1, len(there)), 3.9, 3.6)
        for axis, (metric, runs) in zip(axes, there.items(), strict=False):
            words = {"fixed": "one head size", "width": "d / h, several widths"}
            series = {words[str(rule)]: part for rule, part in runs.groupby("rule")}
            limits = limits_of(runs, _SCORES[metric])
            draw_curves(axis, series, "num_parameters", limits, score=_SCORES[metric])
            in_millions(axis)
            axis.set_xlabel("parameters")
        return figure

    def judges(self) -> Mapping[str, Judge]:
        """Return the function that judges each claim."""
        found: dict[str, Judge] = {}
        for metric in _SCORES:
            found[f"{metric}_smaller_width"] = partial(self._smaller_width, metric)
            found[f"{metric}_equal_parameters"] = partial(self._equal_parameters, metric)
        return found

    def _parts(self, metric: str) -> tuple[pd.DataFrame, pd.DataFrame]:
        runs = self.scores(metric)
        return runs[runs["rule"] == "fixed"], runs[runs["rule"] == "width"]

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
