"""Fixed head size: theorems as programs, larger heads for a checkpoint, the experiment.

    python -m lit_probattn.reproduce.head_size theory --out reports/NAME
    python -m lit_probattn.reproduce.head_size embed \\
        runs/NAME/0/checkpoints/best-00000600.ckpt wide.ckpt --head_dim 64
    python -m lit_probattn.reproduce.head_size experiment \\
        --grid configs/reproduce/head_size_reduced.yaml --data_dir DIR \\
        --runs runs/head_size --out reports/NAME

theory: the construction of theorem 1, sharper bounds, its counter-example, a figure, and with
--strictness theorem 2 by fitting. embed: writes an equivalent checkpoint with larger heads and a
file to add after the run's configuration (`--config wide.yaml`). experiment: perplexity against the
number of heads with head size d / h, with a fixed head size, and with matched parameters; it runs
like `lit-probattn reproduce`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lit_probattn.analysis.head_size import theory
from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError, DataError, reports
from lit_probattn.base.provenance import shown_command
from lit_probattn.convert import wider_heads
from lit_probattn.reproduce.head_size import experiment
from lit_probattn.training.checkpoints import CheckpointError

PROGRAM = "python -m lit_probattn.reproduce.head_size"
PARTS = {
    "theory": (theory, "run the theorems as programs"),
    "embed": (wider_heads, "enlarge the heads of a checkpoint"),
    "experiment": (experiment, "measure perplexity over numbers of heads"),
}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; flags must be spelled out."""
    parser = Parser(PROGRAM, __doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, (module, summary) in PARTS.items():
        module.add_arguments(parts.add_parser(name, allow_abbrev=False, help=summary))
    return parser


@reports(ConfigError, CheckpointError, DataError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status, 2 with one line for misuse."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    options.arguments = arguments
    options.command = f"{PROGRAM} {shown_command(arguments)}"
    return PARTS[options.part][0].run(options) or 0


if __name__ == "__main__":
    sys.exit(main())
