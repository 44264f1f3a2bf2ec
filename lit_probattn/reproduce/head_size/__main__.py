"""Fixed head size: theorems run, heads of a checkpoint enlarged, the experiment.

    python -m lit_probattn.reproduce.head_size theory --out reports/NAME
    python -m lit_probattn.reproduce.head_size embed \\
        runs/NAME/0/checkpoints/best-00000600.ckpt wide.ckpt --head_dim 64
    python -m lit_probattn.reproduce.head_size experiment \\
        --grid configs/reproduce/head_size_reduced.yaml --data_dir DIR \\
        --runs runs/head_size --out reports/NAME

theory: theorem 1's construction, the sharper bounds, its counter-example, figure LRB-G1, and with
--strictness theorem 2 by fitting. embed: writes the checkpoint and the file to add after the run's
own (`--config wide.yaml`); the function stays. experiment: perplexity against the number of heads
with head size d / h, with a fixed head size, and with matched parameters; a grid of cells that runs
as those of `lit-probattn reproduce`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from lit_probattn.analysis.head_size import theory
from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError, DataError
from lit_probattn.compare.flags import portable
from lit_probattn.convert import wider_heads
from lit_probattn.reproduce.head_size import experiment
from lit_probattn.training.checkpoints import CheckpointError

PROGRAM = "python -m lit_probattn.reproduce.head_size"
PARTS = {
    "theory": (theory, "theorems as programs"),
    "embed": (wider_heads, "enlarge the heads of a checkpoint"),
    "experiment": (experiment, "perplexity over heads"),
}

REFUSALS = (ConfigError, CheckpointError, DataError)


def make_parser() -> argparse.ArgumentParser:
    """The command's flags; none is matched by a prefix."""
    parser = Parser(PROGRAM, __doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, (module, summary) in PARTS.items():
        module.add_arguments(parts.add_parser(name, allow_abbrev=False, help=summary))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 for wrong usage, with one line."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    options.arguments = arguments
    options.command = f"{PROGRAM} {shlex.join(portable(arguments))}"
    try:
        return PARTS[options.part][0].run(options) or 0
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
