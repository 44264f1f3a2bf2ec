"""Which folder a training takes: of its own configuration, seed and data; one start at a time."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import yaml

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import file_digest
from lit_probattn.base.locks import claim, hold, release
from lit_probattn.cli.app import main
from lit_probattn.cli.errors import exit_status
from lit_probattn.tasks.schedules import ScheduleName, lengths_of_run, schedule_values
from lit_probattn.training.callbacks import SameSources
from lit_probattn.training.preemption import job_name
from lit_probattn.training.run_folder import (
    LOCK,
    PLAN_VARIABLE,
    RunPlan,
    RunSettings,
    find_checkpoint,
    plan_fit,
    read_own_config,
    share_plan,
)
from lit_probattn.training.run_record import read_starts, remove_leftovers, write_record
from tests.datamodules.lra.files import write_pairs
from tests.support.forks import Forked
from tests.support.runs import (
    arguments,
    at_micro_batch,
    in_child,
    in_ranks,
    kill_me,
    only_version,
    rewound,
    run,
    stateful,
)

TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")


def config(lr: float = 0.1, seed: int = 0) -> dict:
    return {
        "seed_everything": seed,
        "model": {"init_args": {"lr": lr, "schedule": "constant"}},
        "trainer": {"max_steps": 8},
    }


def version(root: Path, number: int, own: dict, *, step: int | None = 4, **start) -> Path:
    """A run folder as a training leaves it, the younger the larger its number."""
    folder = root / "name" / str(number)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(own))
    starts = [{"started": f"2026-01-{number + 1:02d}", "backends": {}, **start}]
    (folder / "versions.json").write_text(json.dumps({"starts": starts}))
    if step is not None:
        with zipfile.ZipFile(folder / "checkpoints" / f"step-{step:08d}.ckpt", "w") as file:
            file.writestr("data", "x")
    return folder


def plan(root: Path, own: dict, request: str | None, sources=dict, **settings) -> RunPlan:
    found = plan_fit(RunSettings(root=str(root), **settings), "name", own, request, sources)
    found.release_lock()
    return found


# ---- whose run it is -----------------------------------------------------------------------------


@pytest.mark.parametrize("request_", ["last", "auto"])
def test_the_newest_version_of_this_configuration_goes_on(tmp_path, request_):
    """Whatever else has been trained under the name since; max_steps is free."""
    wanted = version(tmp_path, 0, config())
    version(tmp_path, 1, config(seed=1), step=6)
    version(tmp_path, 2, config(lr=0.2), step=6)
    found = plan(tmp_path, config() | {"trainer": {"max_steps": 99}}, request_)
    assert (found.folder, found.steps_done, found.created) == (wanted, 4, False)


@pytest.mark.parametrize("warmup", [0, 3, 8, 200])
@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_a_longer_run_goes_on_where_its_steps_so_far_had_the_same_rates(tmp_path, schedule, warmup):
    def rates(length):
        total, first = lengths_of_run(length, None, warmup)
        given = {"peak_lr": 0.1, "total_steps": total, "warmup_steps": first}
        return [schedule_values(schedule, step, **given) for step in range(8)]

    def trained(length):
        init_args = {"schedule": schedule, "warmup_steps": warmup}
        return {"model": {"init_args": init_args}, "trainer": {"max_steps": length}}

    version(tmp_path, 0, trained(8))
    for length in (8, 9, 99):
        continues = plan(tmp_path, trained(length), "auto").steps_done == 4
        assert continues == (rates(length) == rates(8)), length


def test_last_starts_from_the_newest_of_this_seed_and_never_from_another_seed(tmp_path):
    version(tmp_path, 0, config(lr=0.2))
    version(tmp_path, 1, config(lr=0.2, seed=1), step=6)
    found = plan(tmp_path, config(lr=0.3), "last")
    assert found.checkpoint == tmp_path / "name/0/checkpoints/step-00000004.ckpt"
    assert "differs from" in found.notes[0]
    by_path = plan(tmp_path, config(lr=0.3), str(found.checkpoint))
    assert "differs from" in by_path.notes[0]
    assert "model.init_args.lr" in by_path.notes[0]
    same = plan(tmp_path, config(lr=0.2), str(found.checkpoint))
    assert "differs from" not in same.notes[0]
    with pytest.raises(ConfigError, match=r"no checkpoint in .*name with this seed.*\(1, 0 have"):
        plan(tmp_path, config(seed=2), "last")


@pytest.mark.parametrize(
    ("request_", "message"),
    [("last", "nothing to continue: .*--ckpt_path auto"), ("", "--ckpt_path is empty: ")],
)
def test_what_cannot_be_continued_leaves_no_folder_behind(tmp_path, request_, message):
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, config(), request_)
    assert not list(tmp_path.iterdir())


def test_a_run_whose_metric_was_never_a_number_is_not_told_to_train_first(tmp_path):
    settings = RunSettings(root=str(tmp_path))
    with pytest.raises(ConfigError, match=r"no best checkpoint in .*name: train first"):
        find_checkpoint(settings, "name", "best")
    version(tmp_path, 0, config())
    with pytest.raises(ConfigError, match=r"no best checkpoint in .*name: .*--ckpt_path last"):
        find_checkpoint(settings, "name", "best")


def test_auto_takes_no_weights_of_another_configuration(tmp_path):
    version(tmp_path, 0, config())
    found = plan(tmp_path, config(seed=1), "auto")
    assert (found.folder.name, found.checkpoint, found.created) == ("1", None, True)


@pytest.mark.parametrize("request_", ["last", "auto"])
def test_other_data_are_another_configuration(tmp_path, request_):
    folder = version(tmp_path, 0, config(), sources={"train.tsv": "aa", "test.tsv": "cc"})
    same = plan(tmp_path, config(), request_, lambda: {"train.tsv": "aa", "test.tsv": "cc"})
    assert same.folder == folder
    other = plan(tmp_path, config(), request_, lambda: {"train.tsv": "bb", "test.tsv": "cc"})
    assert other.folder == tmp_path / "name/1"
    assert (other.checkpoint is None) == (request_ == "auto")
    assert "data file train.tsv" in other.notes[0]
    assert ("trained on other data (different: " in other.notes[0]) == (request_ == "auto")
    assert "test.tsv" not in other.notes[0]


def test_data_are_not_prepared_for_a_run_that_noted_none(tmp_path):
    def fail():
        raise AssertionError("prepared")

    version(tmp_path, 0, config(), sources={})
    version(tmp_path, 1, config(lr=0.2), sources={"train.tsv": "aa"})
    assert plan(tmp_path, config(), "auto", fail).folder.name == "0"


def retrieval(command: str, folder: Path, data: str, *more: str) -> list[str]:
    given = {"task": "tiny/lra_retrieval", "data_dir": folder / data}
    return arguments(command, folder, "--trainer.max_steps", "1", *more, **given)


def test_other_files_do_not_replace_the_result_of_a_run(tmp_path, capsys):
    """Whether training resumes with other files is tested above."""
    for name in ("a", "b"):
        write_pairs(tmp_path / name)
    path = tmp_path / "b/new_aan_pairs.train.tsv"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[::-1]))
    run(retrieval("fit", tmp_path, "a"))
    first = only_version(tmp_path)
    assert set(read_starts(first)[0]["sources"]) == {p.name for p in (tmp_path / "a").glob("*.tsv")}
    capsys.readouterr()
    run(retrieval("test", tmp_path, "b", "--ckpt_path", "last"))
    assert "differs from" in capsys.readouterr().out
    (report,) = first.glob("test-step-00000001-*.json")
    assert json.loads(report.read_text(encoding="utf-8"))["differs_from_run"] == {
        "data file new_aan_pairs.train.tsv": file_digest(path)
    }
    path.write_bytes(b"".join([*lines[1:], lines[0]]))  # other files once more: another result
    run(retrieval("test", tmp_path, "b", "--ckpt_path", "last"))
    assert len(list(first.glob("test-step-00000001-*.json"))) == 2


# ---- one at a time -------------------------------------------------------------------------------


def test_a_second_training_is_told_who_holds_the_folder(
    uninterrupted, tmp_path, monkeypatch, capfd
):
    """Commands that only read are not kept out: test_averages.py."""
    left = rewound(uninterrupted, 4, tmp_path) / "checkpoints/.step-00000006.ckpt.x1y2z3w4"
    left.touch()
    version, codes = only_version(tmp_path), []

    def start_another(_):
        settings = RunSettings(root=str(tmp_path / "runs"))
        asked = (settings, version.parent.name, read_own_config(version), "last")
        codes.append(in_child(lambda: exit_status(lambda: plan_fit(*asked))))

    at_micro_batch(monkeypatch, 8, start_another)
    run(stateful("fit", tmp_path, "--ckpt_path", "auto", "--trainer.max_steps", "5"))
    assert codes == [2]
    assert f"is locked by process {os.getpid()} on " in capfd.readouterr().err
    assert len(read_starts(version)) == 2
    assert not left.exists()  # of a start that was killed while it saved
    with claim(version / LOCK) as handle:
        assert handle is not None


def test_a_named_version_that_another_process_holds_is_refused(tmp_path):
    (tmp_path / "name/mine").mkdir(parents=True)
    with claim(tmp_path / "name/mine" / LOCK) as handle:
        assert handle is not None
        with pytest.raises(ConfigError, match="exists"):
            plan(tmp_path, config(), None, version="mine")
    assert plan(tmp_path, config(), None, version="mine").created


def test_a_folder_that_another_command_used_meanwhile_is_neither_taken_nor_locked(
    tmp_path, monkeypatch
):
    def late(path):
        if path.parent.name == "0":
            (path.parent / "notes.txt").touch()
        return hold(path)

    monkeypatch.setattr("lit_probattn.training.run_folder.hold", late)
    assert plan(tmp_path, config(), None).folder.name == "1"
    with claim(tmp_path / "name/0" / LOCK) as handle:
        assert handle is not None


def test_the_lock_ends_with_its_process_and_is_not_inherited(tmp_path):
    def killed() -> int:
        assert hold(tmp_path / LOCK) is None
        kill_me()
        return 0

    assert in_child(killed) == -signal.SIGKILL
    assert hold(tmp_path / LOCK) is None
    ready, told = os.pipe()

    def waiting() -> int:
        os.write(told, b"x")
        signal.pause()
        return 0

    child = Forked(waiting, os.environ)
    try:
        os.read(ready, 1)
        with claim(tmp_path / LOCK) as handle:
            assert handle is None
        release(tmp_path / LOCK)
        with claim(tmp_path / LOCK) as handle:
            assert handle is not None
    finally:
        child.kill()
        child.wait()


# ---- what a killed start leaves ------------------------------------------------------------------


def test_a_folder_that_no_step_was_trained_in_is_taken_again(tmp_path):
    """Killed before its first step, a run does not leave its number behind for ever."""
    version(tmp_path, 0, config())
    folder = tmp_path / "name/1"
    folder.mkdir()
    write_record(folder, config_text="{}", seed=0, arguments=["fit"], checkpoint=None)
    with claim(folder / LOCK):
        assert plan(tmp_path, config(), None).folder.name == "2"
    (tmp_path / "name/2" / LOCK).unlink()
    (tmp_path / "name/2").rmdir()
    found = plan(tmp_path, config(), None)
    assert (found.folder, found.created, read_starts(folder)) == (folder, True, [])
    (folder / "notes.txt").touch()
    assert plan(tmp_path, config(), None).folder.name == "2"


def test_auto_begins_again_where_no_checkpoint_was_ever_saved(tmp_path):
    """Not where checkpoints were saved and then removed: what that run has logged is kept."""
    version(tmp_path, 0, config(), step=None, saved=False, checkpoint=None)
    found = plan(tmp_path, config(), "auto")
    assert (found.folder.name, found.checkpoint, found.created) == ("0", None, False)
    assert f"{tmp_path}/name/0 from its start" in found.notes[0]
    assert plan(tmp_path, config(seed=1), "auto").folder.name == "1"
    assert plan(tmp_path, config(), None).folder.name == "1"
    version(tmp_path, 2, config(lr=0.3), step=None, saved=True)
    version(tmp_path, 3, config(lr=0.4), step=None)  # of a version that did not note it
    assert plan(tmp_path, config(lr=0.3), "auto").folder.name == "4"
    assert plan(tmp_path, config(lr=0.4), "auto").folder.name == "4"


def test_auto_does_not_begin_again_where_any_start_has_saved(tmp_path):
    folder = version(tmp_path, 0, config(), step=None, saved=True)
    starts = [{"started": f"2026-01-0{n}", "backends": {}, "saved": n == 1} for n in (1, 2)]
    (folder / "versions.json").write_text(json.dumps({"starts": starts}))
    assert plan(tmp_path, config(), "auto").folder.name == "1"


def test_a_restarted_job_without_a_checkpoint_begins_in_its_own_folder(tmp_path, monkeypatch):
    """Runs of the same configuration by other jobs, older and younger, are left alone."""
    version(tmp_path, 0, config(), job="torchrun job-6")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    record = {"config_text": yaml.safe_dump(config()), "seed": 0, "arguments": ["fit"]}
    mine = tmp_path / "name/1"
    mine.mkdir()
    write_record(mine, **record, checkpoint=None, job=job_name())
    assert read_starts(mine)[0]["saved"] is False
    version(tmp_path, 2, config(), job="torchrun job-8", started="2099-01-01")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found = plan(tmp_path, config(), None)
    assert (found.folder, found.checkpoint) == (mine, None)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_run_that_was_started_from_a_checkpoint_begins_there_again(
    tmp_path, monkeypatch, restarted
):
    source = version(tmp_path, 0, config(lr=0.2)) / "checkpoints/step-00000004.ckpt"
    start = {"saved": False, "checkpoint": str(source), "job": "torchrun job-7"}
    version(tmp_path, 1, config(), step=None, **start)
    if restarted:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    request = str(source) if restarted else "auto"
    found = plan(tmp_path, config(), request)
    assert (found.folder.name, found.checkpoint) == ("1", source)
    source.unlink()
    with pytest.raises(
        ConfigError, match=r"name/1 started .*not found: .*step-00000004\.ckpt.*--run\.version"
    ):
        plan(tmp_path, config(), request)


def test_temporary_files_of_killed_runs_are_removed(tmp_path, monkeypatch):
    folder = version(tmp_path, 0, config())
    mine = [
        *(".metrics.csv.1234", ".config.yaml.abcd_123", ".versions.json.99"),
        *("checkpoints/.step-00000008.ckpt.x1y2z3w4", "checkpoints/.best-00000008.ckpt.x1y2z3w4"),
        ".test-best-00000008-0a1b2c3d.json.old12345",
    ]
    others = [".notes", ".metrics.csv", ".test-best-00000008.json.new12345", "metrics.csv.1234"]
    for name in (*mine, *others):
        (folder / name).touch()
    os.utime(folder / mine[-1], (0, 0))
    (folder / ".metrics.csv.5").symlink_to(folder / "config.yaml")
    remove_leftovers(folder)
    assert not [name for name in (*mine, ".metrics.csv.5") if (folder / name).is_symlink()]
    assert [name for name in (*mine, *others) if (folder / name).exists()] == others
    assert (folder / "config.yaml").is_file()


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ['{"starts": [{"sta', "", "[]", '{"starts": [1]}', "folder"])
def test_a_damaged_record_is_set_aside(tmp_path, content):
    folder = version(tmp_path, 0, config())
    path = folder / "versions.json"
    path.unlink()
    path.mkdir() if content == "folder" else path.write_text(content)
    with pytest.warns(UserWarning, match=r"0/versions.json is corrupt"):
        assert plan(tmp_path, config(), "auto").folder == folder
    with pytest.warns(UserWarning, match="is corrupt"):
        write_record(folder, config_text="{}", seed=0, arguments=["fit"], checkpoint=None)
    assert (folder / "versions.json.corrupt").exists()
    assert len(read_starts(folder)) == 1


@pytest.mark.parametrize("request_", ["last", "auto"])
def test_a_run_goes_on_from_its_newest_checkpoint_that_is_intact(tmp_path, request_):
    folder = version(tmp_path, 0, config())
    (folder / "checkpoints/step-00000006.ckpt").write_bytes(b"PK")
    with pytest.warns(UserWarning, match=r"step-00000006.ckpt is corrupt"):
        found = plan(tmp_path, config(), request_)
    assert (found.folder, found.steps_done) == (folder, 4)


@pytest.mark.parametrize("request_", ["last", "auto"])
@pytest.mark.parametrize("damage", [b"\n: ][", b"\n# \xe9"])
def test_a_damaged_configuration_is_one_line(tmp_path, damage, request_):
    folder = version(tmp_path, 0, config())
    with (folder / "config.yaml").open("ab") as file:
        file.write(damage)
    with pytest.raises(ConfigError, match=r"name/0/config\.yaml.*restore it, or move .*name/0$"):
        plan(tmp_path, config(), request_)


def test_a_folder_that_cannot_be_removed_hides_no_error_of_the_run(tmp_path):
    """As of a link, or of one that a process still writes to."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "0"
    link.symlink_to(tmp_path / "elsewhere")
    RunPlan(link, created=True).discard_if_unused()
    assert link.is_dir()
    RunPlan(tmp_path / "elsewhere", created=True).discard_if_unused()
    assert not link.exists()


# ---- ranks ---------------------------------------------------------------------------------------


def test_ranks_with_other_arguments_are_refused(monkeypatch):
    ours, theirs = config(), config(lr=0.5)
    theirs["data"] = {"init_args": {"num_workers": 1}}  # may differ
    monkeypatch.setattr("lit_probattn.training.run_folder.gather_objects", lambda _: [ours, theirs])
    environment = SimpleNamespace(creates_processes_externally=True)
    strategy = SimpleNamespace(cluster_environment=environment, setup_environment=lambda: None)
    trainer = SimpleNamespace(world_size=2, num_nodes=1, strategy=strategy, is_global_zero=False)
    with pytest.raises(
        ConfigError, match=r"rank 1 has .* than rank 0 \(different: model\.init_args\.lr\): start"
    ):
        share_plan(trainer, theirs, lambda: pytest.fail("no plan is made"))


def test_processes_that_the_first_one_starts_have_its_plan(tmp_path, monkeypatch):
    monkeypatch.setenv(PLAN_VARIABLE, "none yet")  # which is undone at the end
    made = RunPlan(tmp_path / "3", tmp_path / "3/checkpoints/step-00000004.ckpt", notes=["a note"])

    def strategy(external):
        environment = SimpleNamespace(creates_processes_externally=external)
        return SimpleNamespace(cluster_environment=environment)

    first, second = (
        SimpleNamespace(world_size=2, num_nodes=1, strategy=strategy(n > 0)) for n in (0, 1)
    )
    assert share_plan(first, config(), lambda: made) is made
    found = share_plan(second, config(), lambda: pytest.fail("no plan is made"))
    assert (found.folder, found.checkpoint) == (made.folder, made.checkpoint)


@pytest.mark.slow  # the comparison: above; errors of all ranks: test_faults.py
def test_ranks_with_other_arguments_stop_before_training(tmp_path, capfd):
    own = ("--model.init_args.lr", "0.5", "--data.init_args.num_workers", "1")

    def work() -> int:
        return main(arguments("fit", tmp_path, *TWO, *(own if os.environ["RANK"] == "1" else ())))

    assert in_ranks(work, timeout=60) == [2, 2]
    told = capfd.readouterr().err
    for prefix in ("error", "error on rank 1"):
        assert f"{prefix}: rank 1 has a different configuration than rank 0 (different: " in told
    assert "(different: model.init_args.lr): start every process" in told
    assert not (tmp_path / "runs").exists()


def test_ranks_with_other_data_are_refused(monkeypatch):
    gathered = [{"a": "1", "b": "2"}, {"a": "1", "b": "2"}, {"a": "1", "b": "3"}]
    monkeypatch.setattr("lit_probattn.training.callbacks.gather_objects", lambda own: gathered)
    told = r"rank 2 has different data than rank 0 \(different: b\)"
    data = SimpleNamespace(source_hashes=gathered[0])
    alone, together = (SimpleNamespace(world_size=n, datamodule=data) for n in (1, 3))
    SameSources().setup(alone, None, "fit")
    with pytest.raises(ConfigError, match=told):
        SameSources().setup(together, None, "fit")
