"""Two sweeps side by side: the same points on other hardware, versions or code."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lit_probattn.records.tables import markdown_lines
from profiling.measure.rows import RowsError, to_frame
from profiling.report.ratios import METRICS, PLACE, tidy


def compare_sweeps(first: Path, second: Path, out: Path) -> Path:
    """Write compare.md and compare.csv: measured values of B over A at every common place.

    Raises:
        RowsError: one has no rows, or they have no place in common.
    """
    from profiling.report.page import load_results

    frames = {name: to_frame(load_results(path)) for name, path in (("A", first), ("B", second))}
    keys = ["variant", *PLACE, "mode", "backend", "dtype", "scope", "metric"]
    tables = {}
    for name, frame in frames.items():
        long = tidy(frame)
        tables[name] = long[long["source"] == "measured"][[*keys, "value"]]
    both = tables["A"].merge(tables["B"], on=keys, suffixes=("_a", "_b"))
    if both.empty:
        raise RowsError(f"{first} and {second} have no measured point in common")
    both["b_over_a"] = both["value_b"] / both["value_a"]
    out.mkdir(parents=True, exist_ok=True)
    both.to_csv(out / "compare.csv", index=False, float_format="%.8g")
    lines = ["# Two sweeps side by side", "", f"- A: {first}", f"- B: {second}", ""]
    facts = []
    for column in ("device_name", "versions", "git_revision", "sweep"):
        values = {n: " | ".join(sorted(map(str, f[column].unique()))) for n, f in frames.items()}
        facts.append({"": column, **values})
    lines += [*markdown_lines(pd.DataFrame(facts)), ""]
    rows = []
    for (metric, scope, variant), group in both.groupby(["metric", "scope", "variant"], sort=False):
        rows.append(
            {
                "quantity": METRICS[str(metric)][0],
                "scope": scope,
                "variant": variant,
                "points": len(group),
                "equal": int((group["value_a"] == group["value_b"]).sum()),
                "B / A, median": f"{group['b_over_a'].median():.4f}",
                "smallest": f"{group['b_over_a'].min():.4f}",
                "largest": f"{group['b_over_a'].max():.4f}",
            }
        )
    lines += [*markdown_lines(pd.DataFrame(rows)), ""]
    only = {n: len(t) - len(both) for n, t in tables.items()}
    lines += [f"Values in A only: {only['A']}; in B only: {only['B']}."]
    path = out / "compare.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
