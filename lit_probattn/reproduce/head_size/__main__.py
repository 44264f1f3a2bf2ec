"""Fixed head size: theorems run, heads of a checkpoint enlarged, the experiment.

    python -m lit_probattn.head_size theory --out reports/NAME
    python -m lit_probattn.head_size embed runs/NAME/0/checkpoints/best-00000600.ckpt wide.ckpt \\
        --head_dim 64
    python -m lit_probattn.head_size experiment --grid configs/studies/head_size_reduced.yaml \\
        --data_dir DIR --runs runs/head_size --out reports/NAME

theory: theorem 1's construction, the sharper bounds, its counter-example, figure LRB-G1, and with
--strictness theorem 2 by fitting. embed: writes the checkpoint and the file to add after the run's
own (`--config wide.yaml`); the function stays. experiment: perplexity against the number of heads
with head size d / h, with a fixed head size, and with matched parameters; goes on where it stopped,
--shard 0/4 runs a part, --report only writes what is finished.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_probattn.reproduce.head_size import commands
from lit_probattn.reproduce.head_size.grid import GridError
from lit_probattn.training.checkpoints import CheckpointError
from lit_probattn.training.trained import AnalysisError

PROGRAM = "python -m lit_probattn.head_size"


def make_parser() -> argparse.ArgumentParser:
    """The command's flags; none is matched by a prefix."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, allow_abbrev=False, formatter_class=raw
    )
    parts = parser.add_subparsers(dest="part", required=True)
    theory = parts.add_parser("theory", allow_abbrev=False, help="theorems as programs")
    theory.add_argument("--out", type=Path, required=True, help="folder of the results")
    theory.add_argument("--strictness", action="store_true", help="theorem 2 by fitting: minutes")
    theory.add_argument("--steps", type=int, default=4000, help="of the fits; default 4000")
    embed = parts.add_parser("embed", allow_abbrev=False, help="enlarge the heads of a checkpoint")
    embed.add_argument("checkpoint", type=Path, help="a checkpoint with softmax attention")
    embed.add_argument("output", type=Path, help="the checkpoint to write, NAME.ckpt")
    embed.add_argument("--head_dim", type=int, required=True, help="new head size")
    embed.add_argument("--from_head_dim", type=int, help="head size, where no hyper-parameter says")
    embed.add_argument(
        *("--padding_std",), type=float, default=0.0, help="small numbers where training can begin"
    )
    experiment = parts.add_parser("experiment", allow_abbrev=False, help="perplexity over heads")
    add = experiment.add_argument
    add("--grid", type=Path, required=True, help="a file of configs/studies")
    add("--data_dir", help="folder of the text (or LIT_PROBATTN_DATA)")
    add("--cache_dir", help="folder of the caches (or LIT_PROBATTN_CACHE)")
    add("--runs", type=Path, default=Path("runs/head_size"), help="folder of the runs")
    add("--out", type=Path, required=True, help="folder of the results")
    add("--accelerator", default="auto", help="Lightning's name: auto, cpu, gpu")
    add("--shard", default="0/1", help="I/N: every N-th model from the I-th")
    add("--report", action="store_true", help="train nothing, write what is finished")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 2 for what a user got wrong, with one line."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    shown = [Path(a).name if Path(a).is_absolute() else a for a in arguments]
    options.command = f"{PROGRAM} {shlex.join(shown)}"
    run = {
        "theory": commands.theory,
        "embed": commands.embed,
        "experiment": commands.experiment,
    }[options.part]
    try:
        run(options)
    except (AnalysisError, CheckpointError, GridError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
