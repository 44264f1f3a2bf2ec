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
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.command import add_flags, run
from lit_probattn.compare.measured import MeasuredReport
from lit_probattn.compare.tables import Metric, Row, Table, TaskEntry

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


class QuickstartReport(MeasuredReport):
    """The report with learning curves, and one training step of all rows at full length."""

    step_settings: ClassVar = {"data.init_args.max_length_tokens": FULL_LENGTH}
    step_batch: ClassVar = FULL_BATCH
    chance: ClassVar = 10.0
    curves_title: ClassVar = "ListOps, 5 to 63 tokens (quickstart; loss: mean of 5 logged values)"

    def text(self) -> list[str]:
        """Return what is compared, and how."""
        return [
            f"Generated ListOps, expressions of 5 to 63 tokens; recipe `{TASK}`. The test set is "
            "scored by the checkpoint with the best validation accuracy. This shows that the "
            "machinery works: one seed on short expressions compares no methods.",
            f"Accuracy is from this training; the columns from parameters on are of the same model "
            f"at the Long Range Arena's full length, N = {FULL_LENGTH}.",
            *super().text(),
        ]


def make_parser() -> argparse.ArgumentParser:
    """The command's flags; none is matched by a prefix."""
    parser = Parser(f"python -m {MODULE}", __doc__)
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
