"""How a command ends: its exit status, and one line for what went wrong."""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable

from lit_probattn.cli.errors import ConstructionError, explain
from lit_probattn.training import peers
from lit_probattn.training.preemption import Preempted, requeue

DEBUG_VARIABLE = "LIT_PROBATTN_DEBUG"


def exit_status(run: Callable[[], object]) -> int:
    """Run a command.

    Returns:
        0; 2 for what a user got wrong; 1 for a loss that is not finite or another rank that died;
        128 + signal for a run that was asked to end and saved itself.
    """
    try:
        run()
    except Preempted as stopped:
        if is_first_rank():
            print(stopped, flush=True)
            if stopped.number == signal.SIGUSR1:
                print(requeue(), flush=True)
        return stopped.status
    except (Exception, ConstructionError) as error:
        lost = peers.explain_lost_contact(error)
        explained = (lost, 1) if lost else explain(error)
        if explained is not None:
            say_error(explained[0])
        if explained is None or os.environ.get(DEBUG_VARIABLE):
            if isinstance(error, ConstructionError):
                raise error.error from None
            raise
        return explained[1]
    finally:
        peers.close()
    return 0


def rank() -> str:
    """Rank of this process, as whoever started it says."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
    return next((os.environ[name] for name in names if os.environ.get(name)), "0")


def is_first_rank() -> bool:
    """Whether this is rank 0, or a process alone."""
    return rank() == "0"


def say_error(text: str) -> None:
    """Write a line to stderr in one piece: ranks share the terminal."""
    prefix = "error" if is_first_rank() else f"error on rank {rank()}"
    sys.stderr.write(f"{prefix}: {text}\n")


def quieten() -> None:
    """Leave out Lightning's advertisements, and a deprecation inside Lightning."""
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec.*")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "Tip:" not in record.getMessage())
