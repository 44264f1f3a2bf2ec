"""Every run is trained once, in parallel or in shards; a killed command resumes without repeats."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import yaml

from lit_probattn.base.progress import duration
from lit_probattn.compare.model import counts
from lit_probattn.compare.protocol import Options, differences, overrides
from lit_probattn.compare.report import Report
from lit_probattn.compare.runner import RunJob, run_all
from lit_probattn.compare.runs import Run
from lit_probattn.compare.tables import Metric, read_table
from lit_probattn.configs import read_yaml
from lit_probattn.experiments import runner as jobs
from lit_probattn.experiments.launch import child_environment
from lit_probattn.experiments.runner import Pace, Slot
from lit_probattn.reproduce.__main__ import main
from lit_probattn.training.run_record import read_starts
from tests.compare.tiny import (
    TABLE,
    log_of,
    measure_nothing,
    program,
    run_here,
    tiny_runs,
    write_tables,
)
from tests.support.forks import Forked
from tests.support.runs import in_child

pytestmark = pytest.mark.usefixtures("sketches")
COUNTED = {"parameters": 1, "macs": 2, "macs_published_length": 2, "num_test": 42}


def runner(jobs=1, lines=None):
    """Return `run_all` with slots, whose messages are appended to `lines`."""
    say = [].append if lines is None else lines.append
    return partial(run_all, facts=lambda run: COUNTED, num_slots=jobs, say=say)


def commands_run(run):
    return [line.split()[4] for line in log_of(run) if line.startswith("$ python -m lit_probattn")]


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_run_runs_once(tmp_path, jobs, monkeypatch):
    if jobs == 1:
        run_here(monkeypatch)
    _, runs = tiny_runs(tmp_path)
    reports, lines = [], []
    outcome = runner(jobs, lines)(runs, after=lambda: reports.append(1))
    told = [re.split("[,;]", line)[0] for line in lines if "runs finished" in line]
    assert told == [f"{i} of 4 runs finished" for i in (1, 2, 3, 4)]
    assert len(runs) == outcome.ran == len(reports) == 4
    assert [commands_run(run) for run in runs] == [["fit", "test"]] * 4
    values = [run.result()["values"]["test"] for run in runs]
    assert values == pytest.approx([28.0, 38.0, 29.0, 39.0])
    assert all(run.result()["num_test"] == 42 for run in runs)
    lines = []
    again = runner(jobs, lines)(runs, after=lambda: reports.append(1))
    assert (again.ran, len(again.finished), len(reports)) == (0, 4, 4)
    assert sum("already finished" in line for line in lines) == 4
    assert [commands_run(run) for run in runs] == [["fit", "test"]] * 4


def test_killed_command_goes_on_and_runs_no_finished_run_again(tmp_path, monkeypatch):
    _, runs = tiny_runs(tmp_path)
    (tmp_path / "KILL").write_text(f"{runs[1].name} 9")  # in the second run, at its step 9 of 16

    def work():
        runner()(runs)
        return 0

    assert in_child(work) == -signal.SIGKILL
    assert [run.result() is not None for run in runs] == [True, False, False, False]
    run_here(monkeypatch)
    lines = []
    outcome = runner(1, lines)(runs)
    assert (outcome.ran, len(outcome.finished)) == (3, 4)
    assert "already finished" in lines[0]
    assert "resumes from step 9 of 16" in lines[1]
    assert commands_run(runs[0]) == ["fit", "test"]
    assert commands_run(runs[1]) == ["fit", "fit", "test"]
    starts = read_starts(runs[1].version())
    assert [start["first"] for start in starts] == [0, 9]
    assert runs[1].result()["num_starts"] == 2


def test_run_of_another_process_is_left_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_probattn.experiments.runner.GRACE_SECONDS", 0.2)
    _, runs = tiny_runs(tmp_path, ["listops", "mgk_1"])
    run_here(monkeypatch)
    lock = runs[0].folder / "locks" / f"{runs[0].name}.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outcome = runner()(runs)
    assert outcome.elsewhere == [runs[0].label]
    assert outcome.finished == runs[1:]


def test_failed_run_is_tried_again_after_the_others(tmp_path, monkeypatch):
    run_here(monkeypatch)
    _, runs = tiny_runs(tmp_path)
    (tmp_path / "FAIL_ONCE").touch()
    lines = []
    outcome = runner(1, lines)(runs)
    assert (outcome.ran, outcome.failed) == (4, {})
    assert outcome.finished == [*runs[1:], runs[0]]
    (failed,) = [line for line in lines if ": failed: " in line]
    assert failed.startswith("[1/4] ")
    assert failed.endswith("; retried after the others")
    assert lines[-3].startswith("[1/4] ")
    assert "resumes from step 16 of 16" in lines[-3]
    (tmp_path / "FAIL").touch()
    runs[0].result_path.unlink()
    failed = runner(1, lines)(runs).failed
    assert list(failed) == [runs[0].label]
    assert "`test` exited with status 3; see " in failed[runs[0].label]
    assert commands_run(runs[0]) == ["fit", "test", "test", "test"]


class Timed(RunJob):
    """A run that took a while."""

    took = None

    def seconds(self):
        return self.took


def job_of(run, took=None):
    job = Timed(run, lambda run: COUNTED)
    vars(job)["took"] = took
    return job


def slot_of(run, first=0, seconds=0.0):
    begin = time.monotonic() - seconds
    return Slot("", job_of(run), nullcontext(), 0, iter(()), first, None, begin)


def test_time_left_follows_each_rows_own_pace(tmp_path):
    _, runs = tiny_runs(tmp_path)  # softmax, mgk, softmax, mgk of 16 steps
    jobs = [job_of(run) for run in runs]
    pace = Pace()
    assert pace.seconds_left(jobs, [], 1) is None
    pace.learn(job_of(runs[0], 32.0))
    pace.learn(job_of(runs[0]))  # nobody knows
    assert pace.seconds_left(jobs[1:3], [], 1) == pytest.approx(64.0)
    pace.learn(job_of(runs[1], 320.0))
    assert pace.seconds_left(jobs[2:], [], 1) == pytest.approx(352.0)
    assert pace.seconds_left(jobs[2:], [], 2) == pytest.approx(176.0)
    folder = tmp_path / "runs" / runs[3].name / "0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("step,train/loss\n4,1.0\n12,0.5\n")
    running = slot_of(runs[3], first=8)
    assert pace.seconds_left(jobs[2:3], [running], 1) == pytest.approx(32.0 + 80.0)
    assert pace.seconds_left(jobs[2:3], [running], 2) == pytest.approx(80.0)  # the longest
    new = Pace()  # nothing is finished: the pace of what runs, since it was started
    slot = slot_of(runs[3], first=8, seconds=20.0)
    assert new.seconds_left(jobs[2:3], [slot], 1) == pytest.approx(20.0 + 80.0, rel=0.01)


def test_a_run_that_was_started_twice_tells_no_pace(tmp_path, monkeypatch):
    _, runs = tiny_runs(tmp_path, ["listops", "mgk_1"])
    found = {"fit_seconds_of_last_start": 32.0, "num_starts": 1}
    monkeypatch.setattr(type(runs[0]), "result", lambda run: found)
    assert RunJob(runs[0], lambda run: COUNTED).seconds() == 32.0
    found["num_starts"] = 2  # the seconds are those of its last start
    assert RunJob(runs[0], lambda run: COUNTED).seconds() is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7, "7 s"), (100, "2 min"), (3599, "1 h 0 min"), (11400, "3 h 10 min"), (2e5, "2 d 7 h")],
)
def test_times_are_said_as_people_do(seconds, text):
    assert duration(seconds) == text


def test_interrupted_command_has_its_runs_saved(tmp_path):
    """SIGTERM and Ctrl-C end the command; what runs is asked to save, not killed."""
    words, log = arguments(tmp_path, "--only", "listops"), tmp_path / "log"
    (tmp_path / "SLOW").touch()
    process = Forked(lambda: main(words), os.environ, log)
    end = time.monotonic() + 240
    while time.monotonic() < end and not (tmp_path / "STARTED").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    told = log.read_text(encoding="utf-8")
    assert "interrupted: 0 of 4 runs are finished; rerun the command to resume" in told
    assert (tmp_path / "SAVED").exists()


def test_environment_of_a_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = [child_environment(slot, 3, ["5", "7"]) for slot in range(3)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in found] == ["5", "7", "5"]
    assert found[0]["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 3))
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"} & set(found[0])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert not {"SLURM_JOB_ID", "SUBMITIT_EXECUTOR"} & set(child_environment(0, 1, []))
    assert child_environment(0, 1, [], ["srun"])["SLURM_JOB_ID"] == "7"


def arguments(tmp_path, *more):
    tables = write_tables(tmp_path / "tables")
    launch = shlex.join(program(tmp_path))
    places = ["--tables", str(tables), "--runs", str(tmp_path / "runs"), "--launch", launch]
    return ["tiny", *places, "--data_dir", str(tmp_path), *more]


def test_shards_are_a_partition_and_the_whole_command_reports(tmp_path, capsys, monkeypatch):
    run_here(monkeypatch)
    measure_nothing(monkeypatch)
    done = tmp_path / "runs/reproduce/results"
    found = []
    for index in range(3):
        before = set(done.glob("*.jsonl"))
        shard = ("--shard", f"{index}/3")
        assert main(arguments(tmp_path, "--only", "listops", *shard)) == 0
        found.append(set(done.glob("*.jsonl")) - before)
    assert [len(part) for part in found] == [2, 1, 1]
    assert len(set.union(*found)) == 4
    assert "report:" not in capsys.readouterr().out
    assert main(arguments(tmp_path, "--only", "listops")) == 0
    printed = capsys.readouterr().out
    assert "4 of 4 runs finished (0 new)" in printed
    assert "report: " in printed
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(arguments(tmp_path, "--only", "listops")) == 0
    assert "2 of 2 runs finished" in capsys.readouterr().out


def test_a_dry_run_ends_with_what_the_report_plans(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Report, "plan", lambda self, runs, commands: [f"then {len(runs)} studies"])
    monkeypatch.setattr("lit_probattn.compare.command.dry_run", lambda *_: print("the runs"))
    assert main(arguments(tmp_path, "--only", "listops", "--dry-run")) == 0
    assert capsys.readouterr().out == "the runs\nthen 4 studies\n"


def test_a_dry_run_prints_a_row_of_costs_for_each_method(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "lit_probattn.compare.command.counts", lambda run: {"parameters": 12345, "macs": 7_000_000}
    )
    monkeypatch.setattr("lit_probattn.compare.command.step_bytes", lambda run: 3 << 20)
    words = ["--only", "listops", "--dry-run", "--steps", "1000", "--tflops", "0.000001"]
    assert main(arguments(tmp_path, *words)) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "listops" in line
    ]
    (run, *_) = tiny_runs(tmp_path, options=Options(steps=1000))[1]
    batch = run.config["data"]["init_args"]["batch_size"]
    seconds = 1000 * batch * 6 * 7_000_000 / 1e6
    costs = ["1000", str(batch), "12,345", "7", "3", "2 of 2", "present", duration(seconds)]
    assert cells == [
        ["listops", "Softmax, 2 heads", *costs],
        ["listops", "MGK, 1 head", *costs],
    ]


def test_runs_see_the_devices_that_are_named_or_that_of_their_rank(tmp_path, monkeypatch):
    run_here(monkeypatch)
    measure_nothing(monkeypatch)
    begin, seen = jobs.start, []

    def start(launch, words, log, environment, *others):
        seen.append(environment.get("CUDA_VISIBLE_DEVICES"))
        return begin(launch, words, log, environment, *others)

    monkeypatch.setattr(jobs, "start", start)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for devices, only, visible in (("5,7", "mgk_1", "5"), ("", "softmax_2", "3")):
        words = ["--only", "listops", only, "--seeds", "3", "--devices", devices]
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert main(arguments(tmp_path, *words)) == 0
        assert set(seen) == {visible}
        seen.clear()


def test_missing_data_are_listed_with_the_remedy_and_the_rest_runs(tmp_path, capsys, monkeypatch):
    run_here(monkeypatch)
    measure_nothing(monkeypatch)
    assert main(arguments(tmp_path, "--seeds", "3")) == 1
    printed = capsys.readouterr()
    (line,) = [text for text in printed.err.splitlines() if text.startswith("skipped: retrieval")]
    assert "new_aan_pairs.train.tsv" in line
    assert "lit-probattn data prepare retrieval" in line
    assert "2 of 3 runs finished (2 new); 0 failed, 0 in other processes, 1 tasks" in printed.out


def test_a_metric_that_no_report_has_is_one_line_after_one_attempt(tmp_path, monkeypatch):
    run_here(monkeypatch)
    metric = Metric("f1", "test", "test/f1", ("", ""), "as logged")
    (run, *_) = tiny_runs(tmp_path)[1]
    run = replace(run, task=replace(run.task, metrics={"f1": metric}))
    outcome = runner()([run])
    (line,) = outcome.failed.values()
    assert "`test` reports no test/f1; scores: test/accuracy;" in line
    assert commands_run(run) == ["fit", "test"]


def test_options_make_other_runs(tmp_path):
    plain = tiny_runs(tmp_path)[1][0]
    others = [
        Options(steps=4),
        Options(max_seq_len=24),
        Options(shortened=True),
        Options(settings={"model.init_args.lr": 1e-2}),
        Options(trainer="configs/trainer/one_gpu.yaml"),
    ]
    digests = {tiny_runs(tmp_path, options=options)[1][0].digest for options in others}
    assert len(digests | {plain.digest}) == 6
    assert Options(steps=4).shortens
    assert not Options(settings={"a.b": 1}).shortens


def test_steps_shorten_intervals_to_whole_steps_of_given_micro_batches(tmp_path):
    given = Options(steps=4, settings={"trainer.accumulate_grad_batches": 8})
    run = tiny_runs(tmp_path, options=given)[1][0]
    assert run.config["trainer"]["val_check_interval"] == 8
    given = Options(steps=3, settings={"trainer.accumulate_grad_batches": 2})
    run = tiny_runs(tmp_path, options=given)[1][0]
    assert run.config["trainer"]["val_check_interval"] == 6


def test_steps_shorten_what_the_files_of_a_run_set(tmp_path):
    """Micro-batches of the trainer file, and the warm-up of the attention file."""
    files = {
        "trainer": {"trainer": {"accumulate_grad_batches": 8}},
        "attention": {"model": {"init_args": {"warmup_steps": 8}}},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    options = Options(steps=4, trainer=str(tmp_path / "trainer.yaml"))
    run = tiny_runs(tmp_path, options=options)[1][0]
    assert run.config["trainer"]["max_steps"] == 4
    assert run.config["trainer"]["val_check_interval"] == 8
    row = replace(run.row, attention=str(tmp_path / "attention.yaml"))
    assert overrides(run.task, row, options)["model.init_args.warmup_steps"] == 2


def test_a_row_that_sets_nothing_is_its_preset(tmp_path):
    row = {key: TABLE["rows"]["mgk_1"][key] for key in ("method", "heads", "attention")}
    table = {**TABLE, "rows": {"plain": row}, "baseline": "plain", "tasks": ["listops"]}
    found = read_table("tiny", write_tables(tmp_path / "tables", table))
    attention = Run(found.tasks["listops"], found.rows["plain"], 3).config["model"]["init_args"]
    preset = read_yaml(row["attention"])["model"]["init_args"]["attention"]
    assert attention["attention"]["class_path"] == preset["class_path"]
    assert attention["attention"]["init_args"] == preset["init_args"]


def test_result_has_what_a_reader_needs(tmp_path, monkeypatch):
    run_here(monkeypatch)
    _, runs = tiny_runs(tmp_path, ["listops", "mgk_1"])
    runner()(runs[:1])
    result = json.loads(runs[0].result_path.read_text(encoding="utf-8"))
    wanted = {"task", "row", "seed", "values", "selected_step", "selected_on_test", "max_steps"}
    wanted |= {"num_starts", "run_folder", "command", "packages", "git", "hardware", "backends"}
    assert wanted <= set(result)
    assert result["command"].startswith("python -m lit_probattn fit --config configs/tasks/")
    assert set(counts(runs[0])) == {"parameters", "macs"}


@pytest.mark.parametrize(
    ("checkpoint", "anew"), [("average-10", True), ("best", False), ("last", False)]
)
def test_a_mean_of_checkpoints_is_known_by_their_distance(checkpoint, anew, tmp_path):
    table, _ = tiny_runs(tmp_path)
    task = replace(table.tasks["listops"], checkpoint=checkpoint)
    row = table.rows["softmax_2"]
    plain, far = Options(), Options(settings={"run.checkpoint_every": 3})
    assert (Run(task, row, 0, plain).name != Run(task, row, 0, far).name) is anew
    named = [difference.key for difference in differences(task, row, far)]
    assert ("run.checkpoint_every" in named) is anew
