"""`bash profiling/cuda.sh`: stages in forked processes, each with a time limit, and an archive.

Everything is imported once, here; this process and those of the stages leave CUDA to the processes
that they fork.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pandas as pd
import pynvml
import torch

from lit_probattn.cli.shards import end_with_parent
from lit_probattn.configs import ConfigError
from lit_probattn.records.markdown import one_line
from lit_probattn.records.provenance import (
    git_revision,
    replace_text,
    replacing,
    versions,
)
from lit_probattn.records.rows import append_lines
from lit_probattn.records.tables import counted, markdown_lines
from profiling.stages.place import Place, Stage
from profiling.stages.plan import STAGES, stages_named
from profiling.stages.units import Row, Session, finished, note_death, read_units, run_units
from profiling.studies.study import Parser

_PAGE_SECONDS = 90.0
_SESSIONS = "sessions.jsonl"
_ARCHIVE_BYTES = 15 * 2**20  # of checkpoints, before compression
_SHORTEST = 5.0  # no stage begins with less time left


class Ended(BaseException):
    """The system asked this process to end."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(
        prog="bash profiling/cuda.sh",
        description="Measure on a GPU, in stages in the order of their value. What is finished is "
        "not repeated; what failed is tried again.",
    )
    parser.add_argument("stages", nargs="*", help="only these stages (default: all, in order)")
    parser.add_argument("--minutes", type=float, default=30.0, help="for everything (default 30)")
    parser.add_argument("--cores", type=int, help="processes that compile (default: all cores)")
    parser.add_argument("--out", type=Path, help="results (default reports/kernels_GPU)")
    parser.add_argument(
        "--pack", type=Path, help="archive of the results, written after every stage and at the end"
    )
    parser.add_argument(
        "--unpack",
        type=Path,
        metavar="FILE",
        help="go on from this archive of an earlier run, where there are no results yet",
    )
    parser.add_argument("--budget", action="store_true", help="print the budget; measure nothing")
    parser.add_argument(
        "--rehearse", action="store_true", help="everything, tiny, on the CPU, without a GPU"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plan; return 0 when all is measured, 1 when something failed or is left."""
    options = make_parser().parse_args(arguments)
    try:
        stages = stages_named(options.stages)
        if options.budget:
            place = Place(
                Path("."), "cpu" if options.rehearse else "cuda", cores=options.cores or cores()
            )
            print("\n".join(budget_lines(stages, place)))
            return 0
        place = make_place(options)
        if options.unpack is not None:
            unpack(options.unpack, place.out)
        return run_plan(stages, place, options.minutes, options.pack)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def cores() -> int:
    """Return how many processes may run at a time."""
    return len(os.sched_getaffinity(0))


def make_place(options: argparse.Namespace) -> Place:
    """Return where the plan runs; a ConfigError without a GPU."""
    if options.rehearse:
        return Place(options.out or Path("runs/rehearsal"), "cpu", cores=options.cores or 2)
    if not torch.cuda.is_available():
        raise ConfigError(
            "no CUDA device; this plan measures on a GPU. Without one: --rehearse or --budget"
        )
    gpu, capability = _gpu()
    name = re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")
    out = options.out or Path(f"reports/kernels_{name}")
    return Place(out, "cuda", capability, options.cores or cores())


def _gpu() -> tuple[str, int]:
    """Return name and capability of the GPU by NVML: CUDA itself is left to the stages."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(gpu)
    return str(pynvml.nvmlDeviceGetName(gpu)), 10 * major + minor


def budget_lines(stages: Sequence[Stage], place: Place) -> list[str]:
    """Return the budget: minutes that each stage is predicted to take, its limit, and its rows."""
    lines, total, count = [], 0.0, 0
    for stage in stages:
        seconds, rows = stage.predicted(place)
        limited = min(seconds / 60, stage.minutes)
        total, count = total + limited, count + rows
        lines.append(
            {
                **{"stage": stage.name, "what": stage.about},
                "minutes, predicted": f"{seconds / 60:.1f}",
                "limit": f"{stage.minutes:g}",
                "rows": rows,
                "minutes, so far": f"{total:.1f}",
            }
        )
    table = markdown_lines(pd.DataFrame(lines))
    note = (
        f"{total:.0f} minutes and {count} rows on {place.cores} cores. Predicted from operations "
        "and assumed speeds, not measured; a stage that reaches its limit goes on next time."
    )
    return [*table, "", note]


def run_plan(stages: Sequence[Stage], place: Place, minutes: float, pack_file: Path | None) -> int:
    """Run stages until all are finished or the time is over; report and pack whatever happens."""
    end = time.monotonic() + 60 * minutes
    name = secrets.token_hex(4)
    place.out.mkdir(parents=True, exist_ok=True)
    append_lines(place.out / _SESSIONS, [json.dumps(_session_facts(name, place))])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    ended = ""
    try:
        for stage in stages:
            left = end - time.monotonic()
            if left < _SHORTEST:
                print(f"== {stage.name}: no time left", flush=True)
                continue
            limit = min(60 * stage.minutes, left)
            print(f"== {stage.name}: {stage.about}; at most {limit / 60:.1f} minutes", flush=True)
            begin = time.monotonic()
            log = place.out / stage.name / "log.txt"
            log.parent.mkdir(parents=True, exist_ok=True)
            session = Session(name, begin + limit)
            in_time = forked(lambda: run_stage(stage, place, session), limit, log)  # noqa: B023
            for index in range(place.cores):
                note_death(place.rows(stage.name), session, index)
            forked(lambda: write_page(stage, place), _PAGE_SECONDS, log)  # noqa: B023
            state = summary(stage, place)
            note = "" if in_time else "; ended at its limit"
            spent = time.monotonic() - begin
            print(f"   {state['state']}{note}, {spent:.0f} s, {state['rows']} rows", flush=True)
            write_report(place)
            pack(place, pack_file, stages)
    except Ended as error:
        ended = str(error)
        print(f"== {ended}; what was measured is kept", file=sys.stderr, flush=True)
    finally:
        write_report(place)
        pack(place, pack_file, stages)
    print((place.out / "report.md").read_text(encoding="utf-8"))
    if pack_file is not None:
        print(f"packed: {pack_file}")
    complete = all(summary(stage, place)["state"] == "finished" for stage in stages)
    return 0 if complete and not ended else 1


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(f"ended by {signal.Signals(number).name}")


def forked(work: Callable[[], object], limit_s: float, log: Path) -> bool:
    """Run work in a process group of its own; return whether it ended within the limit.

    All of the group is ended at the limit, and when this process is told to end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(work, log)
    end, ended = time.monotonic() + limit_s, False
    try:
        while not ended and time.monotonic() < end:
            ended = bool(os.waitpid(pid, os.WNOHANG)[0])
            if not ended:
                time.sleep(0.05)
        return ended
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not ended:
            with suppress(ProcessLookupError):  # it may not have a group yet
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _become(work: Callable[[], object], log: Path) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        end_with_parent()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_stage(stage: Stage, place: Place, session: Session) -> None:
    """Run the phases of a stage, one after the other, until its time is over."""
    for phase in stage.phases(place):
        if not run_units(phase.units, place.rows(stage.name), session, phase.jobs):
            print("the time is over", flush=True)
            return


def write_page(stage: Stage, place: Place) -> None:
    """Write the page of a stage from the rows that it has."""
    rows = read_units(place.rows(stage.name))
    page = stage.report(place, rows) if rows else None
    if page is not None:
        replace_text(place.out / stage.name / "report.md", page + "\n")


def summary(stage: Stage, place: Place) -> Row:
    """Return how far a stage is."""
    rows = read_units(place.rows(stage.name))
    asked = {unit.key for phase in stage.phases(place) for unit in phase.units}
    done = finished(rows) & asked
    failed = {row["unit"] for row in rows if row["status"] == "failed"} & asked
    state = "finished" if done == asked else "not run" if not rows else "unfinished"
    if failed:
        state = f"{state}, {len(failed)} failed"
    return {"state": state, "done": len(done), "of": len(asked), "rows": len(rows)}


def write_report(place: Place) -> None:
    """Write the page of the whole plan: how far every stage is, and what failed."""
    lines = [
        f"# Measured on {'the CPU, as a rehearsal' if place.rehearses else 'a GPU'}",
        "",
        "- Command: `bash profiling/cuda.sh" + (" --rehearse`" if place.rehearses else "`"),
        *_session_lines(place),
        "",
    ]
    table, wrong = [], []
    for stage in STAGES:
        found = summary(stage, place)
        page = f"{stage.name}/report.md"
        link = f"[{stage.about}]({page})" if (place.out / page).exists() else stage.about
        units = f"{found['done']} of {found['of']}"
        table.append(
            {
                **{"stage": stage.name, "what": link, "state": found["state"]},
                **{"units": units, "rows": found["rows"]},
            }
        )
        for row in read_units(place.rows(stage.name)):
            if row["status"] == "failed":
                wrong.append(f"- {stage.name}, {row['unit']}: {row.get('reason', 'no reason')}")
    lines += markdown_lines(pd.DataFrame(table))
    if wrong:
        lines += ["", "Failed; the same command tries them again:", "", *dict.fromkeys(wrong)]
    replace_text(place.out / "report.md", "\n".join(lines) + "\n")


def _session_facts(name: str, place: Place) -> Row:
    return {
        **{"session": name, "revision": git_revision(), "versions": versions()},
        "hardware": "a CPU" if place.rehearses else _gpu()[0],
    }


def _session_lines(place: Place) -> list[str]:
    """Say of which code and versions the rows are: one line for every sort of session."""
    path = place.out / _SESSIONS
    every = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    same: dict[tuple[str, ...], list[str]] = {}
    for one in every:
        kind = (one["revision"], one["hardware"], one["versions"])
        same.setdefault(kind, []).append(one["session"])
    return [
        one_line(f"- Revision {revision}, {hardware}, {packages}: {counted(len(names), 'session')}")
        for (revision, hardware, packages), names in same.items()
    ]


def pack(place: Place, file: Path | None, stages: Sequence[Stage] = ()) -> None:
    """Write all results into one archive, and what is needed to go on into others beside it.

    Every archive is written whole or not at all, and can be read without the others. Those of
    checkpoints, NAME.checkpoints-1.tar.gz and on, have files of up to 15 MiB each.
    """
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    results = [p for p in sorted(place.out.rglob("*")) if _is_result(p, place.out)]
    _write_archive(file, place.out, results)
    saved = [path for stage in stages for path in stage.checkpoints(place)]
    parts = _parts(saved)
    for number, part in enumerate(parts, 1):
        _write_archive(_beside(file, number), place.out, part)
    for old in archives(file)[1 + len(parts) :]:
        old.unlink()


def _is_result(path: Path, folder: Path) -> bool:
    return path.is_file() and not {"checkpoints", "cache"} & set(path.relative_to(folder).parts)


def _parts(files: Sequence[Path]) -> list[list[Path]]:
    """Return groups of files that are not larger than an archive may be, if a file is not."""
    parts: list[list[Path]] = []
    size = _ARCHIVE_BYTES
    for file in files:
        size += file.stat().st_size
        if size > _ARCHIVE_BYTES:
            parts.append([])
            size = file.stat().st_size
        parts[-1].append(file)
    return parts


def _write_archive(file: Path, folder: Path, members: Sequence[Path]) -> None:
    with replacing(file) as target, tarfile.open(fileobj=target, mode="w:gz") as archive:
        for path in members:
            with suppress(FileNotFoundError):  # a checkpoint that a newer one replaced
                archive.add(path, arcname=str(Path(folder.name) / path.relative_to(folder)))


def _beside(file: Path, number: int) -> Path:
    stem = re.sub(r"(\.tar)?(\.gz|\.tgz)?$", "", file.name)
    return file.with_name(f"{stem}.checkpoints-{number}.tar.gz")


def archives(file: Path) -> list[Path]:
    """Return an archive of results and those of checkpoints beside it."""
    found = [file]
    while (following := _beside(file, len(found))).exists():
        found.append(following)
    return found


def unpack(file: Path, folder: Path) -> None:
    """Unpack what `pack` wrote, if there are no results in the folder yet.

    Raises:
        ConfigError: the file is missing, cannot be read, or has the results of another place.
    """
    if folder.exists():
        print(f"{folder} is there: nothing is unpacked", flush=True)
        return
    if not file.is_file():
        raise ConfigError(f"--unpack {file}: no such file")
    for archive in archives(file):
        try:
            with tarfile.open(archive) as opened:
                tops = {Path(name).parts[0] for name in opened.getnames()}
                if tops - {folder.name}:
                    raise ConfigError(
                        f"{archive} has the results of {', '.join(sorted(tops))}, expected "
                        f"{folder.name}: give its folder with --out"
                    )
                opened.extractall(folder.parent, filter="data")
        except (tarfile.TarError, OSError, EOFError) as error:
            raise ConfigError(f"{archive} is no archive of results: {error}") from error
        print(f"unpacked {archive}", flush=True)
