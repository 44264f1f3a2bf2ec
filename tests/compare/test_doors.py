"""One small grid through each door: interrupted, resumed in two shards, never run twice.

Each command is started for the first of two shards and killed or interrupted after its first
checkpoint. The same command then runs both shards, through submitit's local executor where it
trains (the sweep's as two processes), and once more, when everything is finished.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from profiling.measure.rows import read_rows
from tests.compare.tiny import write_tables
from tests.datamodules.text import made as made_text
from tests.support.paths import ROOT

_PATIENCE = 600.0
SAVED_OFTEN = ("run.checkpoint_every=5", "trainer.val_check_interval=50")
SMALL = {"embed_dim": 8, "head_dim": 4, "num_layers": 1, "mlp_dim": 8}
SERIES = {
    "task": "configs/tasks/tiny/uea.yaml",
    "seeds": [0],
    "variants": {
        name: {"config": f"configs/attention/{name}.yaml", "init_args": {"num_heads": 2}}
        for name in ("softmax", "mgk")
    },
    "protocols": {"mvts": {"batch_size": 16, "model": {}}},
    "archives": {"BasicMotions": {"protocol": "mvts", "epochs": 200, "model": SMALL}},
    "others": {"protocol": "mvts", "epochs": 1, "model": SMALL},
}
HEADS = {
    **{"kind": "grid", "title": "Heads"},
    "task": "configs/tasks/tiny/wikitext103_value_aware.yaml",
    "attention": "configs/attention/softmax.yaml",
    **{"embed_dim": 16, "mlp_dim": 32, "head_dim": 8},
    **{"standard_heads": [2], "fixed_heads": [2, 4]},
    "flags": {"trainer.max_steps": 400, "data.init_args.batch_size": 4},
}
SWEEP = {
    "name": "doors",
    "model": {"kind": "attention", "head_dim_divisor": 4},
    "variants": {
        name: {"attention": {"config": f"configs/attention/{name}.yaml"}}
        for name in ("softmax", "mgk")
    },
    "grid": {"embed_dim": [16, 32], "seq_len": [16, 24], "mode": ["train"]},
    "measure": ["cost", "time"],
    "timing": {"warmup": 1, "repeats": 40},
}


def _write(path: Path, content: object) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return str(path)


def _reproduce(folder: Path) -> list[str]:
    tables = str(write_tables(folder / "tables"))
    words = ["lit_probattn.reproduce", "tiny", "--tables", tables, "--only", "listops"]
    return [*words, "--seeds", "3", "--steps", "400", "--data_dir", str(folder)]


def _compare(folder: Path) -> list[str]:
    words = ["lit_probattn", "compare", "--task", "tiny/lra_listops", "--steps", "400"]
    what = ["--attention", "softmax", "mgk num_heads=1", "--seeds", "3"]
    return [*words, *what, "--data_dir", str(folder), "--out", str(folder / "out")]


def _quickstart(folder: Path) -> list[str]:
    parts = ("num_train=256", "num_val=40", "num_test=42", "num_processes=1", "batch_size=8")
    small = [f"data.init_args.{part}" for part in parts]
    places = ["--data_dir", str(folder), "--out", str(folder / "out")]
    what = ["--task", "lra_listops_quickstart", "--attention", "softmax", "smgk num_heads=4"]
    words = ["lit_probattn", "compare", *what, "--seeds", "0", "--steps", "200"]
    return [*words, *places, "--set", *small]


def _uea(folder: Path) -> list[str]:
    table = _write(folder / "series.yaml", SERIES)
    places = ["--table", table, "--cache_dir", str(folder / "cache"), "--out", str(folder / "out")]
    return ["lit_probattn.reproduce.uea", *places, "--source", "bundled"]


def _head_size(folder: Path) -> list[str]:
    _write(folder / "tables" / "heads.yaml", HEADS)
    text = str(made_text.write(folder / "text"))
    tables = str(folder / "tables")
    return ["lit_probattn.reproduce", "heads", "--tables", tables, "--data_dir", text]


def _sweep(folder: Path) -> list[str]:
    config = _write(folder / "sweep.yaml", SWEEP)
    return ["profiling", "sweep", "--config", config, "--out", str(folder / "rows")]


@dataclass(frozen=True)
class Door:
    """A command that runs a list of points.

    Args:
        words: module and arguments, for a folder.
        stop: the signal that interrupts it.
        trains: whether its points are runs.
    """

    words: Callable[[Path], list[str]]
    stop: signal.Signals
    trains: bool = True


DOORS = {
    "reproduce": Door(_reproduce, signal.SIGKILL),
    "compare": Door(_compare, signal.SIGKILL),  # asked to end, it is done before
    "quickstart": Door(_quickstart, signal.SIGTERM),
    "uea": Door(_uea, signal.SIGINT),
    "head_size": Door(_head_size, signal.SIGKILL),
    "sweep": Door(_sweep, signal.SIGKILL, trains=False),
}


def _command(door: Door, folder: Path) -> list[str]:
    words = [sys.executable, "-m", *door.words(folder)]
    if not door.trains:
        return words
    often = SAVED_OFTEN if "--set" in words else ("--set", *SAVED_OFTEN)
    return [*words, *often, "--runs", str(folder / "runs"), "--accelerator", "cpu"]


def _start(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            words,
            **{"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}},
            **{"stdout": file, "stderr": file},
            preexec_fn=_heed_interrupts,
        )


def _heed_interrupts() -> None:
    """Take SIGINT as in a terminal: what a shell starts in its background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _begun(door: Door, folder: Path) -> bool:
    """Whether a checkpoint or a row exists from which the next start resumes."""
    if door.trains:
        return any(folder.glob("runs/*/0/checkpoints/step-*.ckpt"))
    path = folder / "rows" / "rows.jsonl"
    return path.is_file() and path.stat().st_size > 0


def _run(words: Sequence[str], log: Path) -> str:
    before = log.stat().st_size
    assert _start(words, log).wait() == 0, log.read_text(encoding="utf-8")
    return log.read_bytes()[before:].decode()


def _contents(folder: Path, pattern: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def _resume_runs(words: Sequence[str], folder: Path, log: Path) -> None:
    done = folder / "runs/reproduce/results"
    early = _contents(done, "*.jsonl")
    assert "report: " in _run([*words, "--executor", "local", "--shards", "2"], log)
    logs = folder.glob("runs/reproduce/submitit/*/*_log.out")
    told = "\n".join(path.read_text(encoding="utf-8") for path in logs)
    assert int(re.search(r"resumes from step (\d+)", told)[1]) > 0
    results = _contents(done, "*.jsonl")
    assert len(results) == 2
    assert early.items() <= results.items()
    assert sorted(json.loads(text)["num_starts"] for text in results.values()) == [1, 2]
    again = _run([*words, "--shard", "0/2"], log)
    assert re.findall(r"finished \((\d+) new\)", again)[0] == "0"
    assert _contents(done, "*.jsonl") == results


def _resume_sweep(words: Sequence[str], folder: Path, log: Path) -> None:
    path = folder / "rows/rows.jsonl"
    before = path.read_bytes()
    assert read_rows(path)
    shards = [_start([*words, "--shard", f"{i}/2"], log) for i in (0, 1)]
    assert [process.wait() for process in shards] == [0, 0], log.read_text(encoding="utf-8")
    assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    rows = [row for p in folder.glob("rows/*.jsonl") for row in read_rows(p)]
    ids = [row.point_id for row in rows if row.row_index == 0]
    # Four sizes of two variants, each counted and timed.
    assert len(ids) == len(set(ids)) == 16
    written = _contents(folder, "rows/*.jsonl")
    _run([*words, "--shard", "0/2"], log)
    assert _contents(folder, "rows/*.jsonl") == written


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DOORS)
def test_door(name, tmp_path):
    pytest.importorskip("submitit")
    if name == "uea":
        pytest.importorskip("aeon")
    door, log = DOORS[name], tmp_path / "log.txt"
    words = _command(door, tmp_path)
    process = _start([*words, "--shard", "0/2"], log)
    end = time.monotonic() + _PATIENCE
    while not _begun(door, tmp_path):
        alive = process.poll() is None and time.monotonic() < end
        assert alive, log.read_text(encoding="utf-8")
        time.sleep(0.01)
    process.send_signal(door.stop)
    process.wait()
    (_resume_runs if door.trains else _resume_sweep)(words, tmp_path, log)
