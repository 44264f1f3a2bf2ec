"""The picture of a report: every seed, means with deviations, and the published values."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns


def draw(summary: pd.DataFrame, rows: pd.DataFrame, title: str, path: Path) -> None:
    """Draw one panel per task and metric; rows of the table from top to bottom.

    Args:
        summary: the report's summary.
        rows: one row per finished cell.
        title: above the panels.
        path: PNG file.
    """
    panels = [
        (key, part)
        for key, part in summary.groupby(["task", "metric"], sort=False)
        if f"value {key[1]}" in rows and key[0] in set(rows["task"])
    ]
    tallest = max(len(part) for _, part in panels)
    sns.set_theme(style="whitegrid")
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(1.5 + 4.2 * len(panels), 1.9 + 0.33 * tallest),
        layout="constrained",
        squeeze=False,
    )
    for axis, ((task, metric), part) in zip(axes[0], panels, strict=True):
        places = {name: -index for index, name in enumerate(part["row"])}
        seeds = rows[(rows["task"] == task) & rows["row"].isin(places)]
        axis.scatter(
            seeds[f"value {metric}"],
            [places[name] for name in seeds["row"]],
            s=14,
            color="tab:blue",
            alpha=0.6,
            label="one seed",
            zorder=3,
        )
        heights = [places[name] + 0.22 for name in part["row"]]
        axis.errorbar(
            part["mean"],
            heights,
            xerr=part["std"].astype(float).fillna(0.0),
            fmt="o",
            color="black",
            markersize=5,
            capsize=3,
            label="mean ± std",
        )
        known = part["published"].notna()
        axis.scatter(
            part["published"][known],
            [places[name] - 0.22 for name in part["row"][known]],
            marker="D",
            facecolors="none",
            edgecolors="tab:red",
            label="published (its own protocol)",
        )
        axis.set_yticks(list(places.values()), list(part["method"]))
        axis.set_ylim(-len(places) + 0.4, 0.6)
        axis.set(xlabel=f"{task}: {metric}, {part['unit'].iloc[0]}")
        axis.grid(axis="y", visible=False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(textwrap.fill(title, 24 + 32 * len(panels)), fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
