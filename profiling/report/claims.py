"""Whether what a paper says of a cost holds in the rows of a sweep.

A count has no spread, so a claim about one holds or does not: *agrees* or *differs*. A time has the
spread of its repeats, from their 20 % to their 80 % quantile: *agrees* and *differs* are beyond it,
*same direction* is the paper's side within it, *cannot be told* the other side within it. Numbers
that are missing cannot be told either, nor can memory and time that were not measured on a GPU (see
`tells_of_a_gpu`). A sentence is no better than the weakest of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pandas as pd

from profiling.report.ratios import METRICS, PLACE
from profiling.sweep.config import Claim, Sentence, SweepConfig

_MEMORY, _PEAK = "memory_bytes", "peak_memory_bytes"
_TIME = "time_median_s"
_WORDS = {name: words for name, (words, _, _) in METRICS.items()}
_LETTERS = {"embed_dim": "D", "seq_len": "N", "grid_heads": "heads"}
_KEYS = [*PLACE, "mode", "backend", "dtype", "scope"]
_CONSTANT = 0.01
# What a device takes: papers print it of their GPU. Everything else is counted, and holds anywhere.
_OF_A_DEVICE = frozenset(
    {"resident_memory_bytes", _PEAK, _MEMORY, "nvml_memory_bytes", _TIME, "energy_j"}
)
# The weakest first.
_RANKS = ("differs", "cannot be told", "same direction", "agrees")


@dataclass(frozen=True)
class Judged:
    """A sentence, what was found, and whether it agrees."""

    says: str
    measured: str
    verdict: str


def tells_of_a_gpu(metric: str, device: str, source: str) -> bool:
    """Whether a number can agree or differ with what a paper says of a cost.

    The one rule of sentences, figures and tables: a count tells on any device; memory, time and
    energy tell only if they were measured on a GPU.

    Args:
        metric: a column of the rows.
        device: where it was found, such as `cpu`.
        source: how: `measured`, `predicted` or `analytic`.
    """
    return metric not in _OF_A_DEVICE or (device.startswith("cuda") and source == "measured")


def judge(sentence: Sentence, config: SweepConfig, frame: pd.DataFrame) -> Judged:
    """Judge a sentence of a sweep.

    Args:
        sentence: the sentence.
        config: the sweep.
        frame: its rows.
    """
    found = [_judge(claim, config, frame) for claim in sentence.holds]
    verdict = min((one for _, one in found), key=_RANKS.index)
    several = len({one for _, one in found}) > 1
    texts = [f"{text} ({one})" if several else text for text, one in found]
    return Judged(sentence.says, "; ".join(texts), verdict)


def values_of(claim: Claim, frame: pd.DataFrame) -> pd.DataFrame:
    """Return what a claim is about: a row per variant and place; `low`, `value` and `high`.

    Measured or counted numbers, and predicted ones where nothing was measured.
    """
    rows = frame[(frame["status"] == "ok") & (frame["scope"] == claim.scope)]
    if claim.mode is not None:
        rows = rows[rows["mode"] == claim.mode]
    if claim.metric not in rows:
        return rows.iloc[:0].assign(low=[], value=[], high=[])
    rows = rows[rows[claim.metric].notna()]
    for source in ("measured", "predicted"):
        if (rows["source"] == source).any():
            rows = rows[rows["source"] == source]
            break
    low, high = ("time_p20_s", "time_p80_s") if claim.metric == _TIME else (claim.metric,) * 2
    numbers = {"low": rows[low], "value": rows[claim.metric], "high": rows[high]}
    rows = rows.assign(**{name: column.astype(float) for name, column in numbers.items()})
    return rows.drop_duplicates(["variant", *_KEYS])


def ratios_of(claim: Claim, config: SweepConfig, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the ratios of a claim's variants to their baselines, with `low` and `high`."""
    values = values_of(claim, frame)
    of_row = ["device", "device_name", "source"]
    columns = ["variant", *_KEYS, "low", "value", "high", *of_row]
    parts = []
    for name in claim.variants or config.variants:
        baseline = config.baseline_of(name)
        if baseline is None:
            continue
        own, base = (values.loc[values["variant"] == n, columns] for n in (name, baseline))
        both = own.merge(base.drop(columns=["variant", *of_row]), on=_KEYS, suffixes=("", "_b"))
        both["low"], both["high"] = both["low"] / both["high_b"], both["high"] / both["low_b"]
        both["value"] = both["value"] / both["value_b"]
        parts.append(both[columns])
    return pd.concat(parts, ignore_index=True) if parts else values[columns].iloc[:0]


def _judge(claim: Claim, config: SweepConfig, frame: pd.DataFrame) -> tuple[str, str]:
    """Return what was found, and the verdict."""
    absolute = claim.within is not None or claim.ordered
    table = values_of(claim, frame) if absolute else ratios_of(claim, config, frame)
    table = _chosen(claim, table)
    wanted = [n for n in claim.variants or config.variants if absolute or config.baseline_of(n)]
    missing = [name for name in wanted if name not in set(table["variant"])]
    what = _WORDS.get(claim.metric, claim.metric)
    what += f", {claim.mode}" if claim.mode else ""
    if missing:
        return f"{what}: no numbers of {', '.join(missing)}", "cannot be told"
    if claim.within is not None or claim.ordered:
        text, verdict = _beside(claim, wanted, table)
    elif claim.falls_over or claim.constant_over:
        text, verdict = _along(claim, table)
    else:
        text, verdict = _bounded(claim, table)
    if claim.metric == _MEMORY and not absolute:
        above = ratios_of(claim.model_copy(update={"metric": _PEAK}), config, frame)
        text += f" (of the peak above resident alone: {_range(_chosen(claim, above))})"
    found = zip(table["device"], table["source"], strict=True)
    silent = [one for one in found if not tells_of_a_gpu(claim.metric, *one)]
    if silent:
        how = "on a CPU" if silent[0][0] == "cpu" else silent[0][1]
        return f"{what}: {text}, {how}; the sentence is about a GPU", "cannot be told"
    return f"{what}: {text}", verdict


def _chosen(claim: Claim, table: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of a claim's variants."""
    return table if claim.variants is None else table[table["variant"].isin(claim.variants)]


def _range(table: pd.DataFrame) -> str:
    told = []
    for name, part in table.groupby("variant", sort=False):
        low, high = part["value"].min(), part["value"].max()
        told.append(f"{name} {low:.3f}" + (f" to {high:.3f}" if high - low >= 5e-4 else ""))
    return "ratio of " + ", ".join(told)


def _bounded(claim: Claim, table: pd.DataFrame) -> tuple[str, str]:
    """Judge `below` and `reaches`."""
    if claim.reaches is not None:
        best = table.loc[table["value"].idxmin()]
        text = f"smallest ratio {best['value']:.3f} ({best['variant']}, {_place(best)})"
        bound = claim.reaches * (1 + 1e-12)
        return text, _of(best["value"], best["low"], best["high"], bound)
    assert claim.below is not None
    bound = claim.below
    verdicts = [
        _of(value, low, high, bound)
        for value, low, high in zip(table["value"], table["low"], table["high"], strict=True)
    ]
    held = int((table["value"] < bound).sum())
    text = f"{_range(table)}; below {bound:g} at {held} of {len(table)} places"
    return text, _weakest(verdicts)


def _of(value: float, low: float, high: float, bound: float) -> str:
    """Return the verdict of a ratio that should be below a bound."""
    if high < bound:
        return "agrees"
    if low >= bound:
        return "differs"
    return "same direction" if value < bound else "cannot be told"


def side_of_one(printed: float, value: float, low: float, high: float) -> str:
    """Say whether a ratio lies on the side of 1 that a printed one lies on.

    Args:
        printed: the printed ratio.
        value: ours.
        low, high: the ends of its spread; equal where nothing varies.
    """
    if printed < 1:
        return _of(value, low, high, 1.0)
    return _of(1 / value, 1 / high, 1 / low, 1.0)


def _weakest(verdicts: Sequence[str]) -> str:
    return min(verdicts, key=_RANKS.index)


def _lines(claim: Claim, table: pd.DataFrame, axis: str) -> list[pd.DataFrame]:
    keys = [k for k in ("variant", *_KEYS) if k != axis]
    if claim.metric.startswith("num_parameters"):  # which length is profiled changes nothing
        keys = [k for k in keys if k not in ("seq_len", "batch_size", "mode")]
    parts = [part.sort_values(axis) for _, part in table.groupby(keys, dropna=False, sort=False)]
    parts = [part.drop_duplicates(axis) for part in parts]
    return [part for part in parts if len(part) > 1]


def _along(claim: Claim, table: pd.DataFrame) -> tuple[str, str]:
    """Judge `falls_over` and `constant_over`."""
    told, verdicts = [_range(table)], []
    for axis in claim.falls_over or claim.constant_over:
        lines = _lines(claim, table, axis)
        if not lines:
            told.append(f"one value of {_LETTERS[axis]}")
            verdicts.append("cannot be told")
            continue
        found = [_line(claim, line) for line in lines]
        verdicts += found
        right = sum(verdict == "agrees" for verdict in found)
        words = "falls with" if claim.falls_over else "does not depend on"
        told.append(f"{words} {_LETTERS[axis]} on {right} of {len(lines)} lines")
    return "; ".join(told), _weakest(verdicts)


def _line(claim: Claim, line: pd.DataFrame) -> str:
    """Verdict of one line along an axis."""
    values, low, high = (line[name].to_list() for name in ("value", "low", "high"))
    has_spread = low != high
    if claim.constant_over:
        if max(values) <= (1 + _CONSTANT) * min(values):
            return "agrees"
        return "cannot be told" if has_spread and max(low) <= min(high) else "differs"
    falls = all(b <= a + 1e-12 for a, b in pairwise(values))
    if not has_spread:
        return "agrees" if falls and values[-1] < values[0] - 5e-4 else "differs"
    if values[-1] < values[0]:
        return "agrees" if falls and high[-1] < low[0] else "same direction"
    return "differs" if low[-1] > high[0] else "cannot be told"


def _beside(claim: Claim, wanted: Sequence[str], table: pd.DataFrame) -> tuple[str, str]:
    """Judge `within` and `ordered`: variants at one place."""
    wide = table.pivot_table(
        index=_KEYS, columns="variant", values="value", dropna=False, observed=True
    )[list(wanted)].dropna()
    if wide.empty:
        return "no place has all variants", "cannot be told"
    if claim.within is not None:
        share = wide.max(axis=1) / wide.min(axis=1) - 1
        text = f"{', '.join(wanted)} differ by {share.min():.1%} to {share.max():.1%}"
        text += f"; by at most {claim.within:.0%} at {int((share <= claim.within).sum())} of "
        return f"{text}{len(share)} places", "agrees" if (
            share <= claim.within
        ).all() else "differs"
    rises = (wide.diff(axis=1).iloc[:, 1:] > 0).all(axis=1)
    text = f"{' < '.join(wanted)} at {int(rises.sum())} of {len(rises)} places"
    return text, "agrees" if rises.all() else "differs"


def _place(row: pd.Series) -> str:
    named = ((letter, row[column]) for column, letter in _LETTERS.items())
    return ", ".join(f"{letter} = {int(value)}" for letter, value in named if pd.notna(value))
