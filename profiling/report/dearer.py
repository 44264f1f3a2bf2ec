"""What a report must say first: where a variant costs more than the attention it replaces."""

from __future__ import annotations

import json

import pandas as pd

from lit_probattn.attention.fish.cost import break_even_head_dim
from profiling.report.ratios import METRICS, PLACE

_COSTS = ("macs", "num_parameters", "peak_memory_bytes", "time_median_s", "energy_j")
_LETTERS = {"embed_dim": "D", "seq_len": "N", "grid_heads": "H", "batch_size": "B"}


def dearer_lines(frame: pd.DataFrame, ratios: pd.DataFrame) -> list[str]:
    """Return one line per variant and quantity that exceeds its baseline somewhere in the grid.

    Args:
        frame: the rows of a sweep.
        ratios: their ratios.

    Returns:
        Lines of Markdown; for FiSH, also the head size below which a pair of positions costs more.
    """
    if ratios.empty:
        return []
    lines = []
    ratio = ratios["ratio_measured"].fillna(ratios["ratio_analytic"])
    ratio = ratio.fillna(ratios["ratio_predicted"])
    table = ratios.assign(ratio=ratio)
    table = table[table["metric"].isin(_COSTS) & table["ratio"].notna()]
    keys = ["metric", "variant", "baseline", "scope", "mode"]
    varying = [c for c in PLACE if table[c].nunique(dropna=False) > 1]
    for (metric, variant, baseline, scope, mode), group in table.groupby(keys, sort=False):
        above = group[group["ratio"] > 1.0]
        if above.empty:
            continue
        worst = above.loc[above["ratio"].idxmax()]
        place = ", ".join(f"{_LETTERS[c]} = {worst[c]}" for c in varying)
        line = f"**{variant} costs more than {baseline}**: {METRICS[str(metric)][0]}, {scope}, "
        line += (
            f"{mode}, at {len(above)} of {len(group)} places; at most {worst['ratio']:.4g} times"
        )
        lines.append(line + (f" ({place})." if place else "."))
    return [*lines, *_break_even(frame)]


def _break_even(frame: pd.DataFrame) -> list[str]:
    """Say at which of the head sizes the N² term of a FiSH variant exceeds that of MHA.

    The N² term of the scores by the paper's rule; projections are the N term, which is always
    smaller with fewer global heads.
    """
    rows = frame[frame["attention_class"] == "FiSHAttention"]
    lines = []
    for variant, group in rows.groupby("variant", sort=False):
        first = group.iloc[0]
        arguments = json.loads(first["attention_args"])
        heads, num_global = int(first["num_heads"]), arguments.get("num_global_heads")
        mixer = arguments.get("mixer", "linear")
        plain = not arguments.get("mixer_ratios") and mixer != "relu_sum"
        if num_global is None or not plain or num_global >= heads:
            continue
        limit = break_even_head_dim(
            heads,
            num_global,
            mixer,
            arguments.get("noise", "global"),
            arguments.get("mixing_bias", "hidden"),
        )
        sizes = sorted(int(s) for s in group["head_dim"].unique())
        dear = [str(s) for s in sizes if s < limit]
        if dear:
            lines.append(
                f"{variant}: the N² term of the scores is above that of {heads}-head attention "
                f"for head sizes below {limit:.4g}, here {', '.join(dear)} (the N term is always "
                "below)."
            )
    return lines
