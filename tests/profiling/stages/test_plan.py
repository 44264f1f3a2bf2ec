"""The plan of `profiling/cuda.sh`: its rehearsal, budget, archive, limits and one-line errors."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from lit_probattn.kernels import runtime
from lit_probattn.kernels.runtime import Launch, forced, recording, seen_shapes, write_tuned
from profiling.kernels.compile import candidate_launches, candidates, tuned_call
from profiling.kernels.config import load_kernels, points
from profiling.stages import __main__ as entry
from profiling.stages import command
from profiling.stages.checks import families
from profiling.stages.place import Phase, Place, Stage, table_page
from profiling.stages.plan import STAGES
from profiling.stages.tuned import tuned_cases
from profiling.stages.units import Unit, read_units
from profiling.stages.warm import compile_units, tuning_units
from tests.support.paths import ROOT

NAMES = [stage.name for stage in STAGES]


def run_script(*arguments):
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    words = ["bash", str(ROOT / "profiling/cuda.sh"), *map(str, arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rehearsal_runs_every_stage_and_packs(tmp_path):
    archive = tmp_path / "results.tar.gz"
    done = run_script("--rehearse", "--out", tmp_path / "out", "--pack", archive)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(archive) as file:
        packed = set(file.getnames())
        file.extractall(tmp_path / "unpacked", filter="data")
    folder = tmp_path / "unpacked" / "out"
    pages = (folder / "report.md").read_text()
    for name in NAMES:
        assert {f"out/{name}/units.jsonl", f"out/{name}/report.md"} <= packed, name
        rows = read_units(folder / name / "units.jsonl")
        assert rows, name
        assert {row["status"] for row in rows} <= {"ok", "skipped"}, rows
        assert f"| {name} | [" in pages
    speed = (folder / "speed" / "report.md").read_text()
    assert "passed: all" in speed
    assert "| comparison |" in speed
    assert "graph (ms)" in speed
    assert str(tmp_path) not in pages + speed
    again = run_script("--rehearse", "--out", tmp_path / "out", "environment", "tuning")
    assert again.returncode == 0
    for name in ("environment", "tuning"):
        kept = (tmp_path / "out" / name / "units.jsonl").read_text()
        assert kept == (folder / name / "units.jsonl").read_text(), "measured again"


def test_the_budget_covers_every_stage_within_eight_minutes(capsys):
    assert command.main(["--budget", "--cores", "16"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("| ")][2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == NAMES
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert float(cells[2]) > 0, line
        limit = float(cells[3])
        assert limit <= 8, line
        # Trainings have hours of work: they go on in the next session.
        assert float(cells[2]) <= limit or cells[0] == "listops", line
        assert int(cells[4]) > 0
    by_name = {line.split(" | ")[0].strip("| "): float(line.rsplit("|", 2)[1]) for line in lines}
    assert by_name["lm"] <= 30, "the table of the first half hour"


def test_the_page_names_every_stage():
    page = (ROOT / "docs/on_a_gpu.md").read_text(encoding="utf-8")
    table = page.partition("## The stages")[2]
    assert [name for name in NAMES if f"`{name}`" not in table] == []
    named = re.findall(r"`([a-z0-9_]+)`", "".join(re.findall(r"(?m)^\| (`.*?) \|", table)))
    assert sorted(named) == sorted(NAMES)


def test_without_a_gpu_one_line(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main([]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: no CUDA device")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_an_unknown_stage_is_one_line(capsys):
    assert command.main(["unknown_one", "--rehearse"]) == 2
    assert "unknown stage 'unknown_one'" in capsys.readouterr().err


def test_missing_packages_are_named_before_anything_is_imported():
    """In a fresh interpreter in which two packages cannot be found."""
    program = (
        "import sys, importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda n, *m: None if n in ('pydantic', 'pynvml') else real(n, *m)\n"
        "from profiling.stages.__main__ import start\n"
        "status = start([])\n"
        "assert 'torch' not in sys.modules and 'pandas' not in sys.modules\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: packages are missing: pip install nvidia-ml-py pydantic\n"
    assert entry.missing_packages() == []


def sleeps():
    time.sleep(60)
    return [{}]


def tiny_stages(folder):
    """A stage that ends, one that does not, and one that fails."""

    def note():
        (folder / "notes").open("a").write("x")
        return [{"value": 1}]

    def fail():
        raise ValueError("broken")

    return tuple(
        Stage(
            name,
            name,
            minutes,
            lambda place, u=units: [Phase(u)],
            lambda p, r, n=name: table_page(n, p, r),
        )
        for name, minutes, units in (
            ("good", 1.0, [Unit("a", note)]),
            ("endless", 0.02, [Unit("a", note), Unit("b", sleeps), Unit("c", note)]),
            ("bad", 1.0, [Unit("a", fail), Unit("b", note)]),
        )
    )


def test_limits_failures_and_the_archive(tmp_path, monkeypatch, capsys):
    stages = tiny_stages(tmp_path)
    monkeypatch.setattr(command, "STAGES", stages)
    place = Place(tmp_path / "out", "cpu")
    archive = tmp_path / "all.tar.gz"
    begin = time.monotonic()
    assert command.run_plan(stages, place, 5.0, archive) == 1
    assert time.monotonic() - begin < 30
    assert "endless: " in (out := capsys.readouterr().out)
    assert "ended at its limit" in out
    with tarfile.open(archive) as file:
        names = file.getnames()
        page = file.extractfile("out/report.md").read().decode()
    assert {f"out/{s.name}/units.jsonl" for s in stages} <= set(names)
    rows = {row["unit"]: row for row in read_units(place.rows("endless"))}
    assert (rows["a"]["status"], rows["b"]["status"]) == ("ok", "failed")
    assert "c" not in rows
    assert "- bad, a: ValueError: broken" in page
    assert "| good | [good](good/report.md) | finished | 1 of 1 | 1 |" in page
    assert (tmp_path / "notes").read_text() == "xxx"
    command.run_plan(stages, place, 5.0, archive)
    assert (tmp_path / "notes").read_text() == "xxxx", "only c was left; what hung comes last"


def test_no_stage_begins_without_time(tmp_path, monkeypatch, capsys):
    stages = tiny_stages(tmp_path)
    monkeypatch.setattr(command, "STAGES", stages)
    archive = tmp_path / "all.tar.gz"
    assert command.run_plan(stages, Place(tmp_path / "out", "cpu"), 0.01, archive) == 1
    assert capsys.readouterr().out.count("no time left") == 3
    assert not (tmp_path / "notes").exists()
    assert archive.exists()


def saving_stage(files):
    """A stage that needs files to go on."""
    work = [Phase([Unit("a", lambda: [{"value": 1}])])]
    return Stage("saving", "", 1.0, lambda p: work, lambda p, r: "page", lambda place: files)


def test_what_is_needed_to_go_on_has_archives_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_ARCHIVE_BYTES", 2500)
    place, file = Place(tmp_path / "out", "cpu"), tmp_path / "kept" / "all.tar.gz"
    folder = place.out / "saving" / "runs" / "checkpoints"
    folder.mkdir(parents=True)
    files = [folder / name for name in "abcde"]
    for path in files:
        path.write_bytes(os.urandom(1000))
    stage = saving_stage(files)
    monkeypatch.setattr(command, "STAGES", (stage,))
    assert command.run_plan([stage], place, 1.0, file) == 0
    packed = {p.name for p in file.parent.iterdir()}
    assert packed == {"all.tar.gz", *(f"all.checkpoints-{n}.tar.gz" for n in (1, 2, 3))}
    with tarfile.open(file) as archive:
        assert not any("checkpoints" in name for name in archive.getnames())
    there = tmp_path / "there" / "out"
    there.parent.mkdir()
    command.unpack(file, there)
    for path in place.out.rglob("*"):
        copy = there / path.relative_to(place.out)
        assert copy.exists(), path
        assert path.is_dir() or copy.read_bytes() == path.read_bytes()
    kept = (there / "saving" / "units.jsonl").read_text()
    command.unpack(tmp_path / "nothing.tar.gz", there)  # there are results: nothing is unpacked
    done = saving_stage([there / files[0].relative_to(place.out)])
    monkeypatch.setattr(command, "STAGES", (done,))
    assert command.run_plan([done], Place(there, "cpu"), 1.0, file) == 0
    assert (there / "saving" / "units.jsonl").read_text() == kept, "measured again"
    assert {p.name for p in file.parent.iterdir()} == {"all.tar.gz", "all.checkpoints-1.tar.gz"}
    page = (there / "report.md").read_text()
    assert "a CPU" in page
    assert page.count("- Revision") == 1
    assert ": 2 sessions" in page


def test_an_archive_of_another_place_is_refused(tmp_path, capsys):
    folder, file = tmp_path / "kernels_a", tmp_path / "results.tar.gz"
    folder.mkdir()
    (folder / "report.md").write_text("")
    command.pack(Place(folder, "cpu"), file)
    words = ["--rehearse", "--out", str(tmp_path / "kernels_b"), "--unpack"]
    assert command.main([*words, str(file)]) == 2
    assert "has the results of kernels_a, expected kernels_b" in capsys.readouterr().err
    assert command.main([*words, str(tmp_path / "none.tar.gz")]) == 2
    assert "none.tar.gz: no such file" in capsys.readouterr().err
    file.write_bytes(file.read_bytes()[:40])
    assert command.main([*words, str(file)]) == 2
    told = capsys.readouterr().err
    assert "is no archive of results" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "kernels_b").exists()


@pytest.mark.slow
def test_a_signal_ends_the_stage_and_packs(tmp_path):
    """SIGTERM, as `timeout` sends: the stage's process is gone, what was measured is packed."""
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from profiling.stages import command\nfrom profiling.stages.place import Place\n"
        "from tests.profiling.stages.test_plan import tiny_stages\n"
        "folder = Path(sys.argv[1])\nstages = tiny_stages(folder)[:2]\n"
        "command.STAGES = stages\n"
        "stages = [stages[0], command.Stage(**{**vars(stages[1]), 'minutes': 5.0})]\n"
        "sys.exit(command.run_plan(stages, Place(folder / 'out', 'cpu'), 9.0, folder / 'a.tar'))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    marker = tmp_path / "out" / "endless" / "units.running0"
    end = time.monotonic() + 120
    while not (marker.exists() and marker.read_text() == "b"):
        assert time.monotonic() < end
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ended by SIGTERM; what was measured is kept" in err
    with tarfile.open(tmp_path / "a.tar") as file:
        rows = file.extractfile("out/endless/units.jsonl").read().decode().splitlines()
    assert [json.loads(row)["unit"] for row in rows] == ["a"]
    time.sleep(0.3)
    assert not processes_that_name(str(tmp_path))


def processes_that_name(text):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in words:
            found.append(words)
    return found


def test_checks_cover_every_family_of_kernels():
    found = families()
    folders = {"dense", "fish", "linear"}
    assert {name.split("/")[0] for name in found} == folders
    assert len(found) == len(set(found)) >= 8


def test_kernels_that_share_their_form_are_compiled_once():
    config = load_kernels(ROOT / "configs/profiling/kernels_cuda.yaml")
    units = compile_units(points(config), 90)
    keys = [unit.key for unit in units]
    assert len(keys) == len(set(keys))
    assert not any("reference" in key or "flash" in key for key in keys)
    long = [
        key for key in keys if ": mgk4_triton, bfloat16, head size 64, train, causal False" in key
    ]
    assert len(long) == 2, "one for batches of one, one for all others"


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """An empty folder of tuned tables in place of the package's."""
    monkeypatch.setattr(runtime, "TUNED", tmp_path / "tuned")
    runtime._tuned.cache_clear()
    yield tmp_path / "tuned"
    runtime._tuned.cache_clear()


@pytest.mark.parametrize("found", [None, Launch(64, 32, 8, 3), Launch(48, 48, 4, 2)])
def test_every_candidate_of_the_tuning_is_compiled_ahead(tables, found):
    """Units share candidates out by warps and stages; together they are what tuning launches.

    Kernels have what a table gives them, one of the candidates or not, while others are tuned.
    """
    if found is not None:
        write_tuned(90, {"softmax_forward/64/1/16bit": found}, "a GPU")
    (case,) = (case for case in tuned_cases() if case.name == "softmax")
    call = tuned_call(case, 64, torch.bfloat16, torch.device("cpu"))
    with recording(90) as defaults, seen_shapes() as shapes:
        call()
    expected = {(x.kernel.__name__, *sorted(x.options.items())) for x in defaults}
    for shape in shapes:
        for launch in candidates(shape):
            with forced(launch, shape.key), recording(90) as launches:
                call()
            expected |= {(x.kernel.__name__, *sorted(x.options.items())) for x in launches}
    units = tuning_units([case], [64], torch.bfloat16, 90)
    compiled = {
        (each.kernel.__name__, *sorted(each.options.items()))
        for unit in units
        for each in candidate_launches(case, 64, torch.bfloat16, 90, resources_of(unit))
    }
    assert len(expected) > 40
    assert compiled == expected
    if found is not None:
        tiles = {(x.options["BLOCK_Q"], x.options["BLOCK_K"]) for x in defaults[:1]}
        assert tiles == {(found.block_q, found.block_k)}


def resources_of(unit):
    warps, stages = unit.work.args[-2:]
    return {"num_warps": warps, "num_stages": stages}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiling_ahead_fills_the_cache(tmp_path):
    """In processes that do not interpret kernels: the second finds them compiled."""
    program = (
        "from profiling.stages.warm import compile_units\n"
        "from profiling.kernels.config import load_kernels, points\n"
        "config = load_kernels('configs/profiling/kernels_cuda.yaml')\n"
        "side = {'softmax8_triton': config.sides['softmax8_triton']}\n"
        "places = points(config.model_copy(update={'sides': side, 'comparisons': []}))\n"
        "form = '64, eval, causal False, batch 2'\n"
        "(unit,) = [u for u in compile_units(places, 90) if form in u.key]\n"
        "print(unit.work()[0]['new_kernels'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    counts = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert counts == ["1", "0"]


def test_the_place_is_named_after_the_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name, value in (
        ("nvmlInit", None),
        ("nvmlDeviceGetHandleByIndex", "gpu"),
        ("nvmlDeviceGetCudaComputeCapability", (9, 0)),
        ("nvmlDeviceGetName", "NVIDIA H200"),
    ):
        monkeypatch.setattr(command.pynvml, name, lambda *args, value=value: value)
    options = argparse.Namespace(rehearse=False, out=None, cores=3)
    place = command.make_place(options)
    assert place == Place(Path("reports/kernels_nvidia_h200"), "cuda", 90, 3)
