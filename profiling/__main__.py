"""`python -m profiling`."""

import sys

from lit_probattn.__main__ import stored_help


def main() -> int:
    """Run a command; help texts are stored, so that printing them imports no command."""
    text = stored_help("profiling") if sys.argv[1:] in (["-h"], ["--help"]) else None
    if text is not None:
        print(text, end="")
        return 0
    from profiling.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
