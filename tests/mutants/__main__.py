"""`make mutants`: plant small faults in a sample of lines and see whether the tests notice.

    python -m tests.mutants lit_probattn/attention --sample 60 --seed 0

For each folder the tests run once with probes, which say which tests run which lines; tests that
fail there are not used. Then a sample of its lines is drawn; in each, one fault is planted, and the
tests that run the line run until one fails. Every fault has a fork of this process, which has
imported what is not ours, and loads the changed source through an import hook: no file is written,
and a fault costs the import of our packages and its tests. C (`kernels/cpu`) is changed in its text
and compiled. Verdicts are appended to a file and not sought again while their source is unchanged,
so it can be stopped at any time. At the end every fault that no test saw is printed, but those that
change nothing (`equivalent.txt`).
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.mutants.faults import c_faults, python_faults
from tests.mutants.sources import Changed, Probes, probed_lines
from tests.support.caches import keep_out_of_the_users_cache
from tests.support.paths import ROOT

EQUIVALENT = Path(__file__).with_name("equivalent.txt")
FLAGS = ["-x", "-q", "-o", "addopts=", "-m", "not slow and not gpu"]
# The second collects the garbage of all imports: more than half of a fork's fixed time.
FLAGS += ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]
LIMIT = 300.0  # seconds of a fault, which may be an endless loop
SEEN, SURVIVED, UNREACHED = "seen", "survived", "no test runs the line"
TOO_LONG = "ran too long"  # an endless loop, or a machine with too much other work
DETECTED = (SEEN, TOO_LONG)


@dataclass(frozen=True)
class Verdict:
    """What became of a fault.

    Args:
        file: path from the root.
        line: number of the line.
        text: the line.
        what: the change.
        digest: of the source without it.
        verdict: `seen`, `ran too long`, `survived` or that no test runs the line.
        among: folders and files that the tests were chosen from.
        tests: how many ran, at most.
        seconds: that they took.
    """

    file: str
    line: int
    text: str
    what: str
    digest: str
    verdict: str
    among: str
    tests: int
    seconds: float

    @property
    def words(self) -> str:
        """The fault, whatever its line's number."""
        return f"{self.file}: {self.text}: {self.what}"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a fault that counts was not seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", allow_abbrev=False)
    parser.add_argument("folders", nargs="+", help="folders or files of the packages")
    parser.add_argument("--tests", nargs="+", help="default: the folder of the same name")
    parser.add_argument("--sample", type=int, default=60, help="lines of each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    keep_out_of_the_users_cache()  # and C is compiled once for all forks
    preload()
    found: list[Verdict] = []
    for folder in given.folders:
        tests = given.tests or [tests_of(folder)]
        found += judge(folder, tests, given.sample, given.seed, given.out)
    return report(found)


def preload() -> None:
    """Import what is not ours, once for all forks."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in ("torch", "numpy", "lightning.pytorch", "pandas", "jsonargparse", "hypothesis"):
        __import__(name)
    gc.collect()
    gc.freeze()  # forks share its memory


def tests_of(folder: str) -> str:
    """Return the tests of a folder: the nearest folder of the same name."""
    parts = Path(folder).with_suffix("").parts
    for length in range(len(parts), 0, -1):
        inside = parts[1:length] if parts[0] == "lit_probattn" else parts[:length]
        for place in (Path("tests", *inside), Path("tests", *inside[:-1], f"test_{inside[-1]}.py")):
            if inside and place.exists():
                return str(place)
    return "tests"


def judge(
    folder: str, tests: Sequence[str], sample: int, seed: int, out: Path
) -> Iterator[Verdict]:
    """Yield the verdicts on a folder's sample, kept ones and new ones.

    Args:
        folder: path of the sources.
        tests: folders and files of the tests.
        sample: number of lines.
        seed: of the sample.
        out: folder of the verdicts.
    """
    kept, among = out / f"{folder.replace('/', '_')}.jsonl", " ".join(tests)
    known = {(v.digest, v.line, v.what, v.among): v for v in read(kept)}
    files = sources(folder)
    python = [name for name in files if name.endswith(".py")]
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    runs: dict[str, dict[int, list[str]]] | None = None
    for file, line, what, planted in drawn(texts, sample, seed):
        key = digest(texts[file]), line, what, among
        verdict = known.get(key)
        if verdict is None:
            if runs is None:
                runs = which_run(python, tests, out / f"{kept.stem}-{digest(among)}.runs")
            chosen = chosen_tests(runs, texts[file], file, line, list(tests), seed)
            start = time.monotonic()
            result = tried(file, planted(), chosen) if chosen else UNREACHED
            text = texts[file].splitlines()[line - 1].strip()
            seconds = round(time.monotonic() - start, 1)
            verdict = Verdict(
                *(file, line, text, what, key[0], result, among, len(chosen), seconds)
            )
            with kept.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(verdict)) + "\n")
            print(f"{verdict.verdict}: {file}:{line} {what} ({seconds:.0f} s)", flush=True)
        yield verdict


def read(path: Path) -> list[Verdict]:
    """Return the verdicts of a file; a line that was cut off is none."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(Verdict(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return found


def digest(text: str) -> str:
    """Return a short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def sources(folder: str) -> list[str]:
    """Return the paths of the sources of a folder, or of a file."""
    place = ROOT / folder
    if place.is_file():
        return [folder]
    names = [path for kind in ("py", "c", "h") for path in place.rglob(f"*.{kind}")]
    if not names:
        raise SystemExit(f"error: no sources in {folder}")
    return sorted(path.relative_to(ROOT).as_posix() for path in names)


def drawn(
    texts: dict[str, str], sample: int, seed: int
) -> list[tuple[str, int, str, Callable[[], str]]]:
    """Draw lines that can have a fault, and a fault of each."""
    possible = {
        (file, line): faults
        for file, text in texts.items()
        for line, faults in (python_faults if file.endswith(".py") else c_faults)(text).items()
    }
    lines = sorted(possible)
    random.Random(seed).shuffle(lines)  # so a larger sample begins with a smaller one
    return [
        (file, line, *random.Random(f"{seed} {file} {line}").choice(possible[file, line]))
        for file, line in lines[:sample]
    ]


def chosen_tests(
    runs: dict[str, dict[int, list[str]]],
    source: str,
    file: str,
    line: int,
    tests: list[str],
    seed: int,
) -> list[str]:
    """Return the tests that run a line, shuffled; of one outside functions, that run its file.

    If no test is recorded for a line, they are the tests of the last recorded line before it.

    Of a file with kernels alone, which have no probes, they are those that run a file beside it;
    of C they are all.
    """
    if not file.endswith(".py"):
        return tests
    start, probed = statement_of(source, line), probed_lines(source)
    if start in probed:
        # A line that runs only in forked processes is not recorded, unlike the line before it.
        lines_run = [found for found in runs.get(file, {}) if found <= start]
        names = runs[file][max(lines_run)] if lines_run else []
    else:
        folder = Path(file).parent
        files = [file] if probed else [name for name in runs if Path(name).parent == folder]
        lines = [found for name in files for found in runs.get(name, {}).values()]
        names = sorted({name for found in lines for name in found})
    return random.Random(f"{seed} {file} {line}").sample(names, len(names))


def statement_of(source: str, line: int) -> int:
    """Return the first line of the innermost statement that a line belongs to.

    A line of a decorator is before its statement: it is returned as it is.
    """
    starts = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt)
    ]
    return max((start for start, end in starts if start <= line <= end), default=line)


def which_run(
    files: Sequence[str], tests: Sequence[str], kept: Path
) -> dict[str, dict[int, list[str]]]:
    """Return for each file and line the tests that run it, from a run with probes or a kept one."""
    newest = max(
        path.stat().st_mtime
        for place in (*files, *tests)
        for path in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*.py"))
    )
    if not kept.exists() or kept.stat().st_mtime < newest:
        print(f"{', '.join(tests)}: which tests run which lines", flush=True)

        def work() -> int:
            probes = Probes()
            Changed(ROOT, files, probes.change, __ran__=probes.ran).install()
            status = pytest.main([*FLAGS[1:], *tests], plugins=[probes])
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                return int(status)
            partial = kept.with_suffix(".part")
            partial.write_text(json.dumps(probes.passed()), encoding="utf-8")
            partial.replace(kept)
            return 0

        if forked(work, 2 * 3600.0) != 0:
            raise SystemExit(f"error: {', '.join(tests)} could not be run")
    found = json.loads(kept.read_text(encoding="utf-8"))
    return {file: {int(n): names for n, names in lines.items()} for file, lines in found.items()}


def tried(file: str, source: str, tests: Sequence[str]) -> str:
    """Run tests with a changed source; return the verdict."""

    def work() -> int:
        plugins = []
        if file.endswith(".py"):
            Changed(ROOT, [file], lambda *_: source).install()
        else:
            plugins.append(_ChangedC(file, source))
        return int(pytest.main([*FLAGS, *tests], plugins=plugins))

    status = forked(work, LIMIT)
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise SystemExit(f"error: none of these tests is found again: {', '.join(tests)}")
    if status is None:
        return TOO_LONG
    return SURVIVED if status == pytest.ExitCode.OK else SEEN


class _ChangedC:
    """Plugin that has the library of C compiled from a folder with one file changed."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = Path(file), source

    def pytest_sessionstart(self) -> None:
        """Take the changed folder before the first test is collected."""
        from lit_probattn.kernels.cpu import library

        self.folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        shutil.copytree(ROOT / self.file.parent, self.folder, dirs_exist_ok=True)
        (self.folder / self.file.name).write_text(self.source, encoding="utf-8")
        library._FOLDER = self.folder

    def pytest_sessionfinish(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder)


def forked(work: Callable[[], int], limit: float) -> int | None:
    """Run a function in a fork that prints nowhere; return its status, None if it took too long."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            status = work()
        finally:
            os._exit(status)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def report(found: Sequence[Verdict]) -> int:
    """Print how many were seen, and each that was not."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    equal = {line for line in lines if line.startswith(("lit_probattn/", "datamodules/", "prof"))}
    counted = [verdict for verdict in found if verdict.words not in equal]
    unseen = [verdict for verdict in counted if verdict.verdict not in DETECTED]
    too_long = [verdict for verdict in counted if verdict.verdict == TOO_LONG]
    print(
        f"{len(found)} faults, {len(found) - len(counted)} of them change nothing; "
        f"{len(counted) - len(unseen)} of {len(counted)} seen, {len(too_long)} of these as the "
        f"tests ran longer than {LIMIT:.0f} s"
    )
    for verdict in unseen:
        print(f"{verdict.verdict}: {verdict.file}:{verdict.line}: {verdict.what}: {verdict.text}")
    return int(bool(unseen))


if __name__ == "__main__":
    sys.exit(main())
