"""The reason for a missed gate: the kernels on which sides of gates spend their time."""

from __future__ import annotations

from functools import partial
from itertools import product

import pandas as pd
import torch

from lit_probattn.records.tables import markdown_lines
from profiling.kernels.command import header
from profiling.kernels.config import KernelsConfig
from profiling.kernels.speed import place_name, side_function
from profiling.measure.breakdown import device_breakdown
from profiling.stages.place import Phase, Place, hardware
from profiling.stages.speed import gate_config, gate_points, gated
from profiling.stages.units import Row, Unit

_CALLS, _MOST = 5, 12


def profile(place: Place) -> list[Phase]:
    """Return a unit for every side that a gate names and every point of `gate_points`.

    Kernels were compiled by the stages of speed.
    """
    config = gate_config(place)
    names = dict.fromkeys(name for c in gated(config) for name in (c.side, c.against))
    pairs = product(gate_points(config, place), names)
    return [Phase([_unit(point, name) for point, name in pairs])]


def _unit(point: KernelsConfig, name: str) -> Unit:
    key = f"{place_name(point)}: {name}"
    return Unit(key, partial(_profiled, point, name), 2.5, _MOST + 1)


def _profiled(point: KernelsConfig, name: str) -> list[Row]:
    """Return a row per kernel of a side, by time; what is compiled or loaded late is left out."""
    function = side_function(point.sides[name], point)
    function()
    parts = device_breakdown(function, torch.device(point.device), _CALLS, _MOST)
    return [{"place": place_name(point), "side": name, **vars(part)} for part in parts]


def profile_page(place: Place, rows: list[Row]) -> str:
    """Return a page with a table per place, of the kernels of all sides."""
    facts = [
        f"Hardware: {hardware(place)}",
        f"The mean of {_CALLS} calls from Python, after one. In brackets: the device's time for a "
        "call, without gaps between kernels",
        *(["On the CPU: operations, without those that they call"] if place.rehearses else []),
    ]
    lines = header("Kernels on which the sides of gates spend their time", facts)
    lines += [f"- {row['unit']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    good = [row for row in rows if row["status"] == "ok"]
    for where in dict.fromkeys(row["place"] for row in good):
        here = [row for row in good if row["place"] == where]
        shown = [
            line
            for side in dict.fromkeys(row["side"] for row in here)
            for line in _side_lines(side, [row for row in here if row["side"] == side])
        ]
        lines += ["", f"## {where}", "", *markdown_lines(pd.DataFrame(shown))]
    return "\n".join(lines)


def _side_lines(side: str, rows: list[Row]) -> list[Row]:
    """Return the lines of a side; the first names it."""
    total = sum(row["microseconds"] for row in rows)
    return [
        {
            "side": "" if index else f"{side} ({total:.0f} µs)",
            "kernel": row["kernel"],
            "µs per call": f"{row['microseconds']:.1f}",
            "launches": f"{row['launches']:g}",
            "share": f"{row['share']:.0%}",
        }
        for index, row in enumerate(rows)
    ]
