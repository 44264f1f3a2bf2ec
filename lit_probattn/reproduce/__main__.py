"""Reproduce a published table or figure: train its models and compare with published values.

    lit-probattn reproduce --list
    lit-probattn reproduce mgk_table1 --only listops --dry-run
    lit-probattn reproduce mgk_table1 --only listops softmax_8 'mgk_*' --seeds 4096 0 1 \\
        --accelerator gpu --trainer one_gpu --jobs 4

Each run (task, row, seed) is trained by `fit`, then `test` evaluates the best checkpoint. Finished
runs are never repeated, even for another table with the same model; to resume interrupted ones from
their newest checkpoint, rerun the command. Failed runs are retried after the others, and when the
command is rerun. The report is written after each run.

Array jobs: use --shard 0/8 … 7/8 with a common --runs folder, then once without --shard; or
--executor slurm --shards 8, which submits them and writes the report. Under torchrun, each process
runs a part of the runs on one GPU; --launch 'torchrun --nproc-per-node 8' uses all GPUs for each
run. --jobs N runs N at a time, on one GPU or distributed over those of --devices.

A table of studies (fish_table8) trains models or uses those of other tables, and runs its study on
each once. value_aware_table2 runs `approximate` on its trained models, and `approximate_compare` on
the rows of each seed.

A grid of head sizes (head_size_reduced) measures perplexity against the number of heads with head
size d / h, with a fixed head size, and with matched parameters.

A table of measured costs (mgk_table7) runs its sweep of `python -m profiling` and compares each
printed number with the measured one; --accelerator gpu selects the sweep for a GPU.

The report of a figure judges the claims of its paper about it. A figure of trained models
(mgk_figure1, mgk_figure2) is drawn from its runs and from studies, which run when all models are
trained; --shortened selects the reduced protocol, or smaller models (low_rank_figure1). A figure of
costs (mgk_figure3) runs its sweep of `python -m profiling`.

The published protocol is the default. The report lists the settings changed by --shortened,
--steps, --max_seq_len and --set.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError, DataError, nearest, reports
from lit_probattn.base.progress import prepare_streams
from lit_probattn.compare.flags import add_flags, place_of
from lit_probattn.compare.tables import FOLDER, kinds
from lit_probattn.reproduce.commands import list_lines

# Imports PyTorch, so it is loaded when a table is made.
MAKING = "lit_probattn.reproduce.making"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; flags must be spelled out."""
    parser = Parser("lit-probattn reproduce", __doc__)
    add = parser.add_argument
    add("table", nargs="?", help="table or figure, such as mgk_table1; --list prints all")
    add("--list", action="store_true", help="print all tables and figures with their state")
    add("--tables", type=Path, default=FOLDER, help="folder of the table files")
    add("--shortened", action="store_true", help="use the reduced protocol, or the reduced figure")
    add("--max_seq_len", type=int, help="length of sequences")
    add(
        "--as_published",
        action="store_true",
        help="published selection on test data, precision, padding",
    )
    add("--as_released", action="store_true", help="use attention as in the released code")
    add_flags(parser, accelerator=None)
    return parser


@reports(ConfigError, DataError, ValueError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        See `lit_probattn.compare.command.run`; 2 for misuse and for unavailable tables.
    """
    prepare_streams()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(list_lines(place_of(options), options.tables)))
        return 0
    known = kinds(options.tables)
    if options.table not in known:
        hint = nearest(options.table or "", known)
        raise ConfigError(f"expected a table, received {options.table!r}{hint}; see --list")
    defaults = vars(parser.parse_args([]))
    given = [name for name, value in vars(options).items() if value != defaults[name]]
    making = import_module(MAKING)
    status: int = making.make(options, arguments, known[options.table], given)
    return status


if __name__ == "__main__":
    sys.exit(main())
