"""Figures of the approximation studies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.analysis.approximation.methods import ESTIMATE
from lit_probattn.analysis.drawing import label, plain_log, powers_of_two
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import counted

# Okabe and Ito's colours, suitable for colour-blind readers.
COLOURS = {
    "ovo": "#d55e00",
    "ovo_reopt": "#e69f00",
    "ova": "#0072b2",
    "norm": "#cc79a7",
    "window": "#009e73",
    "lsh": "#56b4e9",
    "orf": "#000000",
}
# Labels of methods.
WORDS = {
    "ovo": "largest weights",
    "ovo_reopt": "largest weights, re-weighted",
    "ova": "best for the values",
    "norm": "largest weight x value norm",
    "window": "nearest keys",
    "lsh": "hashing",
    "orf": "random features",
}
# Lines and markers of the settings of one method.
_STYLES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P")


def labels(table: pd.DataFrame) -> pd.Series:
    """Return labels of the methods of a table with their distinguishing options."""

    def name(row: dict[str, Any]) -> str:
        rounds, detail = row.get("rounds"), row.get("detail")
        text = str(row["method"])
        text += "" if rounds is None or rounds != rounds else f" T={int(rounds)}"
        named = text.startswith(("lsh", "orf")) and isinstance(detail, str)
        return f"{text} {detail}" if named else text

    return pd.Series([name(row) for row in table.to_dict("records")], index=table.index)


def keys_claim(table: pd.DataFrame, methods: Sequence[str] = (), by: str = "method") -> str:
    """Return the fewest keys from which the metric is within 5 % of exact attention.

    Args:
        table: rows of `approximate`; features count as keys.
        methods: methods to use, the first one that has rows; empty means all.
        by: column of methods or models, which are named.
    """
    frame = table[table["scope"] == table["scope"].iloc[0]]
    used = next((m for m in methods if (frame["method"] == m).any()), None)
    frame = frame if used is None else frame[frame["method"] == used]
    fewest = {name: least_within(part, "num_kept") for name, part in frame.groupby(by, sort=False)}
    found = [f"{name} {kept}" for name, kept in fewest.items() if kept is not None]
    metric, about = frame["metric"].iloc[0], "" if used is None else f" ({used})"
    if not found:
        return f"No approximation{about} has a {metric} within 5 % of exact attention"
    more = f" and {len(found) - 6} more" if len(found) > 6 else ""
    return (
        f"Keys or features for a {metric} within 5 % of exact attention{about}: "
        f"{', '.join(found[:6])}{more}"
    )


def least_within(rows: pd.DataFrame, column: str, share: float = 0.05) -> int | None:
    """Return the smallest number of a column from which `value` is within a share of `exact`."""
    near = (rows["value"] - rows["exact"]).abs() <= share * rows["exact"].abs()
    whole = near.groupby(rows[column]).all().sort_index()
    inside = whole[::-1].cummin()
    return int(inside[inside].index.min()) if inside.any() else None


def error_claim(table: pd.DataFrame) -> str:
    """Return the mean relative errors of the methods at the fewest keys that several share."""
    counts = table.groupby("num_kept")["method"].nunique()
    kept = int(counts[counts == counts.max()].index.min())
    part = table[table["num_kept"] == kept]
    means = part.groupby("method", sort=False)["rel_error"].mean().sort_values()
    named = ", ".join(f"{name} {value:.2g}" for name, value in means.head(4).items())
    return f"Mean relative error of a head's output with {counted(kept, 'key')}: {named}"


def draw_metric(table: pd.DataFrame) -> Figure:
    """Draw the metric relative to the exact model over the number of keys.

    Perplexities are divided by the exact value on the same samples; from percentages it is
    subtracted. Sparse methods are on the left, random features on the right.
    """
    frame = table[table["scope"] == table["scope"].iloc[0]].copy()
    frame["label"] = labels(frame)
    is_ratio = bool((frame["metric"] == "perplexity").all())
    frame["value"] = frame["value"] / frame["exact"] if is_ratio else frame["difference"]
    sparse, dense = frame[frame["method"] != "orf"], frame[frame["method"] == "orf"]
    both = ((sparse, "keys r"), (dense, "features F"))
    groups = [(part, name) for part, name in both if len(part)]
    what = "additional errors relative to exact attention (points)"
    figure, (axes,) = panels(1, len(groups), 5.2, 4.4)
    for axis, (part, name) in zip(axes, groups, strict=True):
        _lines(axis, part)
        axis.axhline(float(is_ratio), color="0.5", lw=1, ls="--", label="exact attention")
        powers_of_two(axis)
        if is_ratio:
            plain_log(axis)
        label(axis, name, "perplexity relative to exact attention" if is_ratio else what, legend=7)
    return figure


def _lines(axis: Axes, part: pd.DataFrame) -> None:
    """Draw one line per label; estimates of the value-aware optimum are open circles."""
    seen: dict[str, int] = {}
    for name in dict.fromkeys(part["label"]):
        rows = part[part["label"] == name]
        method = str(rows["method"].iloc[0])
        number = seen.get(method, 0) % len(_STYLES)
        style, marker = _STYLES[number], _MARKERS[number]
        seen[method] = seen.get(method, 0) + 1
        points = rows.groupby("num_kept")["value"].agg(["mean", "std"]).reset_index()
        colour = COLOURS.get(method, "0.3")
        words = f"{name}: {WORDS.get(method, method)}"
        line: Any = {"ls": style, "color": colour, "lw": 1.4}
        axis.plot(points["num_kept"], points["mean"], **line)
        if points["std"].notna().any():
            low, high = points["mean"] - points["std"], points["mean"] + points["std"]
            axis.fill_between(points["num_kept"], low, high, color=colour, alpha=0.15, lw=0)
        open_marks = points["num_kept"].isin(rows["num_kept"][rows["status"] == ESTIMATE])
        solid = points[~open_marks]
        axis.plot(solid["num_kept"], solid["mean"], marker, ms=4, color=colour)
        axis.plot([], [], marker=marker, ms=4, label=words, **line)
        if open_marks.any():
            rest = points[open_marks]
            hollow: Any = {"ms": 5, "mfc": "white", "color": colour}
            named = f"{name}: upper estimate" if method == "ova" else None
            axis.plot(rest["num_kept"], rest["mean"], marker, label=named, **hollow)


def draw_local(table: pd.DataFrame) -> Figure:
    """Draw the relative errors of ovo and ova per layer and head."""
    frame = table[table["method"].isin(["ovo", "ova"])]
    frame = table if frame.empty else frame
    layers = sorted(frame["layer"].unique())
    methods = list(dict.fromkeys(frame["method"]))
    figure, axes = panels(len(methods), len(layers), 2.6, 2.3, sharex=True, sharey=True)
    for row, method in zip(axes, methods, strict=True):
        for axis, layer in zip(row, layers, strict=True):
            part = frame[(frame["method"] == method) & (frame["layer"] == layer)]
            for head, lines in part.groupby("head"):
                means = lines.groupby("num_kept")["rel_error"].mean()
                axis.plot(means.index, means + 1e-4, lw=1.1, marker=".", label=f"head {head}")
            powers_of_two(axis)
            axis.set_yscale("log")
            label(axis, title=f"{method} ({WORDS.get(method, method)})\nlayer {layer}")
    axes[0][0].legend(fontsize=6, frameon=False)
    figure.supxlabel("keys r", fontsize=9)
    figure.supylabel("relative error of the output + 1e-4", fontsize=9)
    return figure


def draw_relative(table: pd.DataFrame) -> Figure:
    """Draw the mean relative error of each method over its size."""
    frame = table.copy()
    frame["label"] = labels(frame)
    frame["status"], frame["value"] = "", frame["rel_error"] + 1e-4
    frame = frame.groupby(["label", "method", "num_kept", "status"], sort=False)["value"].mean()
    figure, ((axis,),) = panels(1, 1, 6.0, 4.2)
    _lines(axis, frame.reset_index())
    powers_of_two(axis)
    axis.set_yscale("log")
    what = "mean relative error of a head's output + 1e-4"
    label(axis, "keys r (orf: features)", what, legend=7)
    return figure
