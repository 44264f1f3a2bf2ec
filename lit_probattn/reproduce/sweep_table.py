"""Tables of measured costs: every printed number beside ours, and its ratio to the baseline's.

An absolute number belongs to its device, so it is judged on the paper's device alone; elsewhere it
cannot be told. A ratio to the baseline needs a GPU, unless it is counted; its printed value is
rounded as its parts are, and its order is its side of 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import label, ratio_axis, tiles
from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.compare.tables import FOLDER, Row, read_published
from lit_probattn.experiments.expectations import (
    Estimate,
    Finding,
    Printed,
    Verdict,
    digits_of,
    tells_of,
)
from lit_probattn.experiments.page import Page, as_csv, image
from lit_probattn.records.tables import markdown_lines
from lit_probattn.reproduce.figures.sweeps import SweepFigure
from profiling.report.claims import device_of
from profiling.report.page import page_of
from profiling.sweep.config import SweepConfig

_TIME = "time_median_s"
_LEGEND = (
    "A printed number is of the paper's device ({device}): on another one ours stands beside it, "
    "and whether they agree *cannot be told*. Ratios to the baseline are judged where they were "
    "measured on a GPU: printed ones are rounded as their parts are, and their order is the side "
    "of 1. {places}"
)


@dataclass(frozen=True)
class Ours:
    """A number of a sweep with the spread of its repeats, how and where it was found."""

    estimate: Estimate
    source: str
    batch_size: int
    device: str
    device_name: str


@dataclass(frozen=True)
class SweepTable(SweepFigure):
    """A table of `kind: sweep_table`, see configs/reproduce/mgk_table7.yaml.

    Args:
        name, part, runs, command: as in SweepFigure; `part["sweeps"]` is the one sweep.
        folder_of_tables: folder of published.csv.
    """

    folder_of_tables: Path

    @property
    def config(self) -> SweepConfig:
        """The sweep."""
        (config,) = self.sweeps.values()
        return config

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Its rows, those of whole models."""
        (frame,) = self.frames.values()
        return frame[(frame["status"] == "ok") & (frame["scope"] == "model")]

    # ---- ours ----------------------------------------------------------------------------------

    def found(self, variant: str, metric: str, batch_size: int, source: str) -> Ours | None:
        """Return a variant's number at one place; of several backends, the first of the grid."""
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
        """Return a number at the printed batch size, measured or else predicted."""
        size = self.part["batch_size"]
        both = (self.found(variant, metric, size, source) for source in ("measured", "predicted"))
        return next((one for one in both if one is not None), None)

    def ratio(self, variant: str, metric: str) -> Ours | None:
        """Return the ratio to the baseline, at the first batch size where both sides have one."""
        base = self.config.baseline_of(variant)
        sizes = dict.fromkeys([self.part["batch_size"], *self.config.grid.batch_size])
        for size in sizes if base is not None else ():
            for source in ("measured", "predicted"):
                own = self.found(variant, metric, size, source)
                other = self.found(str(base), metric, size, source)
                if own is not None and other is not None:
                    return replace(own, estimate=own.estimate.over(other.estimate))
        return None

    # ---- printed beside ours -------------------------------------------------------------------

    @cached_property
    def printed(self) -> dict[tuple[str, str], str]:
        """The printed numbers, by variant and number.

        Raises:
            ConfigError: published.csv has a row or a number that the table does not name, or lacks
                one that it names.
        """
        names = {tuple(heads): variant for variant, heads in self.part["rows"].items()}
        found: dict[tuple[str, str], str] = {}
        for row in read_published(self.folder_of_tables):
            if row["table"] != self.name:
                continue
            key = (row["method"], row["heads"])
            if key not in names or row["metric"] not in self.part["numbers"]:
                raise ConfigError(f"{self.name} does not name {', '.join(key)}, {row['metric']}")
            found[names[key], row["metric"]] = row["value"]
        for variant in self.part["rows"]:
            if variant not in self.config.variants:
                hint = nearest(variant, self.config.variants)
                raise ConfigError(f"{self.name}: the sweep has no variant {variant!r}{hint}")
            for number in self.part["numbers"]:
                if (variant, number) not in found:
                    raise ConfigError(f"{self.name}: published.csv prints no {number} of {variant}")
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
        verdict: Verdict = "cannot be told"
        if ours is not None and found is not None:
            paper = needed and self.part["device"]
            if tells_of(paper, ours.device_name, ours.source):
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
        """Return what stands in the report: the table, its legend, the picture."""
        size = self.part["batch_size"]
        others = [one for one in self.config.grid.batch_size if one != size]
        places = f"All are of batches of {size}"
        if others:
            smaller = ", ".join(map(str, others))
            places += f", or of {smaller} where a ratio says so: the larger do not fit into memory"
        legend = _LEGEND.format(device=self.part["device"], places=f"{places}.")
        return [
            *("## Published beside ours", "", *self.lines, "", legend, ""),
            *(image("printed", "printed and our ratios"), ""),
        ]

    def picture(self) -> Figure:
        """Draw printed and our ratios to the baseline, a panel per number."""
        figure, axes = tiles(len(self.part["numbers"]), 3, 4.6, 3.4)
        known = self.table[self.table["baseline"].notna()]
        for axis, name in zip(axes, self.part["numbers"], strict=True):
            part = known[known["number"] == name].reset_index(drop=True)
            names = [f"{e['variant']}\n/ {e['baseline']}" for e in part.to_dict("records")]
            for shift, column, colour, words in (
                (-0.2, "ratio_published", "tab:red", "published"),
                (0.2, "ratio", "tab:blue", "ours"),
            ):
                values = part[column].astype(float)
                bars = axis.bar(part.index + shift, values.fillna(0.0), 0.38, color=colour)
                bars.set_label(words)
                texts = ["–" if pd.isna(value) else f"{value:.3f}" for value in values]
                axis.bar_label(bars, texts, fontsize=7)
            axis.set_xticks(range(len(names)), names, fontsize=8)
            axis.set_axisbelow(True)
            ratio_axis(axis, [*part["ratio_published"], *part["ratio"].dropna().astype(float)])
            label(axis, "", "ratio (below 1 = cheaper)", part["words"].iloc[0], legend=8)
        figure.suptitle(self.part["title"], fontsize=10)
        return figure

    def numbers(self) -> list[Finding]:
        """Return the printed numbers and ratios, judged."""
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
        """Return the sweep's report with the table in it, `printed.csv` and the picture."""
        (frame,) = self.frames.values()
        whole = page_of(self.config, frame, self.command, self.text())
        return replace(
            whole,
            findings=[*whole.findings, *self.numbers()],
            tables={**whole.tables, "printed": as_csv(self.table, 6)},
            pictures={**whole.pictures, "printed": self.picture},
        )

    def write(self, folder: Path) -> str:
        """Write the report; return its table."""
        self.page().write(folder)
        return "\n".join(self.lines)


def _told(value: float | None) -> str:
    return "no number" if value is None or pd.isna(value) else f"{value:.4g}"


def table_of(
    name: str,
    part: Mapping[str, Any],
    runs: Path,
    accelerator: str | None,
    command: str = "",
    folder: Path = FOLDER,
) -> SweepTable:
    """Return a table of `kind: sweep_table`, on the sweep of the accelerator.

    Args:
        name: its name.
        part: its entry.
        runs: folder of the runs.
        accelerator: `gpu` or `cuda` for the sweep on a GPU.
        command: the command, for the report.
        folder: folder of published.csv.
    """
    sweep = part["sweep_on_gpu" if accelerator in ("gpu", "cuda") else "sweep"]
    return SweepTable(name, {**part, "sweeps": [sweep]}, runs, command, folder)


def ratio_verdict(printed: Printed, ours: Ours | None, needed: str) -> Verdict:
    """Judge a printed ratio; its order is its side of 1.

    Args:
        printed: the ratio.
        ours: that of the sweep.
        needed: the device that it is about.
    """
    if ours is None or not tells_of(needed, ours.device, ours.source):
        return "cannot be told"
    return ours.estimate.near(printed, ours.estimate.side(1 if printed.value > 1 else -1, 1.0))
