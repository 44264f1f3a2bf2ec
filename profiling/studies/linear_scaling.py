"""Time and memory of causal linear attention over the length, beside PyTorch's fused softmax.

    python -m profiling study linear_scaling --mode forward_backward --out FOLDER

Softmax and linear attention with 8 heads, MLK and sMLK with 4, head size 32, width 64, one sequence
(the sizes of the Long Range Arena experiments); projections included. All sides run in turns in one
process; the tables give medians and ratios to softmax at the same length with 20 % and 80 %
quantiles, and the exponent of a straight line through log time (memory) over log length.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch

from lit_probattn.attention import Attention, LinearAttention, MLKAttention, SoftmaxAttention
from lit_probattn.records.tables import counted
from profiling.studies.study import TIMED, Report, command, flag, measure_sides, shown

LENGTHS = (1024, 2048, 4096, 8192, 16384)
WIDTH, HEAD = 64, 32


def build_sides(device: torch.device) -> dict[str, Attention]:
    """Return the layers by name: same head size, half the heads for mixtures."""
    layers: dict[str, Attention] = {
        "softmax (fused)": SoftmaxAttention(WIDTH, 8, head_dim=HEAD, backend="sdpa"),
        "linear": LinearAttention(WIDTH, 8, head_dim=HEAD, backend="blockwise"),
        "mlk": MLKAttention(WIDTH, 4, head_dim=HEAD, backend="blockwise"),
        "smlk": MLKAttention(WIDTH, 4, head_dim=HEAD, backend="blockwise", shifted_keys=True),
    }
    return {name: layer.to(device) for name, layer in layers.items()}


def call(layer: Attention, x: torch.Tensor, mode: str) -> None:
    """Run one forward pass, or one forward and backward pass, over `x`."""
    layer.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(mode != "forward"):
        out = layer(x, is_causal=True)
    if mode != "forward":
        out.square().mean().backward()


def fitted_exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """Return the least-squares slope of log value over log length, or raise a ValueError."""
    if len(lengths) < 2 or min(values) <= 0:
        raise ValueError(
            f"an exponent needs two lengths and positive values, received {list(lengths)} and "
            f"{list(values)}"
        )
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def run(options: argparse.Namespace) -> Report:
    """Measure every side at every length; lengths take turns as well."""
    device = torch.device(options.device)
    layers = build_sides(device)
    calls = {
        (name, n): partial(call, layer, torch.randn(1, n, WIDTH, device=device), options.mode)
        for n in options.lengths
        for name, layer in layers.items()
    }
    found = measure_sides(calls, options, lambda side: {"softmax": ("softmax (fused)", side[1])})
    rows = pd.DataFrame(
        {"side": name, "seq_len": n, "mode": options.mode, **found[name, n]} for name, n in calls
    )
    columns = {"time": "time_median_s", "memory": "peak_memory_bytes"}
    exponents = [
        {"side": side, **{k: fitted_exponent(options.lengths, part[c]) for k, c in columns.items()}}
        for side, part in rows.groupby("side", sort=False)
        if len(options.lengths) > 1
    ]
    tables = {f"One sequence, {options.mode}": shown(rows, "side", "seq_len")}
    if exponents:
        tables["Exponent of time and of memory over the length"] = pd.DataFrame(exponents)
    notes = [
        f"{counted(torch.get_num_threads(), 'thread')}, {counted(options.repeats, 'round')}",
        "Attention dropout 0 on all sides; backends: "
        + ", ".join(f"{name}: {layer.core.backend}" for name, layer in layers.items()),
    ]
    title = "Causal linear attention beside fused softmax"
    return Report(title, rows, tables, notes, ("seq_len", "time_over_softmax", "side"))


main = command(
    __name__,
    __doc__,
    run,
    {
        **TIMED,
        "lengths": flag(list(LENGTHS), "positions", least=1),
        "mode": flag("forward", "what is timed", choices=("forward", "forward_backward")),
    },
)
