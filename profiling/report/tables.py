"""Tables and sentences of a report as lines of Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

import pandas as pd

from lit_probattn.records.markdown import code_span, one_line
from lit_probattn.records.tables import markdown_lines
from profiling.cost.exact import layer_of_row
from profiling.measure.rows import PLACE, SETTING
from profiling.report.names import SCOPES
from profiling.report.ratios import METRICS, found_by
from profiling.sweep.config import Published

_MAX_ROWS = 48
_LETTERS = {"embed_dim": "D", "seq_len": "N", "grid_heads": "H", "batch_size": "B"}
_COSTS = (
    *("macs", "num_parameters", "peak_memory_bytes", "memory_bytes"),
    *("time_median_s", "graph_median_s", "energy_j"),
)


def _settings(table: pd.DataFrame) -> list[str]:
    """Return the setting columns that vary, except devices: see `_devices`."""
    columns = [c for c in SETTING if c not in ("scope", "device_name")]
    return [c for c in columns if table[c].nunique(dropna=False) > 1]


def _devices(values: pd.DataFrame) -> list[str]:
    """Return the column of devices if values of one metric have several.

    The head of a report names a single device.
    """
    return ["device_name"] if values["device_name"].nunique() > 1 else []


def extremes_table(ratios: pd.DataFrame) -> list[str]:
    """Return the range and the trend of every ratio with its extremes; equal modes share a row."""
    if ratios.empty:
        return ["No variant has a baseline at the same point.", ""]
    lines: dict[tuple[str, ...], list[str]] = {}
    extra = [c for c in _settings(ratios) if c != "mode"]
    extra += next((c for _, part in ratios.groupby("metric") if (c := _devices(part))), [])
    keys = ["metric", "scope", "variant", *extra, "mode"]
    for values, group in ratios.groupby(keys, sort=False, dropna=False):
        metric, scope, variant = map(str, values[:3])
        column = _found_column(group)
        group = group.dropna(subset=[column])
        if group.empty:
            continue
        varying = _varying(ratios, metric)
        low, high = group.loc[group[column].idxmin()], group.loc[group[column].idxmax()]
        line = (
            *(METRICS[metric][0], SCOPES[scope], f"{variant} / {group['baseline'].iloc[0]}"),
            *map(str, values[3:-1]),
            found_by(metric, column.removeprefix("ratio_")),
            f"{low[column]:.3f}{_place(low, varying)}",
            f"{high[column]:.3f}{_place(high, varying)}",
            _trend(metric, group),
        )
        lines.setdefault(line, []).append(str(values[-1]))
    columns = ["quantity", "scope", "ratio", *extra, "source", "smallest", "largest", "trend"]
    table = pd.DataFrame(list(lines), columns=columns)
    is_size = table["quantity"].str.startswith("parameters")
    modes = pd.Series([", ".join(m) for m in lines.values()])
    table.insert(3, "mode", modes.where(~is_size, "–"))
    return [*markdown_lines(table), ""]


def _found_column(group: pd.DataFrame) -> str:
    """Return the column with ratios: measured, else by closed form, else predicted."""
    columns = ("ratio_measured", "ratio_analytic", "ratio_predicted")
    return next((name for name in columns if group[name].notna().any()), columns[0])


def _varying(ratios: pd.DataFrame, metric: str) -> list[str]:
    """Return the axes that vary in the grid and on which the metric can depend."""
    axes = [c for c in PLACE if ratios[c].nunique(dropna=False) > 1]
    is_size = metric.startswith("num_parameters")
    return [c for c in axes if not is_size or c in ("embed_dim", "grid_heads")]


def _place(row: pd.Series, varying: Sequence[str], equals: str = "=") -> str:
    places = ", ".join(f"{_LETTERS[c]}{equals}{row[c]}" for c in varying)
    return f" ({places})" if places else ""


def _trend(metric: str, group: pd.DataFrame) -> str:
    """Return how a ratio changes along each axis of the grid, such as `falls with D`."""
    column, found = _found_column(group), []
    axes = (("seq_len", "embed_dim"), ("embed_dim", "seq_len"), ("grid_heads", "seq_len"))
    for axis, other in axes:
        if group[axis].nunique() < 2 or axis not in _varying(group, metric):
            continue
        kinds: dict[str, list[int]] = {}
        rest = [c for c in PLACE if c not in (axis, other)]
        for value, part in group.groupby(other):
            lines = part.groupby(rest, dropna=False)
            steps = pd.concat([one.sort_values(axis)[column].diff().dropna() for _, one in lines])
            if steps.empty:  # at most one point
                continue
            kinds.setdefault(f"{_kind(steps)} {_LETTERS[axis]}", []).append(int(value))
        places = [f"{k} at {_LETTERS[other]} = {', '.join(map(str, v))}" for k, v in kinds.items()]
        if kinds:
            found.append(", ".join(places if len(kinds) > 1 else kinds))
    return "; ".join(found)


def _kind(steps: pd.Series) -> str:
    if (steps.abs() < 5e-4).all():
        return "constant in"
    if (steps <= 1e-12).all():
        return "falls with"
    return "rises with" if (steps >= -1e-12).all() else "not monotonic in"


def crossover_table(cross: pd.DataFrame) -> list[str]:
    """Return crossover lengths, in one row if all lengths of a variant are equal."""
    if cross.empty:
        return []
    rows = []
    names = ["embed_dim", "grid_heads", "batch_size", *SETTING]
    for (metric, variant), group in cross.groupby(["metric", "variant"], sort=False):
        head = {"quantity": METRICS[str(metric)][0], "variant": variant}
        alike = group["crossover"].nunique() == 1
        varying = [c for c in names if group[c].nunique(dropna=False) > 1]
        for _, line in group[:1].iterrows() if alike else group.iterrows():
            place = ", ".join(f"{_LETTERS.get(c, c)} {line[c]}" for c in varying)
            where = {"baseline": line["baseline"], "where": "everywhere" if alike else place}
            rows.append({**head, **where, "crossover": line["crossover"]})
    return [
        *("## Crossover length", ""),
        *("Length from which a variant stays below its baseline.", ""),
        *(*markdown_lines(pd.DataFrame(rows)), ""),
    ]


def variants_table(frame: pd.DataFrame) -> list[str]:
    """Return the table of variants with their classes, arguments and sizes."""
    columns = ["variant", "baseline", "attention_class", "attention_args", "num_heads", "head_dim"]
    rows = []
    for (variant, name), group in frame.groupby(["variant", "attention_class"], sort=False):
        arguments = group["attention_args"].iloc[0]
        if group["grid_heads"].notna().any():
            arguments = re.sub(r'"num_heads": \d+(, )?', "", arguments).replace(", }", "}")
        cells = [", ".join(map(str, sorted(group[c].dropna().unique()))) for c in columns[4:]]
        baseline = group["baseline"].iloc[0]
        rows.append([variant, baseline, name, code_span(arguments), *cells])
    return [*markdown_lines(pd.DataFrame(rows, columns=columns)), ""]


def variants_of(frame: pd.DataFrame) -> list[dict[str, str]]:
    """Return the columns that identify the variants of a sweep, as plain data."""
    columns = ["variant", "baseline", "attention_class", "attention_args", "head_dim"]
    table = frame[columns].drop_duplicates("variant").fillna("").astype(str)
    return cast(list[dict[str, str]], table.to_dict("records"))


def published_table(
    published: Sequence[Published], frame: pd.DataFrame, ratios: pd.DataFrame
) -> list[str]:
    """Return the table of published and reproduced values."""
    rows = [
        {
            "what": item.what,
            "expected": item.value,
            "ours": None if ours is None else float(f"{ours:.4g}"),
            "ours / expected": None if ours is None else f"{ours / item.value:.3f}",
            "source": item.source,
        }
        for item, ours in ((item, item.find(frame, ratios)) for item in published)
    ]
    return [*markdown_lines(pd.DataFrame(rows)), ""] if rows else []


def quantity_tables(frame: pd.DataFrame, ratios: pd.DataFrame) -> list[str]:
    """Return tables of the counted or measured values of the outermost scope."""
    parts: list[str] = []
    good = frame[(frame["status"] == "ok") & (frame["source"] == "measured")]
    if good.empty:
        return ["No point has counted or measured values.", ""]
    scope = good["scope"].iloc[-1] if good["scope"].nunique() == 1 else "model"
    good = good[good["scope"] == scope]
    place = [c for c in PLACE if good[c].nunique(dropna=False) > 1] or ["seq_len"]
    extra = _settings(good)
    for metric, (heading, divisor, unit) in METRICS.items():
        if metric not in good or good[metric].notna().sum() == 0:
            continue
        keys = [*place, *extra]
        if metric.startswith("num_parameters"):
            keys = [c for c in keys if _matters(good, metric, c)] or place[:1]
        values = good.dropna(subset=[metric]).assign(value=lambda t, m=metric, d=divisor: t[m] / d)
        keys += _devices(values)
        wide = values.pivot_table(
            index=keys, columns="variant", values="value", aggfunc="first", dropna=False
        ).dropna(how="all")
        if len(wide) > _MAX_ROWS:
            parts += [f"{heading}: {len(wide)} points, see rows.csv and the figures.", ""]
            continue
        order = [v for v in dict.fromkeys(good["variant"]) if v in wide]
        wide = wide[order].map(lambda v: None if pd.isna(v) else f"{v:.4g}").reset_index()
        how = found_by(metric, "measured")
        parts += [f"{heading}, {SCOPES[scope]} ({unit}), {how}:", "", *markdown_lines(wide), ""]
    return parts


def _matters(table: pd.DataFrame, metric: str, column: str) -> bool:
    others = [c for c in [*PLACE, *SETTING] if c != column]
    return bool((table.groupby(["variant", *others], dropna=False)[metric].nunique() > 1).any())


def failures_table(frame: pd.DataFrame, notes: Sequence[str]) -> list[str]:
    """List the points without values and the reasons."""
    bad = frame[frame["status"] != "ok"]
    if bad.empty and not notes:
        return ["No point failed or was skipped.", ""]
    parts = ["## Points without values", "", *[f"- {one_line(note)}" for note in notes], ""]
    if not bad.empty:
        columns = ["quantity", "variant", *PLACE, "mode", "backend", "status", "reason"]
        table = bad[columns].drop_duplicates()
        varying = [c for c in columns if c in ("status", "reason") or table[c].nunique() > 1]
        parts += [*markdown_lines(table[varying].head(_MAX_ROWS)), ""]
        if len(table) > _MAX_ROWS:
            parts += [f"… and {len(table) - _MAX_ROWS} more in rows.csv.", ""]
    return parts


def excesses(ratios: pd.DataFrame) -> dict[tuple[str, str], list[str]]:
    """Return the quantities in which a variant exceeds its baseline, by variant and baseline."""
    found: dict[tuple[str, str], list[str]] = {}
    if ratios.empty:
        return found
    sources = [f"ratio_{source}" for source in ("measured", "analytic", "predicted")]
    table = ratios.assign(ratio=ratios[sources].bfill(axis=1).iloc[:, 0])
    table = table[table["metric"].isin(_COSTS) & table["ratio"].notna()]
    keys = ["variant", "baseline", "metric", "scope", "mode"]
    varying = [c for c in PLACE if table[c].nunique(dropna=False) > 1]
    for (variant, baseline, metric, scope, mode), group in table.groupby(keys, sort=False):
        above = group[group["ratio"] > 1.0]
        if above.empty:
            continue
        worst = above.loc[above["ratio"].idxmax()]
        found.setdefault((str(variant), str(baseline)), []).append(
            f"{METRICS[str(metric)][0]} of the {SCOPES[scope]}, {mode}, at {len(above)} of "
            f"{len(group)} points, at most {worst['ratio']:.4g} times"
            f"{_place(worst, varying, ' = ')}"
        )
    return found


def dearer_lines(frame: pd.DataFrame, ratios: pd.DataFrame) -> list[str]:
    """Return a line per variant that exceeds its baseline, with the quantities.

    For FiSH, also the head size below which the N² term is larger.
    """
    lines = [
        f"**{variant} costs more than {baseline}**: {'; '.join(parts)}."
        for (variant, baseline), parts in excesses(ratios).items()
    ]
    return [*lines, *(() if ratios.empty else _break_even(frame))]


def _break_even(frame: pd.DataFrame) -> list[str]:
    """Return the head sizes at which the N² term of a variant exceeds that of MHA.

    The N² term are the scores by the paper's rule. The projections are the N term, which is always
    smaller with fewer global heads.
    """
    lines = []
    for (variant, _), group in frame.groupby(["variant", "num_heads"], sort=False):
        layer = layer_of_row(group.iloc[0].to_dict())
        limit = None if layer is None else layer.cost(1).break_even_head_dim
        if limit is None or layer is None:
            continue
        sizes = sorted(int(s) for s in group["head_dim"].unique())
        dear = [str(s) for s in sizes if s < limit]
        if dear:
            lines.append(
                f"{variant}: the N² term of the scores is larger than in {layer.num_heads}-head "
                f"attention for head sizes below {limit:.4g}, here {', '.join(dear)} (the N term "
                "is always smaller)."
            )
    return lines
