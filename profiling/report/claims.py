"""Claims of a paper about cost, judged by the rows of a sweep.

Verdicts come from `lit_probattn.experiments.expectations`. Counts have no spread; the spread of a
time is the spread of its repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pandas as pd

from lit_probattn.experiments.expectations import (
    VERDICTS,
    Estimate,
    Finding,
    Verdict,
    along,
    combined,
    is_comparable,
    missing,
    weakest,
)
from profiling.measure.rows import PLACE, SETTING
from profiling.report.names import LETTERS
from profiling.report.ratios import COUNTED, METRICS
from profiling.sweep.config import Claim, Sentence, SweepConfig

_MEMORY, _PEAK = "memory_bytes", "peak_memory_bytes"
_TIME = "time_median_s"
_KEYS = [*PLACE, *SETTING]
_CONSTANT = 0.01
_DIGITS = 12  # equal ratios of counts may differ in the last bits


def device_of(metric: str) -> str:
    """Return the device that a metric depends on; empty for counted metrics."""
    return "cuda" if metric in METRICS.keys() - COUNTED else ""


def judge(sentence: Sentence, config: SweepConfig, frame: pd.DataFrame) -> Finding:
    """Judge a sentence of a sweep.

    Args:
        sentence: the sentence.
        config: the sweep.
        frame: its rows.
    """
    parts = [_judge(claim, config, frame) for claim in sentence.holds]
    return combined(parts, sentence.says)


def values_of(claim: Claim, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the values of a claim: a row per variant and point with `low`, `value` and `high`.

    Values are measured or counted, or predicted if they were not measured.
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
    of_row = ["device", "source"]
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


def estimates(table: pd.DataFrame) -> list[Estimate]:
    """Return one estimate per row from the columns `value`, `low` and `high`."""
    columns = (table[name].round(_DIGITS) for name in ("value", "low", "high"))
    return [Estimate(*numbers) for numbers in zip(*columns, strict=True)]


def _judge(claim: Claim, config: SweepConfig, frame: pd.DataFrame) -> Finding:
    absolute = claim.within is not None or claim.ordered
    table = values_of(claim, frame) if absolute else ratios_of(claim, config, frame)
    table = _chosen(claim, table)
    wanted = [n for n in claim.variants or config.variants if absolute or config.baseline_of(n)]
    lacking = [name for name in wanted if name not in set(table["variant"])]
    what = METRICS[claim.metric][0] if claim.metric in METRICS else claim.metric
    what += f", {claim.mode}" if claim.mode else ""
    if not wanted:
        return missing(f"{what}: no variant with a baseline")
    if lacking:
        return missing(f"{what}: no values of {', '.join(lacking)}")
    if absolute:
        found = _beside(claim, wanted, table)
    elif claim.falls_over or claim.constant_over:
        found = _along(claim, table)
    else:
        found = _bounded(claim, table)
    text = f"{what}: {found.measured}"
    if claim.metric == _MEMORY and not absolute:
        above = ratios_of(claim.model_copy(update={"metric": _PEAK}), config, frame)
        text += f" (peak above resident memory: {_range(_chosen(claim, above))})"
    found = replace(found, measured=text)
    needed, origins = device_of(claim.metric), zip(table["device"], table["source"], strict=True)
    silent = [one for one in origins if not is_comparable(needed, *one)]
    if silent:
        how = "on a CPU" if silent[0][0] == "cpu" else silent[0][1]
        return missing(f"{text}, {how}; the claim is about a GPU")
    return found


def _chosen(claim: Claim, table: pd.DataFrame) -> pd.DataFrame:
    return table if claim.variants is None else table[table["variant"].isin(claim.variants)]


def _range(table: pd.DataFrame) -> str:
    told = []
    for name, part in table.groupby("variant", sort=False):
        low, high = part["value"].min(), part["value"].max()
        told.append(f"{name} {low:.3f}" + (f" to {high:.3f}" if high - low >= 5e-4 else ""))
    return "ratio of " + ", ".join(told)


def _bounded(claim: Claim, table: pd.DataFrame) -> Finding:
    """Judge `below` and `reaches`."""
    found = estimates(table)
    if claim.reaches is not None:
        best = min(found, key=lambda one: one.value)
        row = table.iloc[found.index(best)]
        text = f"smallest ratio {best.value:.3f} ({row['variant']}, {_place(row)})"
        verdicts = [one.side(-1, claim.reaches, strict=False) for one in found]
        return Finding(text, max(verdicts, key=VERDICTS.index), estimate=best)
    assert claim.below is not None
    held = sum(one.value < claim.below for one in found)
    text = f"{_range(table)}; below {claim.below:g} at {held} of {len(table)} points"
    return Finding(text, weakest([one.side(-1, claim.below) for one in found]))


def _lines(claim: Claim, table: pd.DataFrame, axis: str) -> list[pd.DataFrame]:
    keys = [k for k in ("variant", *_KEYS) if k != axis]
    if claim.metric.startswith("num_parameters"):  # independent of the profiled length
        keys = [k for k in keys if k not in ("seq_len", "batch_size", "mode")]
    parts = [part.sort_values(axis) for _, part in table.groupby(keys, dropna=False, sort=False)]
    parts = [part.drop_duplicates(axis) for part in parts]
    return [part for part in parts if len(part) > 1]


def _along(claim: Claim, table: pd.DataFrame) -> Finding:
    """Judge `falls_over` and `constant_over`."""
    told, verdicts = [_range(table)], []
    for axis in claim.falls_over or claim.constant_over:
        lines = [estimates(line) for line in _lines(claim, table, axis)]
        if not lines:
            told.append(f"only one value of {LETTERS[axis]}")
            verdicts.append(missing().verdict)
            continue
        judge_line = _falls if claim.falls_over else _is_constant
        found = [judge_line(line) for line in lines]
        verdicts += found
        words = "falls with" if claim.falls_over else "does not depend on"
        told.append(f"{words} {LETTERS[axis]} on {found.count('agrees')} of {len(lines)} lines")
    return Finding("; ".join(told), weakest(verdicts))


def _falls(line: Sequence[Estimate]) -> Verdict:
    steps = [_step(before, after) for before, after in pairwise(line)]
    return along(steps, _step(line[0], line[-1]), -1)


def _is_constant(line: Sequence[Estimate]) -> Verdict:
    return _extent(line).side(-1, 1 + _CONSTANT, strict=False)


def _step(before: Estimate, after: Estimate) -> Estimate:
    return Estimate(after.value - before.value, after.low - before.high, after.high - before.low)


def _extent(numbers: Sequence[Estimate]) -> Estimate:
    """Return the ratio of the largest to the smallest estimate."""
    values, lows, highs = zip(*((one.value, one.low, one.high) for one in numbers), strict=True)
    return Estimate(max(values) / min(values), max(lows) / min(highs), max(highs) / min(lows))


def _beside(claim: Claim, wanted: Sequence[str], table: pd.DataFrame) -> Finding:
    """Judge `within` and `ordered`: variants at the same point."""
    places = []
    for _, part in table.groupby(_KEYS, dropna=False, sort=False):
        rows = dict(zip(part["variant"], estimates(part), strict=True))
        if set(wanted) <= set(rows):
            places.append([rows[name] for name in wanted])
    if not places:
        return missing("no point has all variants")
    if claim.within is not None:
        extents = [_extent(numbers) for numbers in places]
        found = [one.side(-1, 1 + claim.within, strict=False) for one in extents]
        shares = [one.value - 1 for one in extents]
        held = sum(share <= claim.within for share in shares)
        text = f"{', '.join(wanted)} differ by {min(shares):.1%} to {max(shares):.1%}; "
        text += f"by at most {claim.within:.0%} at {held} of {len(places)} points"
        return Finding(text, weakest(found))
    steps = [[_step(a, b) for a, b in pairwise(numbers)] for numbers in places]
    rises = sum(all(step.value > 0 for step in line) for line in steps)
    text = f"{' < '.join(wanted)} at {rises} of {len(places)} points"
    return Finding(text, weakest([step.side(1) for line in steps for step in line]))


def _place(row: pd.Series) -> str:
    named = ((letter, row[column]) for column, letter in LETTERS.items())
    return ", ".join(f"{letter} = {int(value)}" for letter, value in named if pd.notna(value))
