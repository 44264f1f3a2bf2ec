"""Every shipped configuration parses, and every attention trains one step in its tiny task."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonargparse import Namespace

from lit_probattn.cli.app import RunCLI, main
from lit_probattn.configs import compose, only_allowed_code, read_yaml
from tests.support.paths import CONFIGS, shipped

TASKS = shipped("task")
TINY = [path for path in TASKS if path.parent.name == "tiny"]
ATTENTION = shipped("attention")
TRAINERS = shipped("trainer")


def name(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix("")).replace("/", "-")


@pytest.fixture(scope="module")
def parsed():
    """A function that parses files by the parser of `fit`; making the parser takes long.

    Without the defaults of what the files do not set, which take half of the time.
    """
    made = []

    def stop(command, *_):
        made.append(command._subcommand_parsers["fit"])
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCLI, "parse_arguments", stop)
        with pytest.raises(SystemExit):
            RunCLI(["fit", "--task", "tiny/lra_listops", "--attention", "softmax"])

    def parse(*files: Path) -> Namespace:
        with only_allowed_code():
            return made[0].parse_object(compose(files, {}), defaults=False)

    return parse


# The published tasks; those of tiny/ are overlays of them, and other tests train many of those.
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(path, id=name(path), marks=[pytest.mark.slow] * (path in TINY))
        for path in TASKS
    ],
)
def test_task_file_parses(task, parsed):
    config = parsed(task, CONFIGS / "attention" / "softmax.yaml")
    assert config["model"]["init_args"]["attention"]["init_args"]["num_heads"] == 8
    written = read_yaml(task)
    assert "attention" not in written["model"].get("init_args", {}), "the task names no attention"
    assert config["trainer"]["max_steps"] == written["trainer"]["max_steps"] > 0


@pytest.mark.parametrize("trainer", TRAINERS, ids=name)
def test_trainer_file_sets_hardware_only(trainer, parsed):
    written = read_yaml(trainer)
    assert list(written) == ["trainer"]
    hardware = {"accelerator", "devices", "num_nodes", "precision", "strategy"}
    assert written["trainer"].keys() <= hardware | {"log_every_n_steps"}
    tiny = CONFIGS / "tasks" / "tiny" / "lra_listops.yaml"
    parsed(tiny, CONFIGS / "attention" / "softmax.yaml", trainer)


def test_attention_files_set_the_attention_only():
    """They are read, and train, in models/test_language_model.py."""
    for attention in ATTENTION:
        written = read_yaml(attention)
        assert list(written) == ["model"], attention.name
        assert list(written["model"]["init_args"]) == ["attention"], attention.name


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION, ids=name)
def test_attention_file_trains(attention, tmp_path):
    """By the command; models/test_language_model.py trains each in `make test`."""
    status = main(
        [
            *("fit", "--config", str(CONFIGS / "tasks" / "tiny" / "lra_listops.yaml")),
            *("--config", str(attention), "--config", str(CONFIGS / "trainer" / "cpu_debug.yaml")),
            *("--data.init_args.data_dir", str(tmp_path), "--trainer.fast_dev_run", "1"),
            *("--data.init_args.num_train", "16", "--data.init_args.num_val", "8"),
            *("--data.init_args.num_test", "8", "--trainer.enable_progress_bar", "false"),
        ]
    )
    assert status == 0


@pytest.mark.parametrize("task", TINY, ids=name)
def test_every_full_task_has_a_tiny_variant_of_the_same_classes(task):
    full = task.parents[1] / task.name
    tiny_config, full_config = (read_yaml(path) for path in (task, full))
    assert tiny_config["model"]["class_path"] == full_config["model"]["class_path"]
