"""`--task NAME --attention NAME --trainer NAME`: the same as `--config` with the files."""

from __future__ import annotations

import json

import pytest
import yaml

from lit_probattn.cli.files import (
    config_files,
    kept_name,
    read_config_files,
    run_name,
    with_named_files,
)
from lit_probattn.configs import read_yaml
from lit_probattn.training.checkpoints import list_checkpoints
from tests.support.helpers import error_of
from tests.support.paths import ROOT
from tests.support.runs import fingerprint, printed_config, run

TASK, SMGK = "configs/tasks/tiny/lra_text.yaml", "configs/attention/smgk.yaml"
NAMES = ["--task", "tiny/lra_text", "--attention", "smgk"]
FILES = ["--config", str(ROOT / TASK), "--config", str(ROOT / SMGK)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["fit", *NAMES], f"fit --config {TASK} --config {SMGK}"),
        (
            ["fit", "--attention=smgk", "--task=tiny/lra_text"],
            f"fit --config {TASK} --config {SMGK}",
        ),
        (["test", "--a", "1", "--task", "own.yaml"], None),
        (
            ["fit", "--config", "x", "--trainer", "ddp", "--trainer.max_steps", "5", "-c", "y"],
            "fit --config x --config configs/trainer/ddp.yaml --trainer.max_steps 5 -c y",
        ),
        (["fit", "--trainer", "{max_steps: 3}"], "fit --trainer {max_steps: 3}"),
        (["fit", "--trainer={max_steps: 3}"], "fit --trainer {max_steps: 3}"),
        (["fit", "--tasks", "x", "task", "--task.x", "y"], "fit --tasks x task --task.x y"),
        ([], ""),
    ],
)
def test_a_name_becomes_a_file(given, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    if expected is None:  # a path in place of a name
        monkeypatch.chdir(tmp_path)
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(read_yaml(ROOT / TASK)))
        expected = "test --config own.yaml --a 1"
    assert " ".join(with_named_files(given)) == expected


def test_names_files_and_flags_mix(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own.yaml"
    own.write_text("trainer: {max_steps: 9}\nmodel: {init_args: {lr: 0.5}}\n")
    flags = ["--trainer.max_steps", "5", "--model.init_args.attention.init_args.num_heads", "2"]
    given = [*flags, "--attention", "smgk", "--config", str(own), "--trainer", "cpu_debug"]
    config = printed_config(["fit", *given, "--task", "tiny/lra_text"])
    words = (with_named_files(["fit", *NAMES]), FILES)
    contents = (read_config_files(config_files(each)) for each in words)
    assert {run_name(each, model=None) for each in contents} == {"lra_text_tiny-smgk"}
    assert config["trainer"]["max_steps"] == 5
    assert config["trainer"]["accelerator"] == "cpu"
    assert config["model"]["init_args"]["attention"]["init_args"]["shifted_keys"] is True
    assert config["model"]["init_args"]["attention"]["init_args"]["num_heads"] == 2
    assert config["model"]["init_args"]["lr"] == 0.5


def test_a_kept_name_of_a_run_with_another_model_is_noted():
    """`--config RUN/config.yaml --attention mgk` keeps `run.name` of the configuration."""
    own = {"run": {"name": "text-softmax"}, "model": {"class_path": "x"}}
    other = {"model": {"init_args": {"attention": {"class_path": "y"}}}}
    shorter = {"trainer": {"max_steps": 3}}
    files = {"r/0/config.yaml": own, "short.yaml": shorter, "mgk.yaml": other}
    assert "text-softmax is that of r/0/config.yaml, mgk" in str(kept_name(files, "text-softmax"))
    assert kept_name(files, "another") is None  # from --run.name
    assert kept_name({"r/0/config.yaml": own, "short.yaml": shorter}, "text-softmax") is None
    assert kept_name({"mgk.yaml": other, "r/0/config.yaml": own}, "text-softmax") is None


@pytest.mark.slow
def test_a_run_by_names_is_the_run_by_files(tmp_path, monkeypatch):
    """Its folder, its stored configuration, its weights, and what `auto` continues."""
    monkeypatch.chdir(tmp_path)  # no configs/ here
    monkeypatch.setenv("LIT_PROBATTN_CACHE", str(tmp_path / "cache"))
    flags = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    for root, words in (("files", FILES), ("names", NAMES)):
        run(["fit", *words, *flags, "--run.root", root, "--trainer.max_steps", "2"])
    files, names = (tmp_path / root / "lra_text_tiny-smgk/0" for root in ("files", "names"))
    stored = (names / "config.yaml").read_text(encoding="utf-8")
    assert stored.replace("root: names", "root: files") == (files / "config.yaml").read_text(
        encoding="utf-8"
    )
    assert fingerprint(names) == fingerprint(files)
    more = ["--run.root", "files", "--trainer.max_steps", "4", "--ckpt_path", "auto"]
    run(["fit", *NAMES, *flags, *more])
    first, second = json.loads((files / "versions.json").read_text(encoding="utf-8"))["starts"]
    assert first["checkpoint"] is None
    assert second["checkpoint"].endswith("step-00000002.ckpt")
    assert list_checkpoints(files / "checkpoints", "step")[0].name == "step-00000004.ckpt"
    assert [path.name for path in files.parent.iterdir() if path.is_dir()] == ["0"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_evaluations_take_names(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_PROBATTN_CACHE", str(tmp_path / "cache"))
    names = [*NAMES, "--trainer", "cpu_debug", "--trainer.enable_progress_bar", "false"]
    run(["fit", *names])
    run([command, *names, "--ckpt_path", "best"])
    assert list((tmp_path / "runs/lra_text_tiny-smgk/0").glob(f"{command}*best-*"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--task", "tiny/lra_texts"],
            "unknown task 'tiny/lra_texts'; did you mean 'tiny/lra_text'",
        ),
        (["--attention", "smkg", "--task", "uea"], "did you mean 'smlk' or 'smgk'?; `lit-probattn"),
        (["--trainer", "gpu"], "unknown trainer 'gpu'; "),
        (["--task"], "--task requires a name or a path; `lit-probattn list tasks` lists the names"),
        (["--trainer", "--trainer.max_steps", "3"], "--trainer requires a name or a path"),
        (["--attention=", "--task", "uea"], "--attention requires a name or a path"),
        (["--task", "uea", "--task=lra_text"], "duplicate --task"),
        (["--task", "tiny/uea", "--config", str(ROOT / TASK)], "two task files"),
        (["--task", str(ROOT / SMGK)], "expected a file that sets the class of a model"),
        (["--attention", str(ROOT / TASK)], "expected a file that sets an attention"),
        (["--trainer", str(ROOT / SMGK)], "expected a file that sets a trainer"),
        (["--task", "none.yaml"], "configuration file not found: none.yaml"),
        (["--task", "lra_text"], "no attention variant: add --attention NAME"),
        ([*NAMES, "--atention", "smgk"], "unknown key 'atention'; did you mean 'attention'?"),
    ],
)
def test_what_is_wrong_is_one_line(words, expected):
    assert expected in error_of(["fit", *words])


def test_a_missing_file_of_the_working_folder_suggests_similar_names_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = "configuration file not found: none.yaml"
    assert error_of(["fit", "--task", "none.yaml"]).strip().endswith(expected)
    (tmp_path / "nono.yaml").write_text("{}")
    expected += "; did you mean 'nono.yaml'?"
    assert error_of(["fit", "--task", "none.yaml"]).strip().endswith(expected)
