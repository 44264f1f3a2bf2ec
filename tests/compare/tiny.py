"""A tiny table below a folder, and a program that stands in for training."""

from __future__ import annotations

import copy
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from lit_probattn.analysis.__main__ import main as analyse
from lit_probattn.cli.app import main
from lit_probattn.compare.command import make_runs
from lit_probattn.compare.flags import Place
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.runs import Run
from lit_probattn.compare.tables import Table, read_table
from lit_probattn.configs import read_yaml
from tests.support.paths import CONFIGS

ACCURACY = {
    "command": "test",
    "key": "test/accuracy",
    "scale": 100,
    "printed": ["accuracy_percent", "test"],
    "unit": "%",
}
TASKS = {
    "listops": {
        "config": "configs/tasks/tiny/lra_listops.yaml",
        "published": {"trainer.precision": "16-mixed"},
        "not_in_config": ["published: another evaluation"],
        "metrics": {"test": ACCURACY},
        "length": {"data.init_args.max_length": 1, "data.init_args.max_length_tokens": 1},
        "shortened": {"trainer.max_steps": 8},
    },
    "retrieval": {
        "config": "configs/tasks/tiny/lra_retrieval.yaml",
        "metrics": {"test": ACCURACY},
    },
}
TABLE = {
    "title": "A tiny table",
    "kind": "fits",
    "tasks": ["listops", "retrieval"],
    "seeds": [3, 4],
    "published_runs": 5,
    "baseline": "softmax_2",
    "rows": {
        "softmax_2": {
            "method": "Softmax",
            "heads": "2",
            "attention": "configs/attention/softmax.yaml",
            "set": {"num_heads": 2},
            "published": {"listops": 37.0, "retrieval": 80.0, "average": 58.5},
        },
        "mgk_1": {
            "method": "MGK",
            "heads": "1",
            "attention": "configs/attention/mgk.yaml",
            "set": {"num_heads": 1},
            "published": {"listops": 36.0},
        },
    },
}
DRAWN = {"title": "Elsewhere", "kind": "drawing"}

# Trains nothing: counts steps up to the end of --trainer.max_steps and leaves what a run leaves.
# KILL in its folder kills its parent at that step, as the kernel would; FAIL fails, only runs whose
# name has its text.
PROGRAM = """
import json, os, pathlib, signal, sys, time, zipfile
words = sys.argv[3:]
here = pathlib.Path(__file__).parent
if (here / "SLOW").exists():
    def save(*_):
        (here / "SAVED").touch()
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    (here / "STARTED").touch()
    time.sleep(60)
value = dict(zip(words[1::2], words[2::2]))
if words[0] == "fit":
    base = pathlib.Path(value["--run.root"]) / value["--run.name"]
    folder = base / "0"
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    record = folder / "versions.json"
    starts = json.loads(record.read_text(encoding="utf-8"))["starts"] if record.exists() else []
    saved = sorted(folder.glob("checkpoints/step-*.ckpt"))
    first = int(saved[-1].stem.split("-")[1]) if saved else 0
    starts.append({"started": str(time.time()), "first": first, "backends": {"a (cpu)": "b"}})
    record.write_text(json.dumps({"starts": starts}))
    (folder / "config.yaml").write_text("{}")
    log = "step,train/loss,val/accuracy\\n1,1.0,0.5\\n2,0.9,0.6\\n"
    (folder / "metrics.csv").write_text(log)
    plan = pathlib.Path(__file__).with_name("KILL")
    for step in range(first + 1, int(value.get("--trainer.max_steps", 16)) + 1):
        with zipfile.ZipFile(folder / "checkpoints" / f"step-{step:08d}.ckpt", "w") as file:
            file.writestr("data", "x")
        if plan.exists() and plan.read_text(encoding="utf-8") == f"{base.name} {step}":
            plan.unlink()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
else:
    folder = pathlib.Path(words[words.index("--config") + 1]).parent
    seed = int(folder.parent.name.split("seed")[1].split("-")[0])
    accuracy = 0.25 + 0.01 * seed + 0.1 * folder.parent.name.count("mgk")
    report = {"test/accuracy": accuracy, "checkpoint": "best-00000002.ckpt"}
    (folder / "test-best-00000002.json").write_text(json.dumps(report))
once = pathlib.Path(__file__).with_name("FAIL_ONCE")
if once.exists():
    once.unlink()
    sys.exit(3)
fail = pathlib.Path(__file__).with_name("FAIL")
if fail.exists() and fail.read_text(encoding="utf-8") in folder.parent.name:
    sys.exit(3)
"""


def write_tables(
    folder: Path, table: dict[str, Any] | None = None, tasks: dict[str, Any] | None = None
) -> Path:
    """Write the files of a table folder."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"tasks": tasks or TASKS, "tiny": table or TABLE, "drawn": DRAWN}
    for name, content in contents.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    (folder / "published.csv").write_text(
        "table,task,method,heads,metric,split,value\n"
        "tiny,listops,Softmax,2,accuracy_percent,test,37.0\n"
    )
    return folder


def program(folder: Path) -> tuple[str, ...]:
    """Write the program; returns the words that start it, quickly: it needs no packages."""
    path = folder / "program.py"
    path.write_text(PROGRAM)
    return (sys.executable, "-I", "-S", str(path))


class Ended:
    """What the runner uses of a process that has ended."""

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode

    def poll(self) -> int:
        """Return the exit status."""
        return self.returncode


def run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the program in this process, for tests whose subject is not processes."""

    def start(launch: Sequence[str], arguments: Sequence[str], log: Path, *others: Any) -> Ended:
        *_, module = others
        path = Path(launch[-1])
        assert not {"KILL", "SLOW"} & {file.name for file in path.parent.iterdir()}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as out:
            out.write(f"$ {shlex.join(['python', '-m', module, *arguments])}\n")
        with patch.object(sys, "argv", [str(path), "-m", module, *arguments]):
            try:
                exec(
                    compile(path.read_text(encoding="utf-8"), path, "exec"), {"__file__": str(path)}
                )
            except SystemExit as stop:
                return Ended(int(str(stop)))
        return Ended(0)

    monkeypatch.setattr("lit_probattn.experiments.runner.start", start)
    monkeypatch.setattr("lit_probattn.experiments.runner._POLL_SECONDS", 0.0)


def run_commands_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of runs and studies in this process, without starting others."""

    def start(
        launch: Sequence[str],
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        lock: int,
        module: str = "lit_probattn",
    ) -> Ended:
        assert launch == (), "others are started for themselves"
        command = {"lit_probattn": main, "lit_probattn.analysis": analyse}[module]
        log.parent.mkdir(parents=True, exist_ok=True)
        with (
            log.open("a", encoding="utf-8") as out,
            redirect_stdout(out),
            redirect_stderr(out),
            patch.dict(os.environ, environment, clear=True),
        ):
            out.write(f"$ {shlex.join(['python', '-m', module, *arguments])}\n")
            return Ended(command(list(arguments)))

    monkeypatch.setattr("lit_probattn.experiments.runner.start", start)
    monkeypatch.setattr("lit_probattn.experiments.runner._POLL_SECONDS", 0.0)


_CONTENTS: dict[Path, dict[str, Any]] = {}


def read_shipped_files_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each shipped configuration once per process; every reader has a copy."""

    def read(path: str | Path) -> dict[str, Any]:
        place = Path.cwd() / path
        if not place.is_relative_to(CONFIGS):
            return read_yaml(path)
        if place not in _CONTENTS:
            _CONTENTS[place] = read_yaml(path)
        return copy.deepcopy(_CONTENTS[place])

    for module in ("lit_probattn.configs", "lit_probattn.compare.tables"):
        monkeypatch.setattr(f"{module}.read_yaml", read)


def measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands count and time nothing, for tests whose subject is not what a model costs."""
    counted = {"parameters": 1000, "macs": 7}
    monkeypatch.setattr("lit_probattn.compare.command.counts", lambda run: counted)
    monkeypatch.setattr("lit_probattn.compare.measured.counts", lambda run: counted)
    monkeypatch.setattr("lit_probattn.compare.measured.peak_bytes", lambda *_: 1000)
    monkeypatch.setattr(
        "lit_probattn.compare.measured.time_sides",
        lambda steps, **_: {name: [1.0] for name in steps},
    )


def log_of(run: Run) -> list[str]:
    """Return the lines of the log of a run's job."""
    path = run.folder / "logs" / f"{run.name}.log"
    return path.read_text(encoding="utf-8").splitlines()


def finished(run: Run, **more: Any) -> dict[str, Any]:
    """Write the result file of a run that nothing has trained; returns what it says."""
    result = {
        "name": run.name,
        "task": run.task.name,
        "row": run.row.name,
        "seed": run.seed,
        "values": dict.fromkeys(run.task.metrics, 50.0),
        "sources": run.sources or {},
        "parameters": 1000,
        "macs": 7,
        "macs_published_length": 4000,
        "num_test": 42,
        "selected_step": min(8, run.max_steps),
        "selected_on_test": False,
        "max_steps": run.max_steps,
        "num_starts": 1,
        "fit_seconds_of_last_start": 90.0,
        "report": {},
        "run_folder": "runs/x/0",
        "command": "python -m lit_probattn fit",
        "python": "3.11",
        "packages": {"torch": "2.15.0"},
        "git": {"revision": "abcdef123456", "dirty": False},
        "hardware": {"processor": "a processor", "num_cores": 2, "gpus": []},
        "backends": {"softmax (cpu, float32)": "sdpa"},
        **more,
    }
    result["report"] = {"checkpoint": "best-00000008.ckpt", **result["report"]}
    write_result(run, result)
    return result


def write_result(run: Run, result: Mapping[str, Any]) -> None:
    """Write the result file of a run, also with what cannot be."""
    run.result_path.parent.mkdir(parents=True, exist_ok=True)
    run.result_path.write_text(json.dumps(result) + "\n")


def tiny_runs(
    folder: Path,
    only: Sequence[str] = ("listops",),
    options: Options | None = None,
    *,
    seeds: Sequence[int] = (),
    **contents: dict[str, Any],
) -> tuple[Table, list[Run]]:
    """Runs of the tiny table, or of one with other contents, that the program runs."""
    found = read_table("tiny", write_tables(folder / "tables", **contents))
    place = Place(runs=folder / "runs", data_dir=str(folder), launch=program(folder))
    return found, make_runs(found, only, seeds or found.seeds, options or Options(), place)
