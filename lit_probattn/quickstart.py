"""The main job, small: train softmax and sMGK with half the heads on ListOps, compare, report.

    python -m lit_probattn.quickstart

Each variant is an ordinary run of the command line (`fit`, then `test` of the best checkpoint), a
cell of a table that runs as those of `python -m lit_probattn.reproduce`: an interrupted quickstart
goes on where it stopped. The report says how the two compare in accuracy, parameters, operations,
step time and peak memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from lit_probattn.attention import recorded_choices
from lit_probattn.compare.cells import Cell
from lit_probattn.compare.command import add_flags, run
from lit_probattn.compare.predict import build_data, build_task, counts, make_inputs, training_step
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.report import Report
from lit_probattn.compare.tables import Metric, Row, Table, TaskEntry
from lit_probattn.configs import ConfigError
from lit_probattn.records.tables import panels
from profiling.measure.memory import peak_bytes
from profiling.measure.timing import quantile, time_sides

MODULE = "lit_probattn.quickstart"
# Not kept by git: the committed report is an example.
OUT = Path("runs/quickstart-report")
TASK = "configs/tasks/lra_listops_quickstart.yaml"
FULL_LENGTH, FULL_BATCH = 2048, 2  # the length of the Long Range Arena's ListOps
METRIC = Metric("test", "test", "test/accuracy", ("", ""), "%", "higher", scale=100)
TABLE = Table(
    name="quickstart",
    title="Quickstart: softmax with 8 heads and sMGK with 4 heads on ListOps",
    seeds=[0],
    published_runs=0,
    baseline="softmax",
    tasks={"listops": TaskEntry("listops", TASK, {"test": METRIC})},
    rows={
        "softmax": Row("softmax", "softmax", "8", "configs/attention/softmax.yaml"),
        "smgk": Row("smgk", "sMGK", "4", "configs/attention/smgk.yaml"),
    },
)


class QuickstartReport(Report):
    """The report with learning curves, and one training step of all rows at full length."""

    after_every_cell = False

    @cached_property
    def measured(self) -> dict[str, dict[str, Any]]:
        """Parameters, operations, time and memory of a step at full length, by row."""
        print("\nmeasuring one training step at full length …", flush=True)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        full = Options(settings={"data.init_args.max_length_tokens": FULL_LENGTH})
        steps: dict[str, Callable[[], None]] = {}
        rows: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(cell.row.name for cell, _ in self.results):
            cell = next(cell for cell in self.cells if cell.row.name == name)
            cell = replace(cell, options=full)
            data = build_data(cell)
            torch.manual_seed(cell.seed)
            with device:
                task = build_task(cell, data)
                steps[name] = training_step(task, *make_inputs(task, data, FULL_BATCH))
            rows[name] = {**counts(cell), "peak_memory_bytes": peak_bytes(steps[name], device)}
        seconds = time_sides(steps, device=device, warmup=1, repeats=9, max_seconds=45.0)
        base = TABLE.baseline if TABLE.baseline in seconds else next(iter(seconds))
        for name, times in seconds.items():
            ratios = [a / b for a, b in zip(times, seconds[base], strict=True)]
            rows[name] |= {
                **{f"step_time_ratio_p{p}": quantile(ratios, p / 100) for p in (20, 50, 80)},
                "num_timed_steps": len(times),
            }
            for key in ("parameters", "macs", "peak_memory_bytes"):
                rows[name][f"{key}_ratio"] = rows[name][key] / rows[base][key]
        return rows

    def columns(self, cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
        """Return what was measured at full length."""
        return {f"full {key}": value for key, value in self.measured[cell.row.name].items()}

    def shown(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return parameters, operations, time and memory at full length."""
        row = self.measured[entry["row"]]
        low, middle, high = (row[f"step_time_ratio_p{p}"] for p in (20, 50, 80))
        memory = row["peak_memory_bytes"] / 2**20
        return {
            "FLOP ratio": None,
            "parameters": f"{row['parameters']:,} ({row['parameters_ratio']:.3f})",
            "multiply-adds per sequence, M (ratio)": f"{row['macs'] / 1e6:.0f} "
            f"({row['macs_ratio']:.3f})",
            "step time, ratio [p20, p80]": f"{middle:.2f} [{low:.2f}, {high:.2f}]",
            "peak memory of a step, MiB (ratio)": f"{memory:.0f} "
            f"({row['peak_memory_bytes_ratio']:.2f})",
        }

    def figures(self) -> dict[str, Figure]:
        """Return training loss and validation accuracy over optimiser steps."""
        figure, [axes] = panels(1, 2, 4.5, 3.6)
        for cell, result in self.results:
            data = pd.read_csv(Path(result["run_folder"]) / "metrics.csv")
            loss = data.dropna(subset=["train/loss"])
            smooth = loss["train/loss"].rolling(5, min_periods=1).mean()
            axes[0].plot(loss["step"], smooth, label=f"{cell.row.label}, seed {cell.seed}")
            accuracy = data.dropna(subset=["val/accuracy"])
            axes[1].plot(accuracy["step"], 100 * accuracy["val/accuracy"], marker="o")
        for axis in axes:
            axis.grid(color="0.9")
        axes[0].legend(frameon=False)
        axes[0].set(xlabel="optimiser step", ylabel="training loss, nats")
        axes[1].set(xlabel="optimiser step", ylabel="validation accuracy, %")
        axes[1].axhline(10, color="grey", linestyle="--", linewidth=1)
        place = axes[1].get_yaxis_transform()
        axes[1].text(0.02, 10.6, "chance", color="grey", fontsize=9, transform=place)
        figure.suptitle("ListOps, 5 to 63 tokens (quickstart; loss: mean of 5 logged values)")
        return {"learning_curves": figure}

    def text(self) -> list[str]:
        """Return what is compared, and how."""
        rounds = next(iter(self.measured.values()))["num_timed_steps"]
        backends = "; ".join(f"{call}: {chosen}" for call, chosen in recorded_choices().items())
        return [
            f"Generated ListOps, expressions of 5 to 63 tokens; recipe `{TASK}`. The test set is "
            "scored by the checkpoint with the best validation accuracy. This shows that the "
            "machinery works: one seed on short expressions compares no methods.",
            f"Accuracy is from this training. Parameters and the last columns are of the same "
            f"model at the Long Range Arena's full length, N = {FULL_LENGTH}: multiply-adds in "
            "matrix products of one forward pass by the equations (1 multiply-add = 2 FLOP; the "
            "reduction of a mixture to fused attention spends 2K products per pair and head where "
            "the equation has K + 1); time and peak memory of one training step (forward and "
            f"backward, batch {FULL_BATCH}, float32, attention dropout 0.1), all rows in turns in "
            f"one process, median over {rounds} rounds of the ratio to the baseline. Peak memory "
            f"is the allocator's, above what was resident. Attention backends: {backends}.",
        ]


def make_parser() -> argparse.ArgumentParser:
    """The command's flags; none is matched by a prefix."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, out=OUT, accelerator="gpu" if torch.cuda.is_available() else "cpu")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the quickstart; see `lit_probattn.compare.command.run`, and 2 for wrong usage."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    try:
        return run(TABLE, options, arguments, module=MODULE, report=QuickstartReport)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
