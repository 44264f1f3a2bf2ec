"""Tables as Markdown, and sentences about comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from lit_probattn.records.markdown import escaped, one_line


def counted(number: int, thing: str) -> str:
    """Return a number with a noun, in the singular for 1."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def span(values: Iterable[float], form: str = ".3g") -> str:
    """Return the range of numbers, such as `0.5 to 0.8`, or the number if all print alike."""
    found = [value for value in values if value == value]
    if not found:
        return "undefined"
    low, high = format(min(found), form), format(max(found), form)
    return low if low == high else f"{low} to {high}"


def markdown_lines(frame: pd.DataFrame, digits: int = 4) -> list[str]:
    """Return a table without its index as lines of Markdown; missing values are dashes.

    The content of cells is escaped (see `escaped`).
    """

    def show(value: Any) -> str:
        if pd.api.types.is_scalar(value) and pd.isna(value):
            return "–"
        return f"{value:.{digits}g}" if isinstance(value, float) else escaped(value)

    rows = [[show(value) for value in row] for row in frame.itertuples(index=False)]
    lines = [[escaped(name) for name in frame.columns], ["---"] * len(frame.columns), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def markdown_table(frame: pd.DataFrame, digits: int = 4) -> str:
    """Return the same lines as one text."""
    return "\n".join(markdown_lines(frame, digits))


def with_deviation(
    rows: pd.DataFrame, keys: list[str], column: str, value: str, digits: int
) -> pd.DataFrame:
    """Return mean ± standard deviation of `value` with a row per `keys` and a column per `column`.

    A mean of one value has no deviation.
    """
    groups = rows.groupby([*keys, column], sort=False)[value]
    show = f"{{:.{digits}f}}".format
    std = groups.std(ddof=1).map(lambda x: "" if pd.isna(x) else f" ± {show(x)}")
    wide = (groups.mean().map(show) + std).unstack(column)
    return wide.reindex(sorted(wide), axis=1).reset_index()


def unequal_sides(
    sides: Mapping[str, Mapping[str, object]], baselines: Mapping[str, str | None], touches: str
) -> list[str]:
    """Return the settings in which variants differ from their baselines, a line each.

    Args:
        sides: settings by variant; None means unknown.
        baselines: the baseline of each variant; variants without one in `sides` are skipped.
        touches: effect of such a difference on the comparison.
    """
    found: dict[tuple[str, str, object, object], list[str]] = {}
    for name, baseline in baselines.items():
        if baseline is None or name not in sides or baseline not in sides:
            continue
        for key, value in sides[name].items():
            other = sides[baseline][key]
            if value != other and None not in (value, other):
                found.setdefault((baseline, key, value, other), []).append(name)
    return [
        one_line(
            f"**Unequal settings: {key} is {value} ({', '.join(names)}) and {other} (baseline "
            f"{baseline}): {touches}.**"
        )
        for (baseline, key, value, other), names in found.items()
    ]
