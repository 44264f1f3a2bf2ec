"""A model of this package beside the same written as released: time and memory of a step."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

import pandas as pd
import torch

from lit_probattn.records.tables import markdown_lines
from profiling.kernels.command import header
from profiling.kernels.config import KernelsConfig, Mode, Side
from profiling.stages.place import Phase, Place, hardware
from profiling.stages.units import Row, Unit
from profiling.stages.warm import compile_units
from profiling.studies.step_ratio import TOLERANCE, VARIANTS, measure
from profiling.studies.study import shown
from profiling.sweep.config import AttentionEntry

# Mode and rate of attention dropout.
_CALLS: tuple[tuple[Mode, float], ...] = (("train", 0.1), ("train", 0.0), ("eval", 0.0))
_LENGTH, _BATCH, _HEAD_DIM = 2000, 16, 32


def released(place: Place) -> list[Phase]:
    """Return a unit for training with each rate of dropout, and one for inference."""
    compiling = [
        unit
        for mode, rate in _CALLS
        for unit in compile_units([_kernels(mode, rate)], place.capability)
    ]
    timing = [
        Unit(_name(mode, rate), partial(_beside_released, place, mode, rate), 20, 2 * len(VARIANTS))
        for mode, rate in _CALLS
    ]
    return [Phase(compiling, place.cores), Phase(timing)]


def _name(mode: Mode, rate: float) -> str:
    return f"training step, attention dropout {rate:g}" if mode == "train" else "inference"


def _kernels(mode: Mode, rate: float) -> KernelsConfig:
    """Return the attention of the models by itself, from which kernels are compiled ahead."""
    entries = {
        f"{name}, dropout {rate:g}": AttentionEntry(
            config=f"configs/attention/{config}.yaml",
            init_args={"num_heads": heads, "dropout": rate},
        )
        for name, (config, heads) in VARIANTS.items()
    }
    return KernelsConfig(
        mode=mode,
        batch_size=_BATCH,
        seq_len=_LENGTH,
        head_dim=_HEAD_DIM,
        sides={name: Side(attention=x, backend="triton") for name, x in entries.items()},
        comparisons=[],
    )


def _beside_released(place: Place, mode: Mode, rate: float) -> list[Row]:
    """Return a row per variant and form; of a form that does not fit the memory, why."""
    sizes = {"length": 32, "batch": 2, "warmup": 1, "repeats": 1}
    if not place.rehearses:
        sizes = {"length": _LENGTH, "batch": _BATCH, "warmup": 2, "repeats": 10}
    torch.manual_seed(0)
    options = Namespace(device=place.device, mode=mode, max_seconds=20.0, **sizes)
    rows, difference = measure(options, rate)
    known = [{name: x for name, x in row.items() if not pd.isna(x)} for row in rows]
    return [{"mode": mode, **row, "largest_difference": difference} for row in known]


def released_page(place: Place, rows: list[Row]) -> str:
    """Return a page with a table per unit."""
    good = [row for row in rows if "form" in row]
    facts = [
        f"Hardware: {hardware(place)}",
        "ListOps of the Long Range Arena, float32, the same weights: `package`, as this package "
        "computes it, beside `plain`, the formulas of the released code with the square expanded "
        "and every N x N map stored (`python -m profiling study step_ratio`)",
        f"Logits of the two forms differ by at most {TOLERANCE:g}, or nothing is measured",
        "Ratios are those within a round; `time / softmax` is over softmax in the same form",
    ]
    if not place.rehearses:
        facts.append(f"{_BATCH} sequences of {_LENGTH:,} tokens")
    lines = header("A model of this package beside the same written as released", facts)
    lines += [f"- {r['unit']}: {r['reason']}" for r in rows if r["status"] == "failed"]
    for name in dict.fromkeys(row["unit"] for row in good):
        here = pd.DataFrame([row for row in good if row["unit"] == name])
        lines += ["", f"## {name}", ""]
        fitting = here[here["time_median_s"].notna()] if "time_median_s" in here else here[:0]
        if len(fitting):
            lines += markdown_lines(shown(fitting, "variant", "form", "backend"))
        lost = here[here["failed"].notna()] if "failed" in here else here[:0]
        if len(lost):
            lines += ["", *(f"- {x.variant}, {x.form}: {x.failed}" for x in lost.itertuples())]
    return "\n".join(lines)
