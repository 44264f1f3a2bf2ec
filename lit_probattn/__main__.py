"""Entry point of `lit-probattn` and `python -m lit_probattn`: dispatches to the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from lit_probattn.base.errors import DEBUG_VARIABLE, ConfigError, nearest
from lit_probattn.base.progress import leave_closed_output, prepare_streams

# Variables set by launchers; Lightning reads some of them on import.
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")


class Command(NamedTuple):
    """A command with its own module.

    Attributes:
        module: has `main(arguments)`, which returns the exit status.
        words: arguments placed before the user's.
        help: one-line description.
    """

    module: str
    words: tuple[str, ...]
    help: str


# Subcommands of the Lightning CLI, handled by `lit_probattn.cli.app`.
RUN = {
    "fit": "train in a new run folder, or resume an interrupted run",
    "validate": "evaluate a checkpoint on the validation split",
    "test": "evaluate a checkpoint on the test split",
    "predict": "write the predictions of a checkpoint",
}
COMMANDS = {
    "demo": Command("lit_probattn.commands.demo.command", (), "train two tiny models as a demo"),
    "compare": Command("lit_probattn.compare.own", (), "train and test variants over seeds"),
    "generate": Command("lit_probattn.commands.generate", (), "text from a language model"),
    "translate": Command("lit_probattn.commands.translate", (), "translate standard input by line"),
    "ask": Command("lit_probattn.commands.ask.command", (), "cost of the variants at your sizes"),
    "reproduce": Command("lit_probattn.reproduce.__main__", (), "reproduce a published table"),
    "sweep": Command("profiling.cli", ("sweep",), "measure cost over a grid of sizes"),
    "report": Command("profiling.cli", ("report",), "tables and figures of a sweep"),
    "analyse": Command("lit_probattn.analysis.__main__", (), "analyse a checkpoint"),
    "convert": Command("lit_probattn.convert.__main__", (), "softmax to MGK; from and to BERT"),
    "data": Command("lit_probattn.commands.data", (), "prepare or check a dataset"),
    "check": Command("lit_probattn.commands.check", (), "check a custom attention layer"),
    "list": Command("lit_probattn.commands.listing", (), "list tasks, attention, tables, …"),
}

_COMPLETION = "lit_probattn.commands.completion"


def usage() -> str:
    """Return the program's help text."""
    lines = {**RUN, **{name: command.help for name, command in COMMANDS.items()}}
    shown = "\n".join(f"  {name:<12}{text}" for name, text in lines.items())
    return f"""usage: lit-probattn COMMAND ...

PyTorch Lightning experiments with probabilistic and head-sharing attention.

  lit-probattn fit --task lra_listops --attention smgk --trainer one_gpu
  lit-probattn compare --task lra_listops --attention softmax smgk --seeds 0 1 2

commands (COMMAND --help shows the options):
{shown}

  --version   version of this package and its dependencies; --verbose adds the environment
"""


def stored_help(name: str) -> str | None:
    """Return the stored help text of a command, which needs no heavy imports, or None."""
    path = Path(__file__).parent / "commands" / "help" / f"{name}.txt"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status, 141 if standard output is closed early."""
    prepare_streams()
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # for example, `| head` has exited
        return leave_closed_output()
    return status


def _run(arguments: Sequence[str] | None) -> int:
    """Dispatch to the command; reject an invalid rank in the environment first."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage(), end="")
        if not words:
            print("error: no command given; expected one of these", file=sys.stderr)
        return 0 if words else 2
    if words in (["--version"], ["--version", "--verbose"]):
        _print_version(verbose="--verbose" in words)
        return 0
    if words[0] == "--print-completion":
        others = {name: command.help for name, command in COMMANDS.items()}
        completion: int = import_module(_COMPLETION).main(words[1:], RUN, others)
        return completion
    text = stored_help(words[0]) if words[1:] in (["-h"], ["--help"]) else None
    if text is not None:
        print(text, end="")
        return 0
    if words[0] in COMMANDS:
        command = COMMANDS[words[0]]
        status: int = import_module(command.module).main([*command.words, *words[1:]])
        return status
    if not words[0].startswith("-") and words[0] not in RUN:
        hint = nearest(words[0], [*RUN, *COMMANDS])
        print(f"error: unknown command {words[0]!r}{hint}", file=sys.stderr)
        return 2
    for name in _NUMBERS:
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            sys.stderr.write(f"error: environment variable {name}: expected an integer, received ")
            sys.stderr.write(f"{value!r}; unset it, or start with torchrun or srun\n")
            return 2
    wrong = _early_error(words)
    if wrong is not None:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    from lit_probattn.cli.app import main as run

    return run(arguments)


def _print_version(verbose: bool) -> None:
    """Print versions; `verbose` adds PyTorch's environment report and the native self-test."""
    from lit_probattn import __version__
    from lit_probattn.base.provenance import RUN_PACKAGES, git_revision, versions

    found = versions(tuple(name for name in RUN_PACKAGES if name != "lit-probattn"))
    print(f"lit_probattn {__version__}, {found}; revision {git_revision()}")
    if verbose:
        from torch.utils import collect_env

        from lit_probattn.kernels.cpu import selftest

        print(f"backend native: {selftest.failure() or 'passes its self-test'}")
        print(collect_env.get_pretty_env_info())


def _early_error(words: Sequence[str]) -> str | None:
    """Return an error that can be found before the slow imports, or None.

    With --debug the parser reports it, with its traceback.
    """
    text = stored_help(words[0]) if words[0] in RUN else None
    debug = "--debug" in words or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
    if text is None or debug or not {"-h", "--help"}.isdisjoint(words):
        return None
    from lit_probattn.cli.files import check_early

    try:
        check_early(words, text)
    except ConfigError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
