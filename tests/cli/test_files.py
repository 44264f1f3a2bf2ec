"""Configuration files on the command line: their places, and flags that win over them."""

from __future__ import annotations

import pytest
import yaml

from lit_probattn.base.errors import ConfigError
from lit_probattn.cli.files import files_before_flags, read_config_files
from lit_probattn.configs import compose
from tests.support.helpers import error_of
from tests.support.paths import CONFIGS
from tests.support.runs import TASK, printed_config, write_attention


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["fit", "--a", "1", "--config", "x", "-c", "y"], "fit --config=x --config=y --a 1"),
        (["fit", "--config=x", "--a=1", "--config=y"], "fit --config=x --config=y --a=1"),
        (["test", "--ckpt_path", "best"], "test --ckpt_path best"),
        ([], ""),
    ],
)
def test_files_come_before_flags(given, expected):
    assert " ".join(files_before_flags(given)) == expected


def test_flags_win_wherever_they_stand(tmp_path):
    files = ["--config", TASK, "--config", write_attention(tmp_path)]
    (tmp_path / "own.yaml").write_text("ckpt_path: null\nseed_everything: 3\n")
    flags = ["--trainer.max_steps", "7", "--seed_everything", "5", "--ckpt_path", "last"]
    command = ["fit", *flags, *files, "--config", str(tmp_path / "own.yaml")]
    printed = printed_config(command)
    assert printed["trainer"]["max_steps"] == 7
    assert printed["seed_everything"] == 5
    assert printed["ckpt_path"] == "last"


def test_two_task_files_are_refused(tmp_path):
    attention, own = write_attention(tmp_path), tmp_path / "own.yaml"
    own.write_text("model: {init_args: {num_layers: 3}}\ndata: {init_args: {batch_size: 3}}\n")
    other = str(CONFIGS / "tasks/tiny/lra_listops.yaml")
    read_config_files([TASK, attention, str(own)])  # a file of one's own names no classes
    for read in (read_config_files, lambda files: compose(files, {})):
        with pytest.raises(ConfigError) as error:
            read([TASK, attention, other])
        assert f"two task files, {TASK} and {other}" in str(error.value)


LINKED = {
    "model.init_args.vocab_size": "the data",
    "model.init_args.num_classes": "the data",
    "model.init_args.seed": "seed_everything",
    "data.init_args.seed": "seed_everything",
}


@pytest.mark.parametrize("key", LINKED)
@pytest.mark.parametrize("form", ["nested", "dotted", "flag", "short flag"])
def test_what_the_data_or_the_seed_decide_is_refused(key, form, tmp_path):
    part, _, name = key.split(".")
    own = tmp_path / "own.yaml"
    nested = {part: {"init_args": {name: 7}}}
    own.write_text(yaml.safe_dump({key: 7} if form == "dotted" else nested))
    words = ["fit", "--config", TASK, "--config", write_attention(tmp_path)]
    given = f"{part}.{name}" if form == "short flag" else key
    words += [f"--{given}=7"] if "flag" in form else ["--config", str(own)]
    assert f"{given} is set by {LINKED[key]}" in error_of([*words, "--print_config"])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("model: {init_args: null}", "model.init_args"),
        ("model: {init_args: {attention: {init_args: 3}}}", "model.init_args.attention.init_args"),
    ],
)
def test_arguments_that_are_none_are_named(text, key, tmp_path):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"own\.yaml: {key}: expected arguments by name"):
        read_config_files([TASK, str(tmp_path / "own.yaml")])
