"""Tables of measured costs: printed and measured numbers, and ratios to the baseline.

An absolute number is judged only on the paper's device. A ratio to the baseline requires a GPU
unless it is counted. Its printed value is known to the rounding of the printed parts, and its order
is right if both values are on the same side of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import CHEAPER, dot, label, label_rows, marker_legend, tiles
from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.compare.tables import Part, Row, printed_numbers
from lit_probattn.experiments.expectations import (
    Estimate,
    Finding,
    Printed,
    Verdict,
    digits_of,
    is_comparable,
)
from lit_probattn.experiments.page import Page, as_csv, image
from lit_probattn.records.figures import ReportFigure, colour_of
from lit_probattn.records.tables import markdown_lines
from lit_probattn.reproduce.figures.sweeps import SweepFigure
from profiling.report.claims import device_of
from profiling.report.figures import plain_names
from profiling.report.page import page_of
from profiling.sweep.config import SweepConfig

_TIME = "time_median_s"
_LEGEND = (
    "Printed numbers were measured on the paper's device ({device}); the verdict on a number "
    "from another device is *inconclusive*. Ratios to the baseline are judged only if they were "
    "measured on a GPU; a printed ratio has the rounding of its parts, and its order is whether "
    "it is above or below 1. {places}"
)


@dataclass(frozen=True)
class Ours:
    """A number of a sweep with the spread of its repeats, its origin and its device."""

    estimate: Estimate
    source: str
    batch_size: int
    device: str
    device_name: str


@dataclass(frozen=True)
class SweepTable(SweepFigure):
    """A table of `kind: sweep_table`; see configs/reproduce/mgk_table7.yaml.

    Args:
        part, runs, command: as in SweepFigure; `part["sweeps"]` is the one sweep.
    """

    @property
    def config(self) -> SweepConfig:
        """The sweep."""
        (config,) = self.sweeps.values()
        return config

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Rows of the sweep with scope model."""
        (frame,) = self.frames.values()
        return frame[(frame["status"] == "ok") & (frame["scope"] == "model")]

    # ---- measured numbers ----------------------------------------------------------------------

    def found(self, variant: str, metric: str, batch_size: int, source: str) -> Ours | None:
        """Return a variant's number at one point, with the first backend of the grid."""
        rows = self.frame[(self.frame["variant"] == variant) & self.frame[metric].notna()]
        rows = rows[(rows["batch_size"] == batch_size) & (rows["source"] == source)]
        backend = self.config.variants[variant].backend or self.config.grid.backend[0]
        rows = rows[rows["backend"] == backend]
        if rows.empty:
            return None
        row = rows.iloc[0]
        low, high = ("time_p20_s", "time_p80_s") if metric == _TIME else (metric, metric)
        value, least, most = (float(row[name]) for name in (metric, low, high))
        number = Estimate(value, least, most)
        where = (str(row["device"]), str(row["device_name"]))
        return Ours(number, source, batch_size, *where)

    def value(self, variant: str, metric: str) -> Ours | None:
        """Return the measured, otherwise the predicted number at the printed batch size."""
        size = self.part["batch_size"]
        both = (self.found(variant, metric, size, source) for source in ("measured", "predicted"))
        return next((one for one in both if one is not None), None)

    def ratio(self, variant: str, metric: str) -> Ours | None:
        """Return the ratio to the baseline at the first batch size with both, of one device."""
        base = self.config.baseline_of(variant)
        sizes = dict.fromkeys([self.part["batch_size"], *self.config.grid.batch_size])
        for size in sizes if base is not None else ():
            for source in ("measured", "predicted"):
                own = self.found(variant, metric, size, source)
                other = self.found(str(base), metric, size, source)
                if own is None or other is None:
                    continue
                if own.device_name == other.device_name:
                    return replace(own, estimate=own.estimate.over(other.estimate))
        return None

    # ---- comparison ----------------------------------------------------------------------------

    @cached_property
    def printed(self) -> dict[tuple[str, str], str]:
        """The printed numbers, by variant and number.

        Raises:
            ConfigError: published.csv and the table differ in their rows or numbers.
        """
        name = self.part.name
        names = {tuple(heads): variant for variant, heads in self.part["rows"].items()}
        found: dict[tuple[str, str], str] = {}
        for key, text in printed_numbers(name, self.part.folder).items():
            _, method, heads, number, _ = key
            if (method, heads) not in names or number not in self.part["numbers"]:
                raise ConfigError(f"{name}: missing {method}, {heads}, {number}")
            found[names[method, heads], number] = text
        for variant in self.part["rows"]:
            if variant not in self.config.variants:
                hint = nearest(variant, self.config.variants)
                raise ConfigError(f"{name}: unknown variant {variant!r} of the sweep{hint}")
            for number in self.part["numbers"]:
                if (variant, number) not in found:
                    raise ConfigError(f"{name}: published.csv: missing {number} of {variant}")
        return found

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per printed number."""
        return pd.DataFrame(
            [
                self._entry(variant, name, entry)
                for name, entry in self.part["numbers"].items()
                for variant in self.part["rows"]
            ]
        )

    def _entry(self, variant: str, name: str, number: Mapping[str, Any]) -> dict[str, Any]:
        text, scale = self.printed[variant, name], float(number.get("scale", 1.0))
        ours, ratio = self.value(variant, number["metric"]), self.ratio(variant, number["metric"])
        base, printed = self.config.baseline_of(variant), Printed.read(text)
        found = None if ours is None else ours.estimate.over(Estimate.exact(scale))
        needed = device_of(number["metric"])
        verdict: Verdict = "inconclusive"
        if ours is not None and found is not None:
            paper = needed and self.part["device"]
            if is_comparable(paper, ours.device_name, ours.source):
                verdict = found.near(printed)
        entry: dict[str, Any] = {
            "variant": variant,
            "number": name,
            "words": number["words"],
            "digits": digits_of(text),
            "published": printed.value,
            "ours": None if found is None else found.value,
            "source": None if ours is None else ours.source,
            "deviation": None if found is None else found.value - printed.value,
            "verdict": verdict,
            "baseline": base,
        }
        if base is None:
            return entry
        printed_ratio = printed.over(Printed.read(self.printed[base, name]))
        return entry | {
            "ratio_published": printed_ratio.value,
            "ratio": None if ratio is None else ratio.estimate.value,
            "ratio_source": None if ratio is None else ratio.source,
            "ratio_batch_size": None if ratio is None else ratio.batch_size,
            "ratio_verdict": ratio_verdict(printed_ratio, ratio, needed),
        }

    # ---- writing -------------------------------------------------------------------------------

    @property
    def lines(self) -> list[str]:
        """The table as Markdown."""
        shown = []
        for entry in self.table.to_dict("records"):
            digits, absent = entry["digits"], pd.isna(entry["ours"])
            source = "" if entry["source"] != "predicted" else " (predicted)"
            method, heads = self.part["rows"][entry["variant"]]
            line = {
                "method": Row("", method, heads, "").label,
                "number": entry["words"],
                "published": f"{entry['published']:.{digits}f}",
                "ours": None if absent else f"{entry['ours']:.{digits}f}{source}",
                "ours − published": None if absent else f"{entry['deviation']:+.{digits}f}",
                "verdict": entry["verdict"],
                "baseline": entry["baseline"],
            }
            if pd.notna(entry["baseline"]):
                line |= self._ratio_columns(entry)
            shown.append(line)
        return markdown_lines(pd.DataFrame(shown))

    def _ratio_columns(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        ours = None
        if pd.notna(entry["ratio"]):
            size = int(entry["ratio_batch_size"])
            notes = [entry["ratio_source"]] if entry["ratio_source"] == "predicted" else []
            notes += [f"batch of {size}"] if size != self.part["batch_size"] else []
            ours = f"{entry['ratio']:.3f}" + (f" ({', '.join(notes)})" if notes else "")
        return {
            "published ratio": f"{entry['ratio_published']:.3f}",
            "our ratio": ours,
            "verdict on the ratio": entry["ratio_verdict"],
        }

    def text(self) -> list[str]:
        """Return the section of the report: table, legend, figure."""
        size = self.part["batch_size"]
        others = [one for one in self.config.grid.batch_size if one != size]
        places = f"Batch size {size}"
        if others:
            smaller = ", ".join(map(str, others))
            places += f", or {smaller} where noted, since larger batches do not fit into memory"
        legend = _LEGEND.format(device=self.part["device"], places=f"{places}.")
        return [
            *("## Published and reproduced values", "", *self.lines, "", legend, ""),
            *(image("printed"), ""),
        ]

    def printed_figure(self) -> ReportFigure:
        """Return the figure of printed and measured ratios to the baseline."""
        known = self.table[self.table["baseline"].notna()]
        told, names = [], plain_names(self.frame)
        for name in self.part["numbers"]:
            part = known[known["number"] == name]
            below = int((part["ratio"] < 1).sum())
            printed = int((part["ratio_published"] < 1).sum())
            what = part["words"].iloc[0].partition(",")[0].capitalize()
            told.append(
                f"{what}: {below} of {part['ratio'].count()} ratios below 1 (published: {printed} "
                f"of {len(part)})"
            )
        ours = ", ".join(sorted(set(self.frame.loc[self.frame[_TIME].notna(), "device_name"])))
        bases = " or ".join(dict.fromkeys(names[base] for base in known["baseline"]))
        is_judged = {*self.table["verdict"], *known["ratio_verdict"]} != {"inconclusive"}
        devices = "" if is_judged else "The devices differ, so the comparison is inconclusive. "
        caption = (
            f"Ratios to {bases}; below 1 is cheaper. Diamonds: published, one value each, on "
            f"{self.part['device']}; dots: reproduced, on {ours or 'no device'}. {devices}"
            "Dots are medians with the 20 % and 80 % "
            "quantiles of repeated measurements as error bars; peak memory does not vary."
        )
        return ReportFigure(". ".join(told), caption, self.drawn)

    def drawn(self) -> Figure:
        """Draw printed and measured ratios to the baseline, one panel per number."""
        known = self.table[self.table["baseline"].notna()]
        names = plain_names(self.frame)
        height = 1.3 + 0.45 * known["variant"].nunique()
        figure, axes = tiles(len(self.part["numbers"]), 3, 4.8, height, sharey=True)
        for axis, (name, number) in zip(axes, self.part["numbers"].items(), strict=True):
            part = known[known["number"] == name].reset_index(drop=True)
            for place, entry in enumerate(part.to_dict("records")):
                colour = colour_of(names[entry["variant"]])
                printed = entry["ratio_published"]
                dot(axis, printed, -place, None, colour=colour, marker="D", is_hollow=True)
                ours = self.ratio(entry["variant"], number["metric"])
                if ours is not None:
                    one = ours.estimate
                    dot(axis, one.value, -place, (one.low, one.high), colour=colour)
            rows = part.to_dict("records")
            labels = [f"{names[e['variant']]}\nof {names[e['baseline']]}" for e in rows]
            label_rows(axis, labels)
            axis.set_xlim(left=0.0)
            axis.axvline(1.0, color="0.5", lw=0.8, ls=":")
            label(axis, f"ratio to the baseline ({CHEAPER})", "", part["words"].iloc[0])
        marker_legend(figure, {"published": "D", "ours": "o"}, ["published"])
        return figure

    def numbers(self) -> list[Finding]:
        """Return the findings on printed numbers and ratios."""
        found = []
        for entry in self.table.to_dict("records"):
            what = f"{entry['words']}, {entry['variant']}"
            says = f"{what}: {entry['published']:g}"
            found.append(Finding(_told(entry["ours"]), entry["verdict"], says))
            if pd.notna(entry["baseline"]):
                says = f"{what} / {entry['baseline']}: {entry['ratio_published']:.3f}"
                found.append(Finding(_told(entry["ratio"]), entry["ratio_verdict"], says))
        return found

    def page(self) -> Page:
        """Return the sweep's report with the table, `printed.csv` and the figure."""
        (frame,) = self.frames.values()
        whole = page_of(self.config, frame, self.command, self.text())
        return replace(
            whole,
            findings=[*whole.findings, *self.numbers()],
            tables={**whole.tables, "printed": as_csv(self.table, 6)},
            figures={"printed": self.printed_figure(), **whole.figures},
        )


def _told(value: float | None) -> str:
    return "no value" if value is None or pd.isna(value) else f"{value:.4g}"


def table_of(part: Part, runs: Path, accelerator: str | None, command: str = "") -> SweepTable:
    """Return a table of `kind: sweep_table` with the sweep for the accelerator.

    Args:
        part: its entry.
        runs: folder of the runs.
        accelerator: `gpu` or `cuda` for the sweep on a GPU.
        command: command in the report.
    """
    sweep = part["sweep_on_gpu" if accelerator in ("gpu", "cuda") else "sweep"]
    return SweepTable(Part(part.name, part.folder, {**part, "sweeps": [sweep]}), runs, command)


def ratio_verdict(printed: Printed, ours: Ours | None, needed: str) -> Verdict:
    """Judge a printed ratio; its order is whether it is above or below 1.

    Args:
        printed: the ratio.
        ours: ratio of the sweep.
        needed: device of the printed ratio.
    """
    if ours is None or not is_comparable(needed, ours.device, ours.source):
        return "inconclusive"
    return ours.estimate.near(printed, ours.estimate.side(1 if printed.value > 1 else -1, 1.0))
