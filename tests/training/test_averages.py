"""Means of a run's newest checkpoints: their numbers, their names, who takes them."""

from __future__ import annotations

import json

import pytest
import torch

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.locks import claim
from lit_probattn.training.checkpoints import (
    CheckpointError,
    average_newest,
    checkpoint_path,
    find_file,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from lit_probattn.training.run_folder import LOCK, RunSettings, plan_fit, read_own_config
from tests.support.runs import rewound, run, stateful


def saved(folder, step, **more):
    generator = torch.Generator().manual_seed(step)
    weights = {"model.w": torch.randn(7, 5, generator=generator), "eval.n": torch.tensor(step)}
    content = {"global_step": step, "state_dict": {**weights, **more}, "optimizer_states": [step]}
    save_checkpoint(content, checkpoint_path(folder, "step", step))
    return weights["model.w"]


def test_the_mean_of_the_newest_is_summed_in_float64(tmp_path):
    weights = [saved(tmp_path, step) for step in (3, 5, 11)]
    path = average_newest(tmp_path, 2)
    assert path.name == "average-2-00000011.ckpt"
    made = load_checkpoint(path)
    mean = ((weights[1].double() + weights[2].double()) / 2).float()
    assert torch.equal(made["state_dict"]["model.w"], mean)
    assert int(made["state_dict"]["eval.n"]) == 11  # the newest's own
    assert made["averaged"] == ["step-00000011.ckpt", "step-00000005.ckpt"]
    assert "optimizer_states" not in made
    # An average is no step of the run.
    assert len(list_checkpoints(tmp_path, "step")) == 3


def test_shared_weights_in_float64_are_summed_once(tmp_path):
    """Two names of one tensor, as in the state dict of a model with tied weights."""
    for step in (1, 3):
        weight = torch.full((2,), float(step), dtype=torch.float64)
        saved(tmp_path, step, **{"model.tokens": weight, "model.output": weight})
    state = load_checkpoint(average_newest(tmp_path, 2))["state_dict"]
    assert state["model.tokens"].tolist() == state["model.output"].tolist() == [2.0, 2.0]


def test_a_run_folder_is_asked_for_its_average(tmp_path):
    for step in (3, 5):
        saved(tmp_path / "checkpoints", step)
    assert find_file(tmp_path / "average-2").parent == tmp_path / "checkpoints"


def test_too_few_checkpoints_and_other_models_are_refused(tmp_path):
    saved(tmp_path, 3)
    for count, needed in ((0, 1), (2, 2)):
        with pytest.raises(
            CheckpointError, match=rf"average-{count} requires {needed} step .* found 1"
        ):
            average_newest(tmp_path, count)
    saved(tmp_path, 5, **{"model.more": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"differ in model\.more"):
        average_newest(tmp_path, 2)


def test_an_average_is_scored_and_not_trained_on(uninterrupted, tmp_path):
    version = rewound(uninterrupted, 6, tmp_path)
    with claim(version / LOCK):  # of a training, which evaluations do not wait for
        run(stateful("test", tmp_path, "--ckpt_path", "average-2"))
    report = json.loads((version / "test-average-2-00000006.json").read_text(encoding="utf-8"))
    assert report["num_samples"] == 21
    settings = RunSettings(root=str(tmp_path / "runs"))
    with pytest.raises(ConfigError, match="an average has no optimiser state"):
        plan_fit(settings, version.parent.name, read_own_config(version), "average-2")
