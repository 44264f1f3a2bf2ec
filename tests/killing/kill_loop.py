"""`python -m tests.killing.kill_loop`: SIGKILL at random moments changes no result.

Each round starts a piece of work (training, in validation, while it writes a checkpoint, the
building of a cache, a sweep), kills it at a random moment, starts it again, and compares what it
made with what an undisturbed run made, bit for bit. Prints "N of N".
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lit_probattn.base.provenance import git_revision
from tests.killing.victims import VICTIMS, Victim
from tests.support.caches import keep_out_of_the_users_cache
from tests.support.forks import Forked

LIMIT_S = 120.0


def start(victim: Victim, folder: Path) -> tuple[Forked, int]:
    """Fork a process that does the work; returns it and the end of a pipe that it talks to."""
    receive, send = os.pipe()

    def say(word: str) -> None:
        os.write(send, f"{word}\n".encode())

    process = Forked(lambda: victim.run(folder, say), os.environ, folder / "log.txt")
    os.close(send)
    return process, receive


def undisturbed(victim: Victim, folder: Path) -> tuple[str, int]:
    """Result of a run that nothing disturbs, and how often it said that it was in the phase."""
    process, talk = start(victim, folder)
    with os.fdopen(talk) as lines:
        said = [line.strip() for line in lines]
    if status := process.wait():
        raise RuntimeError(f"the undisturbed run failed ({status}); see {folder}/log.txt")
    return victim.result(folder), said.count(victim.phase)


def killed(victim: Victim, folder: Path, moment: int, delay: float) -> bool:
    """Run until the phase was reached `moment` times, wait, kill; whether the kill came in time."""
    process, talk = start(victim, folder)
    seen, text, end = 0, b"", time.monotonic() + LIMIT_S
    while seen < moment and time.monotonic() < end:
        if not select.select([talk], [], [], 1.0)[0]:
            continue
        part = os.read(talk, 4096)
        if not part:
            break
        text += part
        seen = text.decode().split("\n").count(victim.phase)
    time.sleep(delay)
    process.kill()
    status = process.wait()
    os.close(talk)
    return status == -signal.SIGKILL


def round_of(
    kind: str, reference: tuple[str, int], chance: random.Random, folder: Path
) -> tuple[bool, str]:
    """Kill one piece of work at a random moment, finish it, compare; with a line that says it."""
    victim = VICTIMS[kind]
    expected, moments = reference
    latest = victim.delay
    for attempt in range(20):
        place = folder / str(attempt)
        place.mkdir(parents=True)
        moment, delay = chance.randint(1, moments), chance.uniform(0.0, latest)
        if killed(victim, place, moment, delay):
            break
        latest = delay  # the work had ended
    else:
        return False, f"{kind}: never killed in time"
    where = f"{kind}, moment {moment} of {moments} + {1000 * delay:.0f} ms"
    process, talk = start(victim, place)
    status = process.wait()
    os.close(talk)
    if status:
        return False, f"{where}: the second start failed ({status}), see {place}/log.txt"
    same = victim.result(place) == expected
    return same, f"{where}: {'identical' if same else 'DIFFERENT'}"


def run(kills: int, seed: int, kinds: Sequence[str], root: Path) -> int:
    """Kill and compare in turns; returns how many results were identical."""
    git_revision()  # asked once: rows of a sweep name it
    chance = random.Random(seed)
    references: dict[str, tuple[str, int]] = {}
    good = 0
    for number in range(kills):
        kind = kinds[number % len(kinds)]
        if kind not in references:
            quiet = root / f"undisturbed {kind}"
            quiet.mkdir(parents=True)
            references[kind] = undisturbed(VICTIMS[kind], quiet)
        same, line = round_of(kind, references[kind], chance, root / str(number))
        good += same
        print(f"[{number + 1}/{kills}] {line}", flush=True)
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; the exit status is 0 if every result was identical."""
    keep_out_of_the_users_cache()
    parser = argparse.ArgumentParser(prog="python -m tests.killing.kill_loop", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--kinds", nargs="+", choices=list(VICTIMS), default=list(VICTIMS))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        good = run(options.kills, options.seed, options.kinds, Path(folder))
    print(f"{good} of {options.kills}")
    return 0 if good == options.kills else 1


if __name__ == "__main__":
    sys.exit(main())
