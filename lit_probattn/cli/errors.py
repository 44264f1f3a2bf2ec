"""Exit status of commands, and one-line messages for user errors.

Bugs keep their traceback.
"""

from __future__ import annotations

import errno
import linecache
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Collection
from traceback import walk_tb

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_probattn.attention import Attention
from lit_probattn.base.allowed_code import OUR_PACKAGES
from lit_probattn.base.errors import DEBUG_VARIABLE, ConfigError
from lit_probattn.base.provenance import is_first_rank, rank
from lit_probattn.base.torch_internals import worker_deaths_outside_locks
from lit_probattn.tasks.finite import NonFiniteError
from lit_probattn.training import peers
from lit_probattn.training.checkpoints import CheckpointError
from lit_probattn.training.memory import is_out_of_memory, out_of_memory_line
from lit_probattn.training.preemption import Preempted, requeue

# Errors of the file system while writing, and their remedies.
_FULL = (
    "free some space on that disk, or write runs (--run.root), caches "
    "(--data.init_args.cache_dir) or output elsewhere"
)

_FORBIDDEN = "check the permissions; runs go to --run.root, caches to --data.init_args.cache_dir"

_STORAGE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR), _FORBIDDEN),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.EIO: "the disk or its network failed; completed files are not affected",
    errno.ENAMETOOLONG: "choose a shorter --run.name",
}

_LOGGERS = ("wandb", "mlflow")  # packages with their own exceptions
_NO_GPU = " Use --trainer.accelerator cpu, or see `lit-probattn --version --verbose`"

_WORKER = re.compile(r"DataLoader worker \(pid\S* ([\d, ]+)\) (?:is killed|exited unexpectedly)")


class ConstructionError(BaseException):
    """An exception in the constructor of a configured class; `error` is the original.

    Not an Exception, which the parser would interpret as a value of the wrong type.
    """

    def __init__(self, key: str, error: Exception) -> None:
        super().__init__(f"{key}: {error}")
        self.key, self.error = key, error


# ---- exceptions -----------------------------------------------------------------------------


def explain(error: BaseException) -> tuple[str, int] | None:
    """Return one line and exit status for a user error; None for a bug.

    User errors are raised deliberately by this package or by Lightning's checks, or are values that
    the constructor of a configured class rejects; everything else is a bug.
    """
    if isinstance(error, ConstructionError):
        explained = explain(error.error)
        refused = isinstance(error.error, ValueError) and _is_raised(error.error, packages=())
        if explained is None and not refused:
            return None
        text = explained[0] if explained else " ".join(str(error.error).split())
        return f"{_field(error)}: {text}", 2
    if is_out_of_memory(error):
        return out_of_memory_line(error), 2
    text = " ".join(str(error).split())
    cause = error.__cause__
    if isinstance(cause, ValueError) and isinstance(cause.__cause__, ModuleNotFoundError):
        # the parser's message about a class of a missing package
        return " ".join(f"{cause.args[0].partition(':')[0]}: {cause.__cause__}".split()), 2
    if isinstance(error, NonFiniteError):
        return text, 1
    if isinstance(error, ConfigError | CheckpointError | MisconfigurationException):
        return text + _NO_GPU * text.startswith("No supported gpu backend found"), 2
    if type(error).__module__.partition(".")[0] in _LOGGERS:
        return f"trainer.logger: {text}", 2  # missing key or unreachable server, at the start
    if isinstance(error, OSError) and error.errno in _STORAGE:
        place = "" if error.filename is None else f": {error.filename}"
        return f"{(error.strerror or 'cannot write').lower()}{place}; {_STORAGE[error.errno]}", 2
    found = _WORKER.search(text)
    # The loss of the connection can be noticed before the death of the process.
    if found or (isinstance(error, ConnectionError | EOFError) and _is_from_loader(error)):
        process = f"process ({found[1]})" if found else "process"
        return (
            f"a loader {process} was killed, most likely because memory ran out: lower "
            "--data.init_args.num_workers or --data.init_args.batch_size; rerun the same command "
            "with --ckpt_path last to resume from the last checkpoint"
        ), 2
    if text.startswith("You set `--ntasks="):
        return (
            f"SLURM_NTASKS is {os.environ.get('SLURM_NTASKS')} and SLURM_NTASKS_PER_NODE is not "
            "set: request tasks with --ntasks-per-node and start them with srun, or set "
            "SLURM_JOB_NAME=interactive to run one process in this allocation"
        ), 2
    if text.startswith("Early stopping conditioned on metric"):
        return f"trainer.callbacks: {text}", 2
    if text.startswith("Error(s) in loading state_dict"):
        return f"the checkpoint does not match this configuration: {_differences(text)}", 2
    if isinstance(error, ValueError | NotImplementedError | FileNotFoundError):
        return (text, 2) if _is_raised(error, (*OUR_PACKAGES, "lightning")) else None
    if isinstance(error, TypeError):  # raised by Lightning for some trainer settings
        return (text, 2) if _is_raised(error, ("lightning",)) else None
    return None


def _differences(text: str) -> str:
    """Summarise `load_state_dict` errors: how many tensors differ, and the first of each."""
    shapes = re.findall(
        r"size mismatch for (\S+): .*?torch.Size\((\[.*?\])\).*?torch.Size\((\[.*?\])\)", text
    )
    parts = []
    if shapes:
        name, theirs, ours = shapes[0]
        parts.append(f"{len(shapes)} with other shapes (first {name}: {theirs}, expected {ours})")
    for kind, pattern in (
        ("missing", r"Missing key\(s\) in state_dict: ([^:]+?)\. "),
        ("unexpected", r"Unexpected key\(s\) in state_dict: ([^:]+?)\. "),
    ):
        found = re.search(pattern, f"{text} ")
        if found:
            names = found[1].split(", ")
            parts.append(f"{len(names)} {kind} (first {names[0].strip(chr(34))})")
    return f"tensors: {'; '.join(parts)}" if parts else text[:300]


def _is_raised(error: BaseException, packages: Collection[str]) -> bool:
    """Whether the innermost frame is a `raise` in one of the packages; empty means any."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    module = str(traceback.tb_frame.f_globals.get("__name__", ""))
    line = linecache.getline(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
    known = not packages or module.partition(".")[0] in packages
    return known and line.lstrip().startswith("raise")


def _is_from_loader(error: BaseException) -> bool:
    """Whether an exception was raised in the queue between DataLoader and its processes."""
    modules = {frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)}
    return modules >= {"torch.utils.data.dataloader", "multiprocessing.queues"}


def _field(error: ConstructionError) -> str:
    """Return the configuration key of the class that raised: the attention's, if it did."""
    traceback = error.error.__traceback__
    field = error.key
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, Attention):
            field = "model.init_args.attention.init_args"
        elif isinstance(owner, pl.LightningModule | pl.LightningDataModule):
            field = f"{error.key}.init_args"
        traceback = traceback.tb_next
    return field


def exit_status(run: Callable[[], object]) -> int:
    """Run a command.

    Returns:
        0; 2 for a user error; 1 for a non-finite loss or a failed rank;
        128 + signal for a run that received a stop signal and saved a checkpoint, and after
        Ctrl-C.
    """
    try:
        with worker_deaths_outside_locks():
            run()
    except Preempted as stopped:
        if is_first_rank():
            print(stopped, flush=True)
            if stopped.number == getattr(signal, "SIGUSR1", None):
                print(requeue(), flush=True)
        return stopped.status
    except (KeyboardInterrupt, SystemExit) as stop:
        # After Ctrl-C in an evaluation, Lightning exits with status 1.
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        print_error_line("stopped by SIGINT")
        return 128 + int(signal.SIGINT)
    except (Exception, ConstructionError) as error:
        lost = peers.explain_lost_contact(error)
        explained = (lost, 1) if lost else explain(error)
        if explained is not None:
            print_error_line(explained[0])
        if explained is None or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            if isinstance(error, ConstructionError):
                raise error.error from None
            raise
        return explained[1]
    finally:
        peers.close()
    return 0


def print_error_line(text: str) -> None:
    """Write a line to stderr in one call, since ranks share the terminal."""
    prefix = "error" if is_first_rank() else f"error on rank {rank()}"
    sys.stderr.write(f"{prefix}: {text}\n")


def quieten() -> None:
    """Suppress Lightning's advertisements, and a deprecation warning inside Lightning."""
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec.*")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "Tip:" not in record.getMessage())
