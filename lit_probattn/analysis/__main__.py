"""Studies of trained models: each writes a report with tables (CSV) and figures to `--out`/STUDY.

    lit-probattn analyse STUDY --checkpoint runs/NAME/0/checkpoints/best-00000600.ckpt \\
        --out reports/NAME

Data and model are built from config.yaml in the run folder of the checkpoint, or from --config.
`lit-probattn analyse STUDY --help` lists the flags of one study.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lit_probattn.analysis.registry import STUDIES, load_study
from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import nearest
from lit_probattn.base.progress import aligned, prepare_streams

PROGRAM = "lit-probattn analyse"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study; return the exit status, 2 with one line for user errors."""
    prepare_streams()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    name, *others = arguments
    if name not in STUDIES:
        print(f"error: unknown study {name!r}{nearest(name, STUDIES)}", file=sys.stderr)
        return 2
    return run_study(name, others)


def overview() -> str:
    """Return the help text of the command."""
    lines = aligned([(f"  {name}", summary) for name, (_, summary) in STUDIES.items()])
    return "\n".join([f"usage: {PROGRAM} STUDY [flags]", "", str(__doc__).strip(), "", *lines])


def run_study(name: str, arguments: list[str]) -> int:
    """Parse the flags of a study and run it."""
    # Not imported for the list of studies.
    from lit_probattn.base.provenance import shown_command
    from lit_probattn.cli.errors import exit_status

    study = load_study(name)
    parser = Parser(f"{PROGRAM} {name}", sys.modules[study.__module__].__doc__)
    study.add_arguments(parser)
    options = parser.parse_args(arguments)
    options.command = f"{PROGRAM} {shown_command([name, *arguments])}"
    return exit_status(lambda: study.run(options))


if __name__ == "__main__":
    sys.exit(main())
