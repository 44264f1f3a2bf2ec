"""The command line: composition, run folders, evaluation, files written."""

from __future__ import annotations

import json
import shutil

import pandas as pd
import pytest
import yaml

from lit_probattn.cli.app import RunCLI, main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.checkpoints import list_checkpoints
from lit_probattn.training.run_folder import config_differences
from lit_probattn.training.run_record import read_starts
from tests.support.helpers import error_of
from tests.support.runs import (
    ROOT,
    arguments,
    metrics,
    only_version,
    printed_config,
    run,
    write_attention,
)
from tests.support.slow import mostly_slow

# Validations after steps 2 and 4.
SHORT = ("--trainer.max_steps", "4", "--trainer.val_check_interval", "2")


def test_files_and_flags_compose(tmp_path, capsys):
    (tmp_path / "more.yaml").write_text("trainer: {max_steps: 5}\nmodel: {init_args: {lr: 0.5}}\n")
    more = ("--config", str(tmp_path / "more.yaml"), "--model.init_args.lr", "0.25")
    config = printed_config(arguments("fit", tmp_path, *more))
    assert config["trainer"]["max_steps"] == 5
    assert config["trainer"]["val_check_interval"] == 8  # from the task file
    assert config["trainer"]["use_distributed_sampler"] is False
    assert config["trainer"]["check_val_every_n_epoch"] is None
    assert config["model"]["init_args"]["lr"] == 0.25
    assert config["model"]["init_args"]["attention"]["init_args"]["num_heads"] == 2


def test_enumerations_are_stored_as_their_values(tmp_path):
    """The default of an argument of Lightning's Timer is one."""
    timer = ("--trainer.callbacks+", "lightning.pytorch.callbacks.Timer")
    more = (*timer, "--trainer.callbacks.duration", "01:00:00:00")
    config = printed_config(arguments("fit", tmp_path, *more))
    (callback,) = config["trainer"]["callbacks"]
    assert callback["init_args"] == {"duration": "01:00:00:00", "interval": "step", "verbose": True}


RECIPES = {
    "lra_listops": {"steps": 5000, "warmup": 1000, "interval": 50},
    "lra_text": {"steps": 20000, "warmup": 8000, "interval": 500},
}


@pytest.mark.parametrize("name", RECIPES)
def test_task_files_hold_the_recipe(name, tmp_path, capsys):
    task = str(ROOT / f"configs/tasks/{name}.yaml")
    command = ["fit", "--config", task, "--config", write_attention(tmp_path)]
    config = printed_config(command)
    recipe, model, trainer = RECIPES[name], config["model"]["init_args"], config["trainer"]
    assert trainer["max_steps"] == model["schedule_steps"] == recipe["steps"]
    assert model["warmup_steps"] == recipe["warmup"]
    assert trainer["val_check_interval"] == recipe["interval"]
    assert config["data"]["init_args"]["batch_size"] == 32
    sizes = {"embed_dim": 64, "head_dim": 32, "num_layers": 2, "mlp_dim": 128}
    optimiser = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.0}
    others = {"dropout": 0.1, "pooling": "mean", "schedule": "one_cycle", "cycle_momentum": True}
    for key, value in {**sizes, **optimiser, **others}.items():
        assert model[key] == value, key
    assert trainer["gradient_clip_val"] is None


# ---- run folders ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(arguments("fit", folder, *SHORT))
    return folder


def test_run_folder_holds_what_is_needed_to_repeat_it(trained):
    version = only_version(trained)
    assert version.relative_to(trained).as_posix() == "runs/lra_text_tiny-variant/0"
    config = yaml.safe_load((version / "config.yaml").read_text(encoding="utf-8"))
    assert config["run"]["name"] == "lra_text_tiny-variant"
    assert config["data"]["init_args"]["num_train"] == 128
    (start,) = json.loads((version / "versions.json").read_text(encoding="utf-8"))["starts"]
    assert start["seed"] == 0
    assert start["command"].startswith("python -m lit_probattn fit --config ")
    assert {"python", "packages", "git", "hardware", "backends"} <= start.keys()
    assert start["packages"]["torch"]
    assert list(version.glob("events.out.tfevents.*"))
    rows = metrics(version)
    assert {"step", "train/loss", "val/loss", "val/accuracy", "lr", "beta1"} <= rows[0].keys()
    assert [row["step"] for row in rows if row["val/accuracy"]] == ["2", "4"]


def test_the_stored_configuration_repeats_the_run(trained, tmp_path):
    stored = only_version(trained) / "config.yaml"
    run(["fit", "--config", str(stored), "--run.root", str(tmp_path / "runs")])
    again = only_version(tmp_path)
    assert metrics(again) == metrics(only_version(trained))
    before, after = (
        yaml.safe_load((v / "config.yaml").read_text(encoding="utf-8"))
        for v in (stored.parent, again)
    )
    assert config_differences(before, after) == []


def test_a_run_goes_on_in_its_folder_and_another_configuration_in_the_next(
    trained, tmp_path, capsys
):
    """Which folder is taken: tests/training/test_run_folder.py."""
    version = tmp_path / only_version(trained).relative_to(trained)
    shutil.copytree(only_version(trained), version)
    run(arguments("fit", tmp_path, *SHORT, "--ckpt_path", "last"))
    assert "nothing to train" in capsys.readouterr().out
    assert only_version(tmp_path) == version
    run(arguments("fit", tmp_path, *SHORT, "--ckpt_path", "last", "--model.init_args.lr", "0.5"))
    text = capsys.readouterr().out
    for words in ("differs", "model.init_args.lr", "nothing to train", "omit --ckpt_path"):
        assert words in text
    assert only_version(tmp_path) == version
    old = (version / "config.yaml").read_text(encoding="utf-8")
    more = ("--ckpt_path", "last", "--model.init_args.lr", "0.5", "--trainer.max_steps", "5")
    run(arguments("fit", tmp_path, *SHORT, *more))
    assert "differs" in (text := capsys.readouterr().out)
    assert "model.init_args.lr" in text
    assert sorted(p.name for p in version.parent.iterdir()) == ["0", "1"]
    assert (version / "config.yaml").read_text(encoding="utf-8") == old
    first, other = read_starts(version) + read_starts(version.parent / "1")
    assert first["checkpoint"] is None
    assert other["checkpoint"].endswith("0/checkpoints/step-00000004.ckpt")
    saved = list_checkpoints(version.parent / "1/checkpoints", "step")
    assert saved[0].name == "step-00000005.ckpt"


def test_schedule_as_long_as_the_run_makes_max_steps_part_of_the_configuration():
    short = {"model": {"init_args": {"schedule": "cosine"}}, "trainer": {"max_steps": 5}}
    long = {"model": {"init_args": {"schedule": "cosine"}}, "trainer": {"max_steps": 9}}
    assert config_differences(short, long) == ["model.init_args.schedule_steps"]
    for config in (short, long):
        config["model"]["init_args"]["schedule_steps"] = 9
    assert config_differences(short, long) == []


# ---- validate, test, predict ----------------------------------------------------------------


@pytest.mark.parametrize("command", mostly_slow(["validate", "test", "predict"], ["predict"]))
def test_evaluation_needs_weights(command, trained):
    assert "--ckpt_path best" in error_of(arguments(command, trained))


def test_validation_repeats_the_value_logged_in_training(trained):
    config = str(only_version(trained) / "config.yaml")
    run(["validate", "--config", config, "--ckpt_path", "last"])
    report = json.loads(
        (only_version(trained) / "validate-step-00000004.json").read_text(encoding="utf-8")
    )
    (row,) = [row for row in metrics(only_version(trained)) if row["step"] == "4"]
    assert report["val/loss"] == pytest.approx(float(row["val/loss"]), rel=1e-6)
    assert report["val/accuracy"] == pytest.approx(float(row["val/accuracy"]), rel=1e-6)


def test_test_writes_results_of_the_best_checkpoint(trained, capsys):
    """They are those of the predictions of that checkpoint."""
    for command in ("predict", "test"):
        run(arguments(command, trained, *SHORT, "--ckpt_path", "best"))
    version = only_version(trained)  # evaluation makes no run folder
    (best,) = list_checkpoints(version / "checkpoints", "best")
    report = json.loads((version / f"test-{best.stem}.json").read_text(encoding="utf-8"))
    assert report["checkpoint"].endswith(best.name)
    assert report["selected_on_test"] is False
    table = pd.read_parquet(version / f"predictions-{best.stem}.parquet")
    names = ["sample_id", "target", "prediction", "probability_0", "probability_1"]
    assert list(table.columns) == names
    assert table["sample_id"].tolist() == list(range(21))
    probabilities = table[["probability_0", "probability_1"]].to_numpy()
    assert (probabilities.argmax(1) == table["prediction"]).all()
    accuracy = (table["prediction"] == table["target"]).mean()
    share = table["target"].value_counts(normalize=True).max()
    assert report["most_frequent_label"] == pytest.approx(share)
    least = share + 1.96 * (share * (1 - share) / 21) ** 0.5
    assert report["above_chance"] is bool(accuracy > least)
    text = capsys.readouterr().out
    shown = "is not above chance: always predicting the most frequent label gives" in text
    assert shown is not report["above_chance"]
    assert report["test/accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("command", mostly_slow(["validate", "test", "predict"], ["test"]))
def test_ctrl_c_in_an_evaluation(command, trained, monkeypatch, capsys):
    """Lightning catches it and exits with status 1."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(SequenceClassifier, "transfer_batch_to_device", interrupt)
    assert main(arguments(command, trained, *SHORT, "--ckpt_path", "best")) == 130
    assert capsys.readouterr().err.endswith("error: stopped by SIGINT\n")


def test_weights_of_another_model_are_refused(trained):
    more = ("--ckpt_path", "last", "--model.init_args.embed_dim", "8")
    line = error_of(arguments("test", trained, *more))
    assert "does not match this configuration" in line
    assert (
        "with other shapes (first model.embedding.tokens.weight: [257, 16], expected [257, 8]"
        in line
    )


def test_only_the_parser_of_the_given_command_is_built(capsys):
    """Four parsers would make every start slower; help shows all four."""
    made = RunCLI.__new__(RunCLI)
    made.given = ["validate"]
    assert set(made.subcommands()) == {"validate"}
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert all(name in told for name in ("fit", "validate", "test", "predict"))
