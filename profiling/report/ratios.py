"""Join variant rows with baseline rows: measured and analytic ratios, crossover lengths."""

from __future__ import annotations

import math

import pandas as pd

from profiling.measure.rows import PLACE, SETTING

# Metrics in the order of reports: column, heading, unit divisor, unit.
METRICS: dict[str, tuple[str, float, str]] = {
    "macs": ("multiply-adds", 1e9, "GMAC"),
    "fvcore_operations": ("fvcore count, forward", 1e9, "G"),
    "paper_operations": ("operations by the paper's rule", 1e9, "G"),
    "paper_operations_printed": ("operations as the paper simplifies them", 1e9, "G"),
    "num_parameters": ("parameters", 1e6, "M"),
    "num_parameters_non_embedding": ("parameters without embeddings", 1e6, "M"),
    "peak_memory_bytes": ("peak memory above resident", 2.0**20, "MiB"),
    "resident_memory_bytes": ("resident memory", 2.0**20, "MiB"),
    "memory_bytes": ("total peak memory", 2.0**20, "MiB"),
    "nvml_memory_bytes": ("memory of the process by NVML", 2.0**20, "MiB"),
    "time_median_s": ("time", 1e-3, "ms"),
    "graph_median_s": ("time by CUDA graph", 1e-3, "ms"),
    "energy_j": ("energy", 1.0, "J"),
}

# Metrics that are counted, without running the model; the others depend on the device.
COUNTED = frozenset(
    {
        *("macs", "fvcore_operations", "paper_operations", "paper_operations_printed"),
        *("num_parameters", "num_parameters_non_embedding"),
    }
)


def found_by(metric: str, source: str) -> str:
    """Return the origin of a value: counted, measured, closed form or predicted."""
    if source == "measured":
        return "counted" if metric in COUNTED else "measured"
    return {"analytic": "closed form", "predicted": "predicted"}[source]


COLUMNS = [
    *("metric", "variant", "baseline", *PLACE, *SETTING),
    *("baseline_measured", "variant_measured", "ratio_measured"),
    *("ratio_analytic", "ratio_predicted", "relative_gap"),
]


def tidy(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row per metric and source, for points with status ok."""
    metrics = [m for m in METRICS if m in frame.columns]
    keys = ["variant", "baseline", *PLACE, *SETTING, "source"]
    good = frame[frame["status"] == "ok"]
    long = good.melt(id_vars=keys, value_vars=metrics, var_name="metric", value_name="value")
    long = long.dropna(subset=["value"])
    long["value"] = long["value"].astype(float)
    return long


def ratio_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per metric, point and variant whose baseline was measured at the same point.

    `relative_gap` is measured ratio over analytic (else predicted) ratio, minus one.
    """
    long = tidy(frame)
    if long.empty:
        return pd.DataFrame(columns=COLUMNS)
    keys = ["metric", *PLACE, *SETTING]
    wide = long.pivot_table(
        index=["variant", "baseline", *keys],
        columns="source",
        values="value",
        aggfunc="first",
        dropna=False,
        observed=True,
    ).reset_index()
    sources = ["measured", "analytic", "predicted"]
    wide[[s for s in sources if s not in wide]] = math.nan
    wide = wide.dropna(subset=sources, how="all")
    own = wide[wide["baseline"].notna()]
    base = wide.drop(columns="baseline").rename(columns={"variant": "baseline"})
    joined = own.merge(base, on=["baseline", *keys], suffixes=("", "_base"))
    for source in sources:
        joined[f"ratio_{source}"] = joined[source] / joined[f"{source}_base"]
    expected = joined["ratio_analytic"].fillna(joined["ratio_predicted"])
    joined["relative_gap"] = joined["ratio_measured"] / expected - 1.0
    joined = joined.rename(
        columns={"measured": "variant_measured", "measured_base": "baseline_measured"}
    )
    joined["rank"] = joined["metric"].map(list(METRICS).index)
    joined["place"] = joined["variant"].map(list(frame["variant"].unique()).index)
    joined = joined.sort_values(["rank", "scope", "mode", "place", *PLACE], kind="stable")
    return joined[COLUMNS].reset_index(drop=True)


def crossovers(ratios: pd.DataFrame) -> pd.DataFrame:
    """Return the length from which each variant stays below its baseline.

    Between grid points the ratio is interpolated linearly in log N; there is no extrapolation.
    """
    wanted = ("macs", "time_median_s", "graph_median_s", "peak_memory_bytes", "energy_j")
    rows = []
    keys = ["metric", "variant", "baseline", "embed_dim", "grid_heads", "batch_size", *SETTING]
    table = ratios[ratios["metric"].isin(wanted)]
    for values, group in table.groupby(keys, dropna=False, sort=False):
        line = group.dropna(subset=["ratio_measured"]).sort_values("seq_len")
        if line["seq_len"].nunique() < 2:
            continue
        lengths, measured = line["seq_len"].tolist(), line["ratio_measured"].tolist()
        rows.append(
            {**dict(zip(keys, values, strict=True)), "crossover": _cross(lengths, measured)}
        )
    return pd.DataFrame(rows, columns=[*keys, "crossover"])


def _cross(lengths: list[int], ratios: list[float]) -> str:
    if ratios[-1] >= 1.0:
        return "never within the grid"
    i = max((i for i, r in enumerate(ratios) if r >= 1.0), default=-1)
    if i < 0:
        return "always within the grid"
    share = (ratios[i] - 1.0) / (ratios[i] - ratios[i + 1])
    low, high = math.log(lengths[i]), math.log(lengths[i + 1])
    return f"N ≈ {math.exp(low + share * (high - low)):.0f}"


def relative_errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Return expected / measured - 1 for all points with both values."""
    long = tidy(frame)
    keys = ["variant", *PLACE, "mode", "backend", "dtype", "scope", "metric"]
    measured = long[long["source"] == "measured"]
    expected = long[long["source"] != "measured"]
    both = expected.merge(measured, on=keys, suffixes=("", "_measured"))
    both["error"] = both["value"] / both["value_measured"] - 1.0
    return both
