"""Runs as jobs: `fit`, evaluations of the checkpoint, and the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ChildError
from lit_probattn.base.provenance import shown_command
from lit_probattn.compare.results import keep_result
from lit_probattn.compare.runs import Run
from lit_probattn.compare.tables import decimals_of
from lit_probattn.experiments.runner import Command, Job, Outcome, Runner, Work
from lit_probattn.training.checkpoints import newest_good_checkpoint, step_of
from lit_probattn.training.logs import FILE_NAME as METRICS
from lit_probattn.training.run_record import read_starts

# Adds counts of model and data to the result of a finished run.
Facts = Callable[[Run], Mapping[str, Any]]


class RunJob(Job):
    """The job that trains and evaluates a run, after the run from whose weights it starts.

    Args:
        run: the run.
        facts: adds counts of model and data to its result.
    """

    def __init__(self, run: Run, facts: Facts) -> None:
        super().__init__(
            run.name,
            run.label,
            run.folder,
            after=[RunJob(run.start, facts)] if run.start else [],
            kind=(run.task.name, run.row.name),  # all seeds take equally long
            size=run.max_steps,
        )
        self.run, self.facts = run, facts

    def is_done(self) -> bool:
        """Whether the run has a result of the current data."""
        return self.run.result() is not None

    def begins(self) -> tuple[str, int]:
        """Return the step from which it resumes, with the data files that changed since."""
        step = resumed_step(self.run)
        changed = self.run.changed_sources()
        origin = "starts" if step is None else f"resumes from step {step} of {self.size}"
        if changed:
            origin += f" (data changed since its result: {', '.join(changed)})"
        return origin, step or 0

    def position(self) -> int:
        """Return the last logged step."""
        return logged_step(self.run)

    def seconds(self) -> float | None:
        """Return the training time if it was started only once."""
        result = self.run.result()
        if result is None or result["num_starts"] != 1:
            return None
        found: float | None = result["fit_seconds_of_last_start"]
        return found

    def work(self) -> Work:
        """Train, evaluate and store the result.

        Raises:
            ChildError: the exit status of a command is not 0, or its report lacks a metric.
        """
        run, begin, seconds = self.run, time.perf_counter(), None
        if resumed_step(run) != run.max_steps:  # otherwise it was killed after its last step
            yield from self._command(run.fit_arguments())
            seconds = time.perf_counter() - begin
        version = run.version()
        if version is None:
            raise ChildError(f"`fit` wrote no run folder in {run.place.runs / run.run_name}")
        values: dict[str, float] = {}
        report: dict[str, Any] = {}
        for command, settings, metrics in run.evaluations():
            yield from self._command(run.evaluate_arguments(command, settings, version))
            path = max(version.glob(f"{command}-*.json"), key=lambda p: p.stat().st_mtime)
            report = json.loads(path.read_text())
            lacking = [m.key for m in metrics if m.key and m.key_in(report) not in report]
            if lacking:
                scores = ", ".join(key for key in report if "/" in key)
                raise ChildError(
                    f"`{command}` reports no {', '.join(lacking)}; scores: {scores}; rerun with "
                    "one of these as metric: the trained model is kept",
                    again=False,
                )
            values |= {m.name: m.value(report) for m in metrics}
        counted = dict(self.facts(run))
        every = run.task.metrics.values()
        values |= {m.name: m.value(counted) for m in every if m.command == "count"}
        found = run_result(run, version, values, report, seconds) | counted
        result = keep_result(run.result_path, found)
        digits = {name: decimals_of(one.unit) for name, one in run.task.metrics.items()}
        values = result["values"]
        numbers = ", ".join(f"{k} {v:.{digits.get(k, 2)}f}" for k, v in values.items())
        return f"{numbers}; {minutes_of(result)} minutes"

    def _command(self, arguments: list[str]) -> Generator[Command, int, None]:
        status = yield Command(arguments, launch=self.run.place.launch)
        if status:
            raise ChildError(f"`{arguments[0]}` exited with status {status}; see {self.log_path}")


def run_all(
    runs: Sequence[Run],
    facts: Facts,
    num_slots: int = 1,
    devices: Sequence[str] = (),
    attempts: int = 2,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
    after: Callable[[], object] = lambda: None,
) -> Outcome:
    """Train and evaluate the unfinished runs.

    Args:
        runs: the runs, in order.
        facts: adds counts of model and data to a result.
        num_slots, devices, attempts, say, after: see `Runner`.

    Returns:
        The outcome with runs as finished jobs.
    """
    runner = Runner(num_slots, devices, attempts, say, "runs")
    outcome = runner.run([RunJob(run, facts) for run in runs], after)
    outcome.finished = [job.run for job in outcome.finished]
    return outcome


def minutes_of(result: Mapping[str, Any]) -> str:
    """Return the training time in minutes; a resumed fit counts from its last start."""
    seconds = result["fit_seconds_of_last_start"]
    if seconds is None:
        return "unknown"
    return f"{'at least ' if result['num_starts'] > 1 else ''}{seconds / 60:.1f}"


def run_result(
    run: Run,
    version: Path,
    values: Mapping[str, float],
    report: Mapping[str, Any],
    seconds: float | None,
) -> dict[str, Any]:
    """Build the result of a finished run from its folder.

    Raises:
        ChildError: its data changed during training.
    """
    starts = read_starts(version)
    noted: dict[str, str] = next((s["sources"] for s in reversed(starts) if s.get("sources")), {})
    known = run.place.hashes.get(run.data_key, {})
    changed = sorted(k for k in noted.keys() & known.keys() if noted[k] != known[k])
    if changed:
        raise ChildError(f"data files changed during the run: {', '.join(changed)}; run it again")
    last = next((s for s in reversed(starts) if "backends" in s), starts[-1])
    return {
        "name": run.name,
        "task": run.task.name,
        "row": run.row.name,
        "seed": run.seed,
        "values": dict(values),
        "sources": run.sources or {},
        "selected_step": step_of(Path(report["checkpoint"])),
        "selected_on_test": bool(report.get("selected_on_test")),
        "max_steps": run.max_steps,
        "fit_seconds_of_last_start": seconds,
        "num_starts": len(starts),
        "report": dict(report),
        "run_folder": str(version),
        "command": f"python -m lit_probattn {shown_command(run.fit_arguments())}",
        **{key: last.get(key) for key in ("python", "packages", "git", "hardware", "backends")},
    }


def resumed_step(run: Run) -> int | None:
    """Return the step of the checkpoint from which a run resumes, or None."""
    version = run.version()
    checkpoint = version and newest_good_checkpoint(version / "checkpoints", "step")
    return step_of(checkpoint) if checkpoint else None


def logged_step(run: Run) -> int:
    """Return the last step that a run logged, or 0."""
    try:
        paths = (run.place.runs / run.run_name).glob(f"*/{METRICS}")
        with max(paths, key=lambda p: p.stat().st_mtime).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            return int(file.read().splitlines()[-1].split(b",")[0])
    except (OSError, ValueError, IndexError):
        return 0
