"""Reproduce a published table or figure: train its cells, write published beside reproduced.

    lit-probattn reproduce --list
    lit-probattn reproduce mgk_table1 --only listops --dry-run
    lit-probattn reproduce mgk_table1 --only listops softmax_8 'mgk_*' --seeds 4096 0 1 \\
        --accelerator gpu --trainer one_gpu --jobs 4

Every cell (task, row, seed) is an ordinary run of the command line, `fit` and then `test` of the
best checkpoint. A finished cell is never run again, also not for another table that prints the same
model; an interrupted one goes on from its newest checkpoint: run the same command again. A cell
that fails is tried again after the others, and by the same command later. The report is written
after every cell, and by the same command at the end.

Array jobs: --shard 0/8 … 7/8 with one --runs folder, then once without; or --executor slurm
--shards 8, which submits them and writes the report. torchrun shares the cells among its processes,
one GPU each; --launch 'torchrun --nproc-per-node 8' gives every run all GPUs. --jobs N runs N cells
at a time, on one GPU or in turn on those of --devices.

A table whose numbers are of trained models (fish_table8) trains its models or takes those of other
tables, and makes its study of each; a finished study is never made again. value_aware_table2 goes
on from its trained models to `approximate`, and to `approximate_compare` of each seed's rows.

A table of measured costs (mgk_table7) runs the sweep of `python -m profiling` that it stands on and
sets each printed number beside ours; --accelerator gpu takes the sweep for a GPU.

A figure is judged by what its paper says of it, sentence by sentence. One of trained models
(mgk_figure1, mgk_figure2) is drawn of cells too, and of studies that are made when all are trained;
--shortened takes the shortened protocol, or smaller models (low_rank_figure1). A figure of costs
(mgk_figure3) runs the sweep of `python -m profiling` that it stands on.

The published protocol is the default. --shortened, --steps, --max_seq_len and --set make another
one, which the report says and compares setting by setting.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import ConfigError, DataError, nearest
from lit_probattn.base.progress import replace_unprintable
from lit_probattn.compare.flags import add_flags, place_of
from lit_probattn.compare.tables import FOLDER, kinds
from lit_probattn.reproduce.commands import list_lines

# Imports PyTorch, so it is loaded when a table is made.
MAKING = "lit_probattn.reproduce.making"


def make_parser() -> argparse.ArgumentParser:
    """The command's flags; none is matched by a prefix."""
    parser = Parser("lit-probattn reproduce", __doc__)
    add = parser.add_argument
    add("table", nargs="?", help="a table or figure, such as mgk_table1; --list shows all")
    add("--list", action="store_true", help="print all tables and figures with their state")
    add("--tables", type=Path, default=FOLDER, help="folder of the table files")
    add("--shortened", action="store_true", help="the shortened protocol, or the reduced figure")
    add("--max_seq_len", type=int, help="length of sequences")
    add("--as_published", action="store_true", help="selection on test data, precision, padding")
    add("--as_released", action="store_true", help="attention as the released code computes it")
    add_flags(parser, accelerator=None)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        See `lit_probattn.compare.command.run`; 2 for wrong usage and for tables that are not made.
    """
    replace_unprintable()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
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
    except (ConfigError, DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
