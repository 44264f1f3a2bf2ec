"""A run with tied layers, a class token, fixed positions: trained, tested, converted, gone on."""

from __future__ import annotations

import pytest
import torch
import yaml

from lit_probattn.base.errors import ConfigError
from lit_probattn.convert.to_mgk import main
from lit_probattn.convert.to_transformers import export_model
from lit_probattn.training.checkpoints import load_checkpoint
from profiling.sweep.plan import task_sizes
from tests.support.paths import ROOT
from tests.support.runs import newest_state, only_version, run, write_attention

TASK = str(ROOT / "configs/tasks/tiny/lra_text.yaml")
OPTIONS = {"share_layers": "true", "pooling": "cls", "positions": "sinusoidal", "num_layers": "3"}
WORDS = [word for key, value in OPTIONS.items() for word in (f"--model.init_args.{key}", value)]
BLOCK = "model.encoder.blocks."


def fit(folder, *more, attention=None):
    files = ["--task", TASK, "--attention", attention or write_attention(folder)]
    place = ["--run.root", str(folder / "runs"), "--trainer.accelerator", "cpu"]
    run(["fit", *files, *place, *WORDS, *more])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    fit(folder, "--trainer.max_steps", "2")
    return only_version(folder)


def test_the_checkpoint_has_the_block_once(trained):
    state = newest_state(trained)["state_dict"]
    assert {name[len(BLOCK)] for name in state if name.startswith(BLOCK)} == {"0"}
    assert not any("positions" in name for name in state)  # fixed ones are no weights
    assert state["model.embedding.class_token"].dim() == 1
    stored = yaml.safe_load((trained / "config.yaml").read_text(encoding="utf-8"))["model"][
        "init_args"
    ]
    assert {key: stored[key] for key in OPTIONS} == {
        **{"share_layers": True, "pooling": "cls", "positions": "sinusoidal", "num_layers": 3},
    }


def test_it_is_tested_converted_and_begun_with(trained, tmp_path, capsys):
    run(["test", "--config", str(trained / "config.yaml"), "--ckpt_path", str(trained)])
    out = tmp_path / "mgk.ckpt"
    assert main([str(trained), str(out), "--num_batches", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(": heads ") == 1  # one layer, fitted on the inputs of its three passes
    fit(
        tmp_path,
        *("--init_from", str(out), "--trainer.max_steps", "1"),
        attention=str(out.with_suffix(".yaml")),
    )
    told = capsys.readouterr().out
    assert "entries loaded" in told
    assert "newly initialised" not in told
    taken, begun = load_checkpoint(out)["state_dict"], newest_state(only_version(tmp_path))
    assert set(taken) == set(begun["state_dict"])


def test_what_has_no_place_for_a_shared_block_says_so(tmp_path):
    path = tmp_path / "task.yaml"
    sizes = {"num_layers": 3, "share_layers": True}
    path.write_text(yaml.safe_dump({"model": {"init_args": sizes}}))
    with pytest.raises(ConfigError, match=r"task.yaml: sweeps do not support share_layers"):
        task_sizes(path)


def test_a_shared_block_is_not_written_for_transformers():
    state = {"encoder.blocks.0.attention.query_proj.weight": torch.zeros(4, 4)}
    with pytest.raises(ConfigError, match=r"share_layers is true: "):
        export_model(state, {"share_layers": True}, 2, "bert", {})
