"""Configuration files on the command line: their places, and flags that win over them."""

from __future__ import annotations

import pytest
import yaml

from lit_probattn.cli.app import main
from lit_probattn.cli.files import files_before_flags, read_config_files
from lit_probattn.configs import ConfigError, compose
from tests.support.paths import CONFIGS
from tests.support.runs import TASK, write_attention


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


def test_flags_win_wherever_they_stand(tmp_path, capsys):
    files = ["--config", TASK, "--config", write_attention(tmp_path)]
    (tmp_path / "own.yaml").write_text("ckpt_path: null\nseed_everything: 3\n")
    flags = ["--trainer.max_steps", "7", "--seed_everything", "5", "--ckpt_path", "last"]
    with pytest.raises(SystemExit):
        main(["fit", *flags, *files, "--config", str(tmp_path / "own.yaml"), "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
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
