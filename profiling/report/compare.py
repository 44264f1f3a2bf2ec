"""Comparison of two sweeps: the same points with different hardware, versions or code."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from lit_probattn.base.config_files import output_folder
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import replace_text
from lit_probattn.base.provenance import command_line
from lit_probattn.records.markdown import code_span, one_line
from lit_probattn.records.tables import markdown_lines
from profiling.measure.rows import to_frame
from profiling.report.page import load_results
from profiling.report.ratios import METRICS, PLACE, tidy


def compare_sweeps(first: Path, second: Path, out: Path) -> Path:
    """Write compare.md and compare.csv with B / A at every common point, or raise a ConfigError."""
    frames = {name: to_frame(load_results(path)) for name, path in (("A", first), ("B", second))}
    keys = ["variant", *PLACE, "mode", "backend", "dtype", "scope", "metric"]
    long = {name: tidy(frame) for name, frame in frames.items()}
    tables = {n: t.loc[t["source"] == "measured", [*keys, "value"]] for n, t in long.items()}
    both = tables["A"].merge(tables["B"], on=keys, suffixes=("_a", "_b"))
    if both.empty:
        raise ConfigError(f"{first} and {second} have no measured point in common")
    both["b_over_a"] = both["value_b"] / both["value_a"]
    output_folder(out)
    replace_text(out / "compare.csv", both.to_csv(index=False, float_format="%.8g"))
    lines = [
        "# Comparison of two sweeps",
        "",
        f"- Command: {code_span(command_line())}",
        f"- A: {one_line(first)}",
        f"- B: {one_line(second)}",
        "",
    ]
    facts = []
    for column in ("device_name", "versions", "git_revision", "sweep"):
        values = {n: " | ".join(sorted(map(str, f[column].unique()))) for n, f in frames.items()}
        facts.append({"": column, **values})
    lines += [*markdown_lines(pd.DataFrame(facts)), ""]
    rows = [
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
        for (metric, scope, variant), group in both.groupby(
            ["metric", "scope", "variant"], sort=False
        )
    ]
    lines += [*markdown_lines(pd.DataFrame(rows)), ""]
    only = {n: len(t) - len(both) for n, t in tables.items()}
    lines += [f"Values in A only: {only['A']}; in B only: {only['B']}."]
    path = out / "compare.md"
    replace_text(path, "\n".join(lines) + "\n")
    return path
