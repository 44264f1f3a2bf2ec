"""Convert a run, continue training, and use the result: the commands of docs/swap.md."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools

import pytest
import yaml

from lit_probattn.base.errors import ConfigError
from lit_probattn.convert.__main__ import main as convert
from lit_probattn.training.checkpoints import list_checkpoints, load_checkpoint, save_checkpoint
from lit_probattn.training.init_from import init_from
from lit_probattn.training.trained import open_trained
from tests.datamodules.text import made as made_text
from tests.datamodules.text.fine_tuning import made
from tests.support.helpers import error_of
from tests.support.runs import arguments, metrics, newest_state, run
from tests.support.slow import mostly_slow

QUIET = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a tiny softmax model of each task, trained for a few steps."""
    return functools.cache(lambda task: first_run(tmp_path_factory.mktemp(task), task))


def first_run(folder, task):
    text = folder / "text"
    text.mkdir()
    made.write_mnli(text) if task == "mnli" else made_text.write(text)
    given = {"path" if task == "mnli" else "data_dir": text, "cache_dir": folder / "cache"}
    short = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "1"]
    short += ["--run.name", "softmax", "--model.init_args.warmup_steps", "0"]
    run(arguments("fit", folder, *short, task=f"tiny/{task}", **given))
    return folder / "runs/softmax/0"


@pytest.fixture(scope="module")
def converted(trained, tmp_path_factory):
    """What `annealed` returns for the run of each task."""
    return functools.cache(lambda task: annealed(trained(task), tmp_path_factory.mktemp(task)))


def annealed(before, folder):
    """Convert a run; return the checkpoint and the files to train on with."""
    out = folder / "smgk.ckpt"
    flags = ["--to", "smgk", "--anneal", "2", "--num_batches", "1"]
    assert convert([str(before), str(out), *flags]) == 0
    return out, ["--config", str(before / "config.yaml"), "--config", str(out.with_suffix(".yaml"))]


def trained_on(task, start, converted, root):
    """Train three steps from a converted run; return the run folder and what was printed."""
    out, files = converted(task)
    short = ["--trainer.max_steps", "3", "--trainer.log_every_n_steps", "1"]
    short += ["--run.checkpoint_every", "1", "--run.keep_checkpoints", "9"]
    short += ["--trainer.limit_val_batches", "1"]
    place = ["--run.root", str(root), "--run.name", "on", start, str(out)]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        run(["fit", *files, *short, *place, *QUIET])
    return root / "on/0", told.getvalue()


@pytest.fixture(scope="module")
def continued(converted, tmp_path_factory):
    """What `trained_on` returns, by task and way of starting."""
    return functools.cache(
        lambda *case: trained_on(*case, converted, tmp_path_factory.mktemp("continued"))
    )


STARTS = list(itertools.product(("mnli", "masked_lm"), ("--init_from", "--ckpt_path")))


@pytest.mark.parametrize(("task", "start"), mostly_slow(STARTS, STARTS[:1]))
def test_a_converted_run_is_annealed_by_either_way_of_starting(task, start, continued):
    version, told = continued(task, start)
    weights = [float(row["norm_weight"]) for row in metrics(version) if row["norm_weight"]]
    assert weights == [0.5, 0.0, 0.0]
    state = newest_state(version)["state_dict"]
    found = [x for key, x in state.items() if key.endswith("key_norm_weight")]
    assert len(found) == 2
    assert not any(map(bool, found))
    assert ("initial weights from" in told) == (start == "--init_from")
    assert "newly initialised" not in told


def test_after_the_annealing_it_is_a_plain_layer(continued, tmp_path):
    """The same model without key_norm_weight, for studies and to start from; half-way it is not."""
    version, _ = continued("mnli", "--init_from")
    config = yaml.safe_load((version / "config.yaml").read_text(encoding="utf-8"))
    arguments = config["model"]["init_args"]
    arguments["norm_annealing_steps"] = None
    del arguments["attention"]["init_args"]["key_norm_weight"]
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(config))
    end, _, half = list_checkpoints(version / "checkpoints", "step")
    losses = []
    for file in (version / "config.yaml", plain):
        wanted = argparse.Namespace(checkpoint=end, config=[file], data=[], device="cpu")
        trained = open_trained(wanted)
        batch = next(iter(trained.data.val_dataloader()))
        losses.append(trained.task.batch_loss(batch).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(ConfigError, match="these weights are not of a plain Gaussian layer"):
        init_from(trained.task, str(half))
    assert init_from(trained.task, str(end)).new == []


def test_training_on_may_accumulate_gradients(converted, tmp_path):
    out, files = converted("mnli")
    parts = ["--trainer.accumulate_grad_batches", "2", "--trainer.limit_val_batches", "0"]
    short = ["--trainer.max_steps", "1", "--ckpt_path", str(out), "--run.root", str(tmp_path)]
    run(["fit", *files, *parts, *short, "--run.name", "on", *QUIET])
    assert list_checkpoints(tmp_path / "on/0/checkpoints", "step")


def test_a_conversion_of_the_converted_says_why_not(trained, tmp_path):
    before = trained("mnli")
    out = tmp_path / "smgk.ckpt"
    assert convert([str(before), str(out), "--to", "smgk", "--weights_only"]) == 0
    checkpoint = load_checkpoint(out)
    save_checkpoint(checkpoint, tmp_path / "again" / "x.ckpt")
    again = [str(tmp_path / "again/x.ckpt"), str(tmp_path / "b.ckpt"), "--weights_only"]
    assert "is not plain softmax attention" in error_of(again, convert)
