"""`python -m lit_probattn`."""

import os
import sys
from importlib import import_module

# What launchers tell their processes; Lightning reads some of it while it is imported.
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
# Sub-commands that stand on their own -> module with their `main`.
_COMMANDS = {"list": "lit_probattn.commands.listing"}


def main() -> int:
    """Run the command line; refuse an environment that says no rank first."""
    if sys.argv[1:2] and sys.argv[1] in _COMMANDS:
        status: int = import_module(_COMMANDS[sys.argv[1]]).main(sys.argv[2:])
        return status
    for name in _NUMBERS:
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            sys.stderr.write(f"error: environment variable {name}: expected a number, received ")
            sys.stderr.write(f"{value!r}; unset it, or start with torchrun or srun\n")
            return 2
    from lit_probattn.cli.app import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
