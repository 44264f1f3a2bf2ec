"""Detection of failed ranks by heartbeats in the store of the process group.

If a process dies without an error (SIGKILL, a failing machine), the other ranks fail with
"connection closed" or a timeout, which does not name the rank. Each rank therefore increments a
counter in the store once a second, from a thread, along with its current micro-batch, and writes a
note when it fails. After a lost connection, the others check whose counter has stopped.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lit_probattn.base.torch_internals import default_store

INTERVAL_S = 1.0
MISSED_BEATS = 3
LOST_CONTACT = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout")
_current: Peers | None = None


def is_lost_contact(error: BaseException) -> bool:
    """Return whether an error reports that another rank was unreachable or did not answer."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in LOST_CONTACT)


class Peers:
    """Heartbeats of this rank, and the state of the others.

    Args:
        store: key-value store that all ranks can access; used from two threads, by non-blocking
            calls.
        interval: seconds between heartbeats.
    """

    def __init__(self, store: Any, rank: int, count: int, interval: float = INTERVAL_S) -> None:
        self.store, self.rank, self.count, self.interval = store, rank, count, interval
        self.progress = 0
        self._failure = ""
        self._beats, self._waits = 0, False
        self._end = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._thread.start()

    def note_failure(self, text: str) -> None:
        """Report to the others why this rank fails; only the first failure is reported.

        The rank that hosts the store waits until the others have had time to read it.
        """
        if self._failure:
            return
        self._failure = f"rank {self.rank} ({_place()}) failed: {text}"
        self._try(lambda: self.store.set("failure", self._failure))
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(2.5 * self.interval)

    def explain(self) -> str:
        """Return one line that names the failed rank; takes a few seconds.

        Returns:
            The failure that another rank reported, or the ranks without heartbeats, or if all have
            heartbeats, those that have not lost a connection, which hang.
        """
        own = f"rank {self.rank} ended at micro-batch {self.progress}"
        self._waits = True
        before = self._try(self._read)
        time.sleep(MISSED_BEATS * self.interval)
        if self._failure:
            return f"{self._failure}; {own}"
        after = self._try(self._read) if before else None
        if not before or not after:
            return (
                "the store of the ranks is unreachable: rank 0, its machine or its torchrun "
                f"has died; {own}"
            )
        silent = [r for r in range(self.count) if before[r]["beats"] == after[r]["beats"]]
        if silent:
            names = ", ".join(self._describe(r, after[r]) for r in silent)
            return f"{names} died (no heartbeat for {MISSED_BEATS * self.interval:.0f} s); {own}"
        silent = [r for r in range(self.count) if not after[r]["waiting"]]
        names = ", ".join(self._describe(r, after[r]) for r in silent) or "none of them"
        return f"all ranks are alive, but {names} did not answer in time; {own}"

    def close(self) -> None:
        """Stop the thread."""
        self._end.set()
        self._thread.join(2 * self.interval)

    def _run(self) -> None:
        while not self._end.wait(self.interval):
            try:
                self._beat()
                if not self._failure and self.store.check(["failure"]):
                    self._failure = self.store.get("failure").decode()
            except (RuntimeError, ValueError):  # the store is gone; `explain` reports it
                return

    def _beat(self) -> None:
        self._beats += 1
        state = {
            "beats": self._beats,
            "progress": self.progress,
            "waiting": self._waits,  # has lost a connection and is looking for the cause
            "place": _place(),
        }
        self.store.set(f"life/{self.rank}", json.dumps(state))

    def _read(self) -> list[dict[str, Any]]:
        keys = [f"life/{rank}" for rank in range(self.count)]
        return [json.loads(value) for value in self.store.multi_get(keys)]

    def _describe(self, rank: int, state: dict[str, Any]) -> str:
        return f"rank {rank} ({state['place']}, at micro-batch {state['progress']})"

    def _try(self, work: Callable[[], Any]) -> Any:
        """Return the result of a call that may block on a dead connection; None on failure."""
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(work())
            except Exception:  # a closed store raises various exceptions
                return

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(5 * self.interval)
        return result[0] if result else None


def _place() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


class Heartbeats(Callback):
    """Starts the heartbeats of this rank once the process group exists."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start if there are other ranks."""
        global _current
        if _current is not None or not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size() > 1:
            store = dist.PrefixStore("peers", default_store())
            _current = Peers(store, dist.get_rank(), dist.get_world_size())
            trainer.strategy.barrier("heartbeats")  # all ranks have sent one

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the current micro-batch."""
        if _current is not None:
            _current.progress = batch_idx


def explain_lost_contact(error: BaseException) -> str | None:
    """Return one line that names the rank which caused a communication error.

    Any other error is reported to the ranks that wait for this one.

    None if the error is not a communication error, or there are no other ranks.
    """
    if _current is None:
        return None
    if is_lost_contact(error):
        return _current.explain()
    _current.note_failure(" ".join(f"{type(error).__name__}: {error}".split())[:500])
    return None


def close() -> None:
    """Stop this rank's heartbeats."""
    global _current
    if _current is not None:
        _current.close()
        _current = None
