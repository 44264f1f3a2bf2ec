"""Studies of trained models: each writes a report with tables (CSV) and figures to `--out`/STUDY.

    lit-probattn analyse STUDY --checkpoint runs/NAME/0/checkpoints/best-00000600.ckpt \\
        --out reports/NAME

Data and model are built from config.yaml in the run folder of the checkpoint, or from --config.
`lit-probattn analyse STUDY --help` lists the flags of one study.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lit_probattn.analysis.registry import STUDIES, Entry
from lit_probattn.base.arguments import Parser
from lit_probattn.base.errors import nearest
from lit_probattn.base.progress import prepare_streams

PROGRAM = "lit-probattn analyse"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study; return the exit status, 2 with one line for user errors."""
    prepare_streams()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    names = {study.name: study for study in STUDIES}
    if arguments[0] not in names:
        print(
            f"error: unknown study {arguments[0]!r}{nearest(arguments[0], names)}", file=sys.stderr
        )
        return 2
    return run_study(names[arguments[0]], list(arguments[1:]))


def overview() -> str:
    """Return the help text of the command."""
    width = max((len(study.name) for study in STUDIES), default=0)
    lines = [f"  {study.name:{width}}  {study.summary}" for study in STUDIES]
    return "\n".join([f"usage: {PROGRAM} STUDY [flags]", "", str(__doc__).strip(), "", *lines])


def run_study(entry: Entry, arguments: list[str]) -> int:
    """Parse the flags of a study and run it."""
    # Not imported for the list of studies.
    from lit_probattn.base.allowed_code import add_flag
    from lit_probattn.base.provenance import shown_command
    from lit_probattn.cli.errors import exit_status

    study = entry.load()
    parser = Parser(f"{PROGRAM} {study.name}", sys.modules[study.__module__].__doc__)
    study.add_arguments(parser)
    add_flag(parser)
    options = parser.parse_args(arguments)
    options.command = f"{PROGRAM} {shown_command([study.name, *arguments])}"
    return exit_status(lambda: study.run(options))


if __name__ == "__main__":
    sys.exit(main())
