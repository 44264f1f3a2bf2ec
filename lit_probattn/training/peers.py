"""Which rank died: signs of life in the store of the process group, read when contact is lost.

A process that dies without a word (SIGKILL, a machine that goes down) leaves the others with
"connection closed" or a timeout, which names nobody. Each rank therefore counts up a number in the
store once a second, from a thread, with the micro-batch that it works on, and leaves a note when it
fails. The others read who stopped counting.
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
    """Return whether an error says that another rank could not be reached or did not answer."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in LOST_CONTACT)


class Peers:
    """This rank's signs of life, and what is known of the others'.

    Args:
        store: key-value store that all ranks reach; used from two threads, by calls that return at
            once.
        interval: seconds between signs of life.
    """

    def __init__(self, store: Any, rank: int, count: int, interval: float = INTERVAL_S) -> None:
        self.store, self.rank, self.count, self.interval = store, rank, count, interval
        self.progress = 0
        self._failure = ""
        self._beats, self._waits = 0, False
        self._end = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self._thread.start()

    def note_failure(self, text: str) -> None:
        """Tell the others why this rank is about to end; the first failure is the one that counts.

        The rank that holds the store stays until the others have had time to read it.
        """
        if self._failure:
            return
        self._failure = f"rank {self.rank} ({_place()}) failed: {text}"
        self._try(lambda: self.store.set("failure", self._failure))
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(2.5 * self.interval)

    def explain(self) -> str:
        """Say which rank the others lost, in one line; takes a few seconds.

        Returns:
            The failure that another rank noted, or the ranks that have stopped counting, or if all
            count, those that go on as if nothing were wrong: they hang.
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
                "the store of the ranks cannot be reached: rank 0, its machine or the torchrun "
                f"there has died; {own}"
            )
        silent = [r for r in range(self.count) if before[r]["beats"] == after[r]["beats"]]
        if silent:
            names = ", ".join(self._describe(r, after[r]) for r in silent)
            return f"{names} died (no sign of life for {MISSED_BEATS * self.interval:.0f} s); {own}"
        silent = [r for r in range(self.count) if not after[r]["waiting"]]
        names = ", ".join(self._describe(r, after[r]) for r in silent) or "none of them"
        return f"all ranks are alive, but {names} did not answer in time; {own}"

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(2 * self.interval)

    def _run(self) -> None:
        while not self._end.wait(self.interval):
            try:
                self._beat()
                if not self._failure and self.store.check(["failure"]):
                    self._failure = self.store.get("failure").decode()
            except (RuntimeError, ValueError):  # the store is gone; `explain` says so
                return

    def _beat(self) -> None:
        self._beats += 1
        state = {
            "beats": self._beats,
            "progress": self.progress,
            "waiting": self._waits,  # has lost contact, and looks for the reason
            "place": _place(),
        }
        self.store.set(f"life/{self.rank}", json.dumps(state))

    def _read(self) -> list[dict[str, Any]]:
        keys = [f"life/{rank}" for rank in range(self.count)]
        return [json.loads(value) for value in self.store.multi_get(keys)]

    def _describe(self, rank: int, state: dict[str, Any]) -> str:
        return f"rank {rank} ({state['place']}, at micro-batch {state['progress']})"

    def _try(self, work: Callable[[], Any]) -> Any:
        """Result of a call that may hang on a dead connection; None if it fails or does so."""
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(work())
            except Exception:  # a store that is gone raises many kinds
                return

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(5 * self.interval)
        return result[0] if result else None


def _place() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


class SignsOfLife(Callback):
    """Starts the signs of life of this rank when the ranks have found each other."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start, if there are other ranks."""
        global _current
        if _current is not None or not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size() > 1:
            store = dist.PrefixStore("peers", default_store())
            _current = Peers(store, dist.get_rank(), dist.get_world_size())
            trainer.strategy.barrier("signs of life")  # all have given one

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note where this rank is."""
        if _current is not None:
            _current.progress = batch_idx


def explain_lost_contact(error: BaseException) -> str | None:
    """Return one line that names the rank which caused an error of communication.

    Any other error is noted for the ranks that wait for this one.

    None if the error is not one of communication, or there are no other ranks.
    """
    if _current is None:
        return None
    if is_lost_contact(error):
        return _current.explain()
    _current.note_failure(" ".join(f"{type(error).__name__}: {error}".split())[:500])
    return None


def close() -> None:
    """End this rank's signs of life."""
    global _current
    if _current is not None:
        _current.close()
        _current = None
