"""All tests, the slow ones too, in parts that can be interrupted.

    python -m tests.parts [FOLDER ...] [--hours 1] [--again]

runs each folder of tests by itself and adds a line to `build/test-full.jsonl`. A part that passed
at this revision is not run again. The table at the end has when each ran, how long, how many tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from tests.support.paths import ROOT

RECORD = ROOT / "build/test-full.jsonl"
COUNTS = ("tests", "failures", "errors", "skipped")


def parts() -> list[str]:
    """Return the folders of tests, and the files that lie in none."""
    folders = [path.parent for path in (ROOT / "tests").glob("*/__init__.py")]
    found = [path for path in folders if any(path.rglob("test_*.py"))]
    found += (ROOT / "tests").glob("test_*.py")
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def revision() -> str:
    """Return the commit, and a digest of what differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    changes = git("diff", "HEAD")
    if not changes:
        return git("rev-parse", "HEAD")
    mark = subprocess.run(
        ["git", "hash-object", "--stdin"], input=changes, capture_output=True, text=True, check=True
    )
    return f"{git('rev-parse', 'HEAD')}+{mark.stdout[:12]}"


def run(part: str, hours: float) -> dict[str, object]:
    """Run one part; returns what is recorded of it.

    `status` is pytest's exit status (5: the part has no test), or None after `hours`.
    """
    report = RECORD.parent / "test-full.xml"
    report.unlink(missing_ok=True)
    words = ["-n", "2", "--dist", "worksteal", f"--junitxml={report}", "--durations=3", part]
    start, at = time.time(), time.strftime("%Y-%m-%dT%H:%M:%S")
    try:
        status: int | None = subprocess.run(
            [sys.executable, "-m", "pytest", *words], cwd=ROOT, timeout=3600 * hours
        ).returncode
    except subprocess.TimeoutExpired:
        status = None
    counts = {}
    if report.exists():
        suite = ElementTree.parse(report).getroot().find("testsuite")
        counts = {name: int(suite.attrib[name]) for name in COUNTS} if suite is not None else {}
    seconds = round(time.time() - start)
    return {"part": part, "revision": revision(), "at": at, "seconds": seconds, "status": status,
            **counts}  # fmt: skip


def recorded() -> dict[str, dict[str, object]]:
    """Return the newest record of each part at this revision."""
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    now = revision()
    return {row["part"]: row for row in map(json.loads, lines) if row["revision"] == now}


def table(wanted: Sequence[str], rows: dict[str, dict[str, object]]) -> str:
    """Return a line for each part, and one for all."""
    lines = [f"{'part':28} {'at':19} {'seconds':>7} {'tests':>6} {'failed':>6} {'skipped':>7}"]
    for part in wanted:
        row = rows.get(part)
        if row is None:
            lines.append(f"{part:28} not run")
            continue
        failed = sum(int(str(row.get(name, 0))) for name in ("failures", "errors"))
        stopped = " stopped: over its time" if row["status"] is None else ""
        lines.append(
            f"{part:28} {row['at']:19} {row['seconds']:>7} {row.get('tests', 0):>6} {failed:>6} "
            f"{row.get('skipped', 0):>7}{stopped}"
        )
    passed = sum(ended(rows.get(part)) for part in wanted)
    return "\n".join([*lines, f"{passed} of {len(wanted)} parts passed at this revision"])


def ended(row: dict[str, object] | None) -> bool:
    """Whether a part ran to its end and no test failed."""
    return row is not None and row["status"] in (0, 5)


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts that have not passed yet; the exit status is 0 once all have."""
    parser = argparse.ArgumentParser(prog="python -m tests.parts", description=__doc__)
    parser.add_argument("parts", nargs="*", help="folders or files; default: all")
    parser.add_argument("--hours", type=float, default=1.0, help="of a part at most")
    parser.add_argument("--again", action="store_true", help="also parts that passed")
    given = parser.parse_args(words)
    wanted = [part.rstrip("/") for part in given.parts] or parts()
    for part in wanted:
        if not (ROOT / part).exists():  # pytest would find no test in it, and no fault
            parser.error(f"{part} does not exist: name a folder or file of tests, as tests/cli")
    RECORD.parent.mkdir(exist_ok=True)
    for part in wanted:
        if given.again or not ended(recorded().get(part)):
            row = run(part, given.hours)
            with RECORD.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = recorded()
    print(table(wanted, rows))
    return 0 if all(ended(rows.get(part)) for part in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
