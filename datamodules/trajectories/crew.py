"""Episodes played by several processes; what is played does not depend on their number."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from datamodules.core.errors import DataError
from datamodules.trajectories.environments import Environment
from datamodules.trajectories.policies import Actor, Episode, Policy

__all__ = ["Crew", "Play"]


class Play(NamedTuple):
    """An episode to play, as `Actor.play` takes it."""

    policy: Policy
    key: tuple[int, ...]
    record: bool = False


class Crew:
    """Processes with an environment each; with one job, this process plays."""

    def __init__(self, actor: Actor | None, pool: ProcessPoolExecutor | None, jobs: int) -> None:
        self._actor, self._pool, self.jobs = actor, pool, jobs

    @classmethod
    @contextlib.contextmanager
    def of(cls, environment: Environment, jobs: int) -> Iterator[Crew]:
        """Start the processes, and end them after the block.

        Raises:
            DataError: The environment cannot be made, or a process was killed.
        """
        actor = Actor(environment)  # here too: what is missing is said before a process starts
        if jobs == 1:
            yield cls(actor, None, 1)
            return
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(jobs, context, _start, (environment,))
        try:
            yield cls(None, pool, jobs)
        except BrokenProcessPool:
            raise DataError(
                "a process that plays episodes was killed, perhaps for want of memory; lower --jobs"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)

    def play(self, plays: Iterable[Play]) -> list[Episode]:
        """Play episodes; they are returned in the order of `plays`."""
        if self._pool is None:
            actor = self._actor
            assert actor is not None
            return [actor.play(*play) for play in plays]
        return list(self._pool.map(_play, plays))


# ---- in the processes --------------------------------------------------------------------------

_actors: list[Actor] = []


def _start(environment: Environment) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _actors[:] = [Actor(environment)]


def _end_with_parent() -> None:
    """End when the caller was killed, who could not tell."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _play(play: Play) -> Episode:
    return _actors[0].play(*play)
