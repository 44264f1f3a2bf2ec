"""Small pieces of measurement, each with rows of its own on disk as soon as it is finished."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_probattn.cli.shards import end_with_parent, fork_context
from lit_probattn.records.provenance import replace_text
from lit_probattn.records.rows import append_lines
from profiling.measure.timing import lost_gpu

Row = dict[str, Any]

_SAVED = 75  # exit status of a process whose unit is unfinished


class Skipped(Exception):
    """A unit that cannot run here, which is no failure; the message says why."""


class Unfinished(Exception):
    """A unit saved what it has at the end of its session, and goes on in the next one."""


@dataclass(frozen=True)
class Unit:
    """One piece of a stage.

    Args:
        key: its name in the rows of its stage.
        work: returns its rows, at least one.
        seconds: predicted.
        rows: predicted.
    """

    key: str
    work: Callable[[], Sequence[Mapping[str, Any]]]
    seconds: float = 1.0
    rows: int = 1


@dataclass(frozen=True)
class Session:
    """One run of the plan: its name, by which rows say whose they are, and when it must end."""

    name: str
    end: float  # of time.monotonic

    @property
    def is_over(self) -> bool:
        """Whether no unit may start any more."""
        return time.monotonic() >= self.end


_running: list[Session] = []  # the session of this process, where it works on units


def seconds_left() -> float:
    """Return how long the unit that calls this may take; infinity outside of a session."""
    return _running[-1].end - time.monotonic() if _running else float("inf")


def read_units(path: Path) -> list[Row]:
    """Return the rows of a file; a last line that was cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [row for row in rows if isinstance(row, dict)]


def finished(rows: Iterable[Row]) -> set[str]:
    """Return the keys of the units that need not run again: measured, or impossible here."""
    rows = list(rows)
    return {row["unit"] for row in rows} - {r["unit"] for r in rows if r["status"] == "failed"}


def run_units(units: Sequence[Unit], path: Path, session: Session, jobs: int = 1) -> bool:
    """Run the units that are not finished; return whether all of them were tried.

    They run in forked processes that share them, and this process leaves CUDA alone. When one of
    these dies, another goes on with the next unit. What failed in another session is tried again,
    after the rest, since it may hang; what failed or died in this one is not.
    """
    rows = read_units(path)
    done = finished(rows)
    before = {row["unit"] for row in rows} - done
    kept = [row for row in rows if row["unit"] in done or row["session"] == session.name]
    if kept != rows or (path.exists() and not path.read_bytes().endswith(b"\n")):
        replace_text(path, "".join(f"{json.dumps(row)}\n" for row in kept))
    context = fork_context()
    while True:
        tried = {row["unit"] for row in read_units(path)}
        missing = [unit for unit in units if unit.key not in tried]
        missing.sort(key=lambda unit: unit.key in before)
        if not missing or session.is_over:
            return not missing
        shares = [missing[i::jobs] for i in range(min(jobs, len(missing)))]
        arguments = [(share, path, session, i) for i, share in enumerate(shares)]
        processes = [context.Process(target=_share, args=given) for given in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode == _SAVED for process in processes):
            return False
        died = [i for i, process in enumerate(processes) if process.exitcode]
        noted = [note_death(path, session, i) for i in died]
        if died and not any(noted) and {row["unit"] for row in read_units(path)} == tried:
            return False  # they die before they begin


def note_death(path: Path, session: Session, index: int = 0) -> bool:
    """Give the unit during which a process died a row that says so; return whether it had none."""
    marker = _marker(path, index)
    if not marker.exists():
        return False
    key = marker.read_text(encoding="utf-8")
    marker.unlink()
    if key in {row["unit"] for row in read_units(path) if row["session"] == session.name}:
        return False
    row = {"unit": key, "status": "failed", "reason": "its process died or was ended"}
    append_lines(path, [json.dumps({**row, "session": session.name, "seconds": None})])
    return True


def _marker(path: Path, index: int) -> Path:
    return path.with_name(f"{path.stem}.running{index}")


def _share(units: Sequence[Unit], path: Path, session: Session, index: int) -> None:
    end_with_parent()
    _running.append(session)
    marker = _marker(path, index)
    for unit in units:
        if session.is_over:
            return
        marker.write_text(unit.key, encoding="utf-8")
        begin, lost = time.monotonic(), False
        try:
            found: list[Row] = [{"status": "ok", **row} for row in unit.work()]
        except Unfinished as error:
            marker.unlink()
            print(f"{unit.key}: goes on next time, {error}", flush=True)
            os._exit(_SAVED)
        except Skipped as error:
            found = [{"status": "skipped", "reason": str(error)}]
        except Exception as error:
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            lost = lost_gpu(error)
            found = [{"status": "failed", "reason": reason}]
        seconds = round(time.monotonic() - begin, 2)
        same = {"unit": unit.key, "session": session.name, "seconds": seconds}
        append_lines(path, [json.dumps({**same, **row}) for row in found])
        marker.unlink()
        print(f"{unit.key}: {found[0]['status']}, {seconds} s", flush=True)
        if lost:  # a fresh process goes on
            os._exit(1)
