"""What `compare` refuses before the first run: keys that it sets, unknown names, places; tables."""

from __future__ import annotations

import argparse
import io
import random
import re
import sys
from dataclasses import replace
from functools import partial

import pytest
import yaml

from lit_probattn.__main__ import main
from lit_probattn.base.config_files import named_files
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.locks import claim, hold
from lit_probattn.compare.flags import add_flags
from lit_probattn.compare.protocol import (
    FREE_FLAGS,
    RESERVED,
    STEPS,
    refuse_flags,
    refuse_unlogged_metrics,
    setting,
)
from lit_probattn.compare.tables import Metric, TaskEntry, kinds, read_tasks
from lit_probattn.configs import compose
from lit_probattn.training.run_folder import FREE_KEYS
from lit_probattn.training.saving import best_mode
from tests.support.paths import ROOT
from tests.support.slow import taking_turns

TASK = "tiny/lra_listops"
UNKNOWN = "model.init_args.nonsense"


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Return the one line that a comparison ends with, before it has written anything."""
    monkeypatch.chdir(tmp_path)

    def tell(*more, task=TASK, attention=("softmax",)):
        before = sorted(tmp_path.rglob("*"))
        words = ["compare", "--task", task, "--attention", *attention, "--seeds", "0", *more]
        assert main(words) == 2
        assert sorted(tmp_path.rglob("*")) == before
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return tell


WRONG = [
    (["--set", "seed_everything=7"], ["--set seed_everything", "--seeds"]),
    (["--set", "lra_listops_tiny:seed_everything=7"], ["seed_everything", "--seeds"]),
    (["--set", "run.name=x"], ["run.name"]),
    (["--set", "run.root=x"], ["run.root", "--runs"]),
    (["--set", "ckpt_path=last"], ["ckpt_path"]),
    (["--set", "trainer.max_time=00:00:00:05"], ["trainer.max_time", "--steps"]),
    (["--set", "trainer.max_steps=4"], ["trainer.max_steps", "--steps"]),
    (["--set", "*:trainer.max_steps=4", "--steps", "3"], ["max_steps", "--steps"]),
    (["--set", "trainer.devices=2"], ["trainer.devices", "--launch"]),
    (["--set", "data.init_args.data_dir=x", "--data_dir", "y"], ["--data_dir"]),
    (["--set", "data.data_dir=x", "--data_dir", "y"], ["--data_dir"]),
    (["--set", "trainer.enable_progress_bar=true"], ["enable_progress_bar"]),
    (["--flags=--trainer.max_steps 2"], ["--flags trainer.max_steps", "--steps"]),
    (["--flags=--model.init_args.num_layers=1"], ["model.init_args.num_layers", "--set"]),
    (["--flags=--seed_everything 1"], ["seed_everything", "--seeds"]),
    (["--flags=--data.init_args.data_dir x"], ["data_dir", "--data_dir"]),
    (["--flags=--data.data_dir x"], ["data_dir", "--data_dir"]),
    (["--flags=--config x.yaml"], ["--flags config"]),
    (["--flags=trainer.devices 1"], ["--flags", "--KEY VALUE"]),
    (["--set", f"{UNKNOWN}=3"], [UNKNOWN]),
    (["--set", "model.init_args.lr=abc"], ["model.init_args.lr", "abc"]),
    (["--set", "trainer.nonsense=1"], ["trainer.nonsense"]),
    (["--flags=--trainer.log_every_n_steps abc"], ["trainer.log_every_n_steps"]),
    (["--set", "run.monitor=val/loss"], ["run.monitor_mode max", "worst val/loss", "to min"]),
    (["--metric", "accurac"], ["test/accurac", "'accuracy'"]),
    (["--metric", "accuracy", "ppl"], ["test/ppl"]),
    (["--launch", "torchrun_missing"], ["--launch", "torchrun_missing"]),
    (["--launch", '"torchrun'], ["--launch", '"torchrun']),
    (["--flags='--trainer.log_every_n_steps 5"], ["--flags", "'--trainer"]),
    (["--set", "foo"], ["--set", "'foo'", "KEY=VALUE"]),
    (["--set", "=3"], ["--set", "'=3'", "KEY=VALUE"]),
    (["--executor", "debug", "--slurm", "foo"], ["--slurm", "'foo'", "KEY=VALUE"]),
    (["--only", "lra_texts_*"], ["lra_texts_*"]),
]


@pytest.mark.parametrize(("more", "case"), taking_turns(([], ["--dry-run"], ["--report"]), WRONG))
def test_what_is_wrong_is_named_before_the_first_run(more, case, refused):
    words, names = case
    line = refused(*words, *more)
    assert line.startswith("error: ")
    assert [name for name in names if name not in line] == []


@pytest.mark.parametrize(
    "content",
    ["run: {name: mine}", "run: {root: elsewhere}", "ckpt_path: last", "trainer: {max_time: 1}"],
)
def test_files_that_set_what_the_command_sets_are_named(content, refused, tmp_path):
    path = tmp_path / "own.yaml"
    text = (ROOT / "configs/attention/softmax.yaml").read_text(encoding="utf-8")
    path.write_text(f"{text}\n{content}\n")
    key = content.replace(": {", ".").split(":")[0]
    line = refused(attention=["own.yaml"])
    assert "own.yaml" in line
    assert key in line


@pytest.mark.parametrize("trainer", [{}, {"max_epochs": 3}, {"max_steps": -1}, {"max_steps": "x"}])
def test_a_task_without_a_number_of_steps_is_named(trainer, refused, tmp_path):
    content = {**compose([f"configs/tasks/{TASK}.yaml"], {}), "trainer": trainer}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content))
    line = refused(task="own.yaml")
    assert [w for w in ("own.yaml", "trainer.max_steps", "--steps") if w not in line] == []


def test_a_variant_may_not_set_what_the_command_sets(refused):
    for key in ("run.name", "trainer.max_time"):
        assert key in refused(attention=[f"softmax {key}=1"])
    assert "seed_everything" in refused(attention=["softmax seed_everything.x=1"])
    line = refused(attention=[f"softmax {UNKNOWN}=1"])
    assert UNKNOWN in line


def test_every_flag_of_a_table_says_what_it_does():
    wide = partial(argparse.HelpFormatter, width=500, max_help_position=250)
    parser = argparse.ArgumentParser(formatter_class=wide)
    add_flags(parser)
    listed = [line for line in parser.format_help().splitlines() if line.startswith("  --")]
    assert len(listed) > 20
    assert [line for line in listed if not re.match(r"  --\w\S*( \S+)* {2,}\w", line)] == []


def test_flags_are_keys_that_decide_nothing():
    """Every free key is one that `--flags` takes, or one that is set in another way."""
    left = {*FREE_KEYS} - {*FREE_FLAGS} - {*RESERVED} - {STEPS, "trainer.plugins"}
    assert left == {
        *("trainer.accelerator", "trainer.enable_progress_bar"),
        *("data.init_args.data_dir", "data.init_args.cache_dir"),
    }


def test_flags_leave_alone_what_a_mean_of_checkpoints_depends_on():
    plain, averaged = (
        TaskEntry("mine", "mine.yaml", {}, checkpoint=name) for name in ("best", "average-10")
    )
    words = ["--run.checkpoint_every", "5"]
    refuse_flags(words, [plain])
    with pytest.raises(ConfigError, match=r"^--flags run\.checkpoint_every: mine "):
        refuse_flags(words, [plain, averaged])


def test_tasks_name_the_scores_that_tables_and_monitors_read():
    """Every metric of a table, and what every shipped task selects checkpoints by."""
    for task in read_tasks().values():
        refuse_unlogged_metrics(task, compose([task.config], {}))
    for name, path in named_files("task").items():
        content = compose([path], {})
        monitor = setting(content, "run.monitor") or "val/accuracy"
        metric = Metric("monitor", "validate", monitor, ("", ""), "")
        refuse_unlogged_metrics(TaskEntry(name, str(path), {"monitor": metric}), content)
        assert best_mode(monitor) == (setting(content, "run.monitor_mode") or "max")
        wrong = replace(metric, key=f"{monitor}x")
        with pytest.raises(ConfigError, match="does not log "):
            refuse_unlogged_metrics(TaskEntry(name, str(path), {"monitor": wrong}), content)


def test_the_folder_of_a_report_has_no_file_of_others(refused, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    assert "notes.txt is not a folder" in refused("--out", "notes.txt")
    assert "notes.txt is not a folder" in refused("--out", "notes.txt/below")
    assert "--runs notes.txt" in refused("--runs", "notes.txt", "--out", "out")
    for name in ("report.md", "rows.csv", "ratios.csv"):
        own = tmp_path / "own" / name
        own.parent.mkdir(exist_ok=True)
        own.write_text("# My own\n\nwords\n")
        assert f"own/{name} exists" in refused("--out", "own")
        assert own.read_text(encoding="utf-8") == "# My own\n\nwords\n"
        own.unlink()


def test_a_lock_that_is_a_link_is_named(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"\.lock is a link"):
        hold(tmp_path / ".lock")
    with pytest.raises(ConfigError, match=r"\.lock is a link"), claim(tmp_path / ".lock"):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_without_a_character_prints_another(encoding, monkeypatch):
    """`compare` prints ellipses when its trainings are done."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    assert (
        main(["compare", "--task", TASK, "--attention", "softmax", "--set", "run.name=\u2026"]) == 2
    )
    print("training \u2026")
    assert b"training ?" in stream.buffer.getvalue()


def test_tables_and_figures_are_in_the_order_of_their_numbers(tmp_path):
    names = [
        *("fish_figure2", "fish_figure11", "fish_table2", "fish_table10"),
        *("low_rank_table2", "low_rank_table2b", "mgk_text"),
    ]
    for name in random.Random(0).sample(names, len(names)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"kind": "drawing"}))
    assert list(kinds(tmp_path)) == names
