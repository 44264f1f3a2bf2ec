"""The ranks' agreement to end: which signal one of them got."""

import signal
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_probattn.tasks.distributed import sum_over_ranks

# SIGUSR1 comes from SLURM, which wants the job queued again; it wins over a SIGTERM.
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


def stop_counts(received: int) -> list[float]:
    """One number per stop signal, to be summed over the ranks: 1 for the one that was received."""
    return [float(received == number) for number in STOP_SIGNALS]


def agreed_signal(counts: Sequence[float]) -> int:
    """The signal that the summed numbers tell of; 0 if no rank got one."""
    return next((int(n) for n, count in zip(STOP_SIGNALS, counts, strict=True) if count), 0)


def agree_on_signal(received: int, device: torch.device) -> int:
    """The signal that this or another rank got, the same on every rank; 0 for none."""
    counts: Tensor = sum_over_ranks(torch.tensor(stop_counts(received), device=device))
    return agreed_signal(counts.tolist())
