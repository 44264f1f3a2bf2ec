"""A run with tied layers, a class token, fixed positions: trained, tested, converted, gone on."""

from __future__ import annotations

import argparse

import pytest
import torch
import yaml

from lit_probattn.base.errors import ConfigError
from lit_probattn.convert.__main__ import main
from lit_probattn.convert.to_transformers import export_model
from lit_probattn.training.checkpoints import load_checkpoint
from lit_probattn.training.init_from import init_from
from lit_probattn.training.trained import open_trained
from tests.support.runs import arguments, newest_state, only_version, run

OPTIONS = {"share_layers": "true", "pooling": "cls", "positions": "sinusoidal", "num_layers": "3"}
WORDS = [word for key, value in OPTIONS.items() for word in (f"--model.init_args.{key}", value)]
BLOCK = "model.encoder.blocks."


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    run(arguments("fit", folder, *WORDS, "--trainer.max_steps", "1"))
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


def test_it_is_converted_and_begun_with(trained, tmp_path, capsys):
    out = tmp_path / "mgk.ckpt"
    assert main([str(trained), str(out), "--num_batches", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(": heads ") == 1  # one layer, fitted on the inputs of its three passes
    files = [trained / "config.yaml", out.with_suffix(".yaml")]
    wanted = argparse.Namespace(checkpoint=out, config=files, data=[], device="cpu")
    opened = open_trained(wanted, with_data=False).task
    found = init_from(opened, str(out))
    assert (found.new, found.left) == ([], [])
    assert set(found.taken) == set(load_checkpoint(out)["state_dict"])


def test_a_shared_block_is_not_written_for_transformers():
    state = {"encoder.blocks.0.attention.query_proj.weight": torch.zeros(4, 4)}
    with pytest.raises(ConfigError, match=r"share_layers is true: "):
        export_model(state, {"share_layers": True}, 2, "bert", {})
