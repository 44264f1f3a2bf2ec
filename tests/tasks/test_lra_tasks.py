"""Retrieval, Image and Pathfinder train from the command line, on small files; recipes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from lit_probattn.cli.app import main
from lit_probattn.configs import read_yaml
from tests.datamodules.lra.files import write_cifar, write_pairs, write_pathfinder
from tests.support.helpers import error_of
from tests.support.paths import CONFIGS
from tests.support.runs import printed_config


def options(folder: Path, task: str, attention: str, *more: str) -> list[str]:
    files = (f"tasks/{task}", f"attention/{attention}", "trainer/cpu_debug")
    return [
        "fit",
        *(part for name in files for part in ("--config", str(CONFIGS / f"{name}.yaml"))),
        *("--data.init_args.data_dir", str(folder), "--run.root", str(folder / "runs")),
        *("--trainer.enable_progress_bar", "false", *more),
    ]


RELEASED = ("--data.init_args.source", "released", "--data.init_args.difficulty", "hard")


FEWER = ("--data.init_args.num_images", "10")


@pytest.mark.parametrize(
    ("task", "write", "more"),
    [
        # Also in tests/training/test_run_folder.py.
        pytest.param("retrieval", write_pairs, (), marks=pytest.mark.slow),
        ("pathfinder32", write_pathfinder, RELEASED),
        pytest.param("pathfinder32", lambda folder: None, FEWER, marks=pytest.mark.slow),
        pytest.param("pathfinderx", lambda folder: None, FEWER, marks=pytest.mark.slow),
    ],
)
def test_one_step_on_files_of_the_release_or_on_made_images(tmp_path, task, write, more):
    write(tmp_path)
    command = options(tmp_path, f"tiny/lra_{task}", "linear", "--trainer.fast_dev_run", "1", *more)
    assert main(command) == 0


def recipe(task: str) -> dict[str, int]:
    config = read_yaml(CONFIGS / "tasks" / f"{task}.yaml")
    return {
        "batch": config["data"]["init_args"]["batch_size"],
        "steps": config["trainer"]["max_steps"],
        "schedule": config["model"]["init_args"]["schedule_steps"],
        "warmup": config["model"]["init_args"]["warmup_steps"],
        "eval": config["trainer"]["val_check_interval"],
    }


@pytest.mark.parametrize(
    ("task", "batch", "steps", "warmup", "evaluate"),
    [
        ("lra_retrieval", 24, 30000, 8000, 300),
        ("lra_image", 256, 35000, 175, 175),
        ("lra_pathfinder32", 256, 62400, 312, 312),
        ("lra_pathfinderx", 256, 62400, 312, 312),
    ],
)
def test_recipes_are_the_published_table(task, batch, steps, warmup, evaluate):
    """mgk.md d.3 and h-26."""
    expected = {"batch": batch, "steps": steps, "schedule": steps, "warmup": warmup}
    assert recipe(task) == expected | {"eval": evaluate}


def test_the_other_retrieval_recipe_is_two_flags():
    """The flags that the file's comment names give the recipe of the base code."""
    text = (CONFIGS / "tasks" / "lra_retrieval.yaml").read_text(encoding="utf-8")
    flags = ["--data.init_args.batch_size", "32", "--model.init_args.warmup_steps", "800"]
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines() if line[0] == "#")
    assert " ".join(flags) in comment
    task, attention = CONFIGS / "tasks/lra_retrieval.yaml", CONFIGS / "attention/mgk.yaml"
    command = ["fit", "--config", str(task), "--config", str(attention), *flags]
    config = printed_config(command)
    assert config["data"]["init_args"]["batch_size"] == 32
    assert config["model"]["init_args"]["warmup_steps"] == 800
    assert config["model"]["init_args"]["schedule_steps"] == config["trainer"]["max_steps"] == 30000


def test_missing_difficulty_is_one_line(tmp_path):
    task = yaml.safe_load((CONFIGS / "tasks" / "lra_pathfinder32.yaml").read_text(encoding="utf-8"))
    del task["data"]["init_args"]["difficulty"]
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task))
    files = (tmp_path / "task.yaml", CONFIGS / "attention" / "softmax.yaml")
    error = error_of(["fit", *(part for f in files for part in ("--config", str(f)))])
    assert "difficulty" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "write", "attention", "steps", "more"),
    [
        ("tiny/lra_retrieval", write_pairs, "softmax", 60, ()),
        ("tiny/lra_retrieval", write_pairs, "mgk_soft_e", 60, ()),
        ("tiny/lra_image", write_cifar, "linear", 40, ()),
        ("tiny/lra_pathfinder32", write_pathfinder, "linear", 20, RELEASED),
    ],
)
def test_fit_lowers_the_loss_on_files_of_the_release(tmp_path, task, write, attention, steps, more):
    write(tmp_path)
    learn = ("--trainer.max_steps", str(steps), "--model.init_args.schedule_steps", str(steps))
    fast = ("--model.init_args.lr", "0.01", "--model.init_args.attention.init_args.num_heads", "2")
    assert main(options(tmp_path, task, attention, *learn, *fast, *more)) == 0
    (path,) = tmp_path.glob("runs/*/0/metrics.csv")
    with path.open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert len(losses) == steps
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"{task} {attention}: {first:.3f} -> {last:.3f}")
    assert last < 0.8 * first
