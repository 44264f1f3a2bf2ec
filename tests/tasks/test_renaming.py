"""Old checkpoints go on: names of weights, the order in the optimiser, and what depends on it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_probattn import attention
from lit_probattn.tasks.renaming import core_names, ordered_parameters, rename_checkpoint
from lit_probattn.training.checkpoints import CheckedCheckpointIO, list_checkpoints, load_checkpoint
from lit_probattn.training.saving import RunCheckpoint
from tests.tasks.tiny import data, task, trainer

BEFORE, AFTER = 3, 6
CLIP = 0.05  # far below the norms that come up, so that every step is scaled
PROJECTIONS = [
    f"{name}_proj.{part}"
    for name in ("query", "key", "value", "out")
    for part in ("weight", "bias")
]
# Class -> arguments, what the core owns by itself, what its parts own.
LAYERS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "SoftmaxAttention": ({}, [], []),
    "MGKAttention": ({"shifted_keys": True}, ["key_shift"], ["prior.value"]),
    "MLKAttention": ({"shifted_keys": True}, ["key_shift"], ["prior.value"]),
    "FiSHAttention": (
        {"num_heads": 4, "num_global_heads": 2, "mixer": "mlp"},
        [],
        ["mixing.weights.0", "mixing.weights.1", "mixing.biases.0", "noise_scale.theta"],
    ),
    "ReleasedMGKAttention": (
        {"shifted_keys": True, "row_eps": 1e-6, "backend": "reference"},
        ["key_shift"],
        ["prior.value"],
    ),
}
MOVED = [name for name, (_, own, _) in LAYERS.items() if own]


def variant(name: str) -> Any:
    """What a task calls for each of its layers."""
    arguments = {"num_heads": 2, **LAYERS[name][0]}
    return lambda width, head_dim: getattr(attention, name)(width, head_dim=head_dim, **arguments)


def fit(folder: Path, name: str, steps: int, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train to step `steps`; return the newest checkpoint."""
    run = trainer(
        steps,
        plugins=[CheckedCheckpointIO()],
        enable_checkpointing=True,
        callbacks=[RunCheckpoint(folder, every_n_steps=BEFORE)],
        gradient_clip_val=CLIP,
    )
    run.fit(task(variant(name)), data(), ckpt_path=checkpoint, weights_only=True)
    return load_checkpoint(list_checkpoints(folder, "step")[0])


def as_before(content: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint as it was before cores had names of their own."""
    old = copy.deepcopy(content)
    renamed = {name.replace(".core.", "."): value for name, value in old["state_dict"].items()}
    return {**old, "state_dict": renamed}


def same(first: Any, second: Any) -> bool:
    """Whether nested values have the same names and bits."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.fixture(scope="module", params=MOVED)
def trained(request, tmp_path_factory) -> tuple[str, Path, dict[str, Any]]:
    """Name of the variant, its old checkpoint at step 3, its newest one of a whole run."""
    folder = tmp_path_factory.mktemp(request.param)
    half = fit(folder / "half", request.param, BEFORE)
    assert any(".core." in name for name in half["state_dict"])
    CheckedCheckpointIO().save_checkpoint(as_before(half), folder / "old.ckpt")
    return request.param, folder / "old.ckpt", fit(folder / "whole", request.param, AFTER)


def test_an_old_checkpoint_goes_on_to_the_last_bit(trained, tmp_path):
    name, checkpoint, whole = trained
    resumed = fit(tmp_path, name, AFTER, checkpoint)
    assert resumed["global_step"] == whole["global_step"] == AFTER
    assert same(resumed["state_dict"], whole["state_dict"])
    assert same(resumed["optimizer_states"], whole["optimizer_states"])


def test_in_the_order_of_modules_it_would_not(trained, tmp_path, monkeypatch):
    """The comparison above can fail: states would go to other parameters."""
    name, checkpoint, whole = trained
    monkeypatch.setattr(
        "lit_probattn.tasks.base.ordered_parameters",
        lambda module: dict(module.named_parameters()),
    )
    try:
        resumed = fit(tmp_path, name, AFTER, checkpoint)
    except RuntimeError as error:
        assert "size" in str(error)  # noqa: PT017
        return
    assert not same(resumed["state_dict"], whole["state_dict"])


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_core_owns_itself_stands_before_the_projections(name):
    _, own, parts = LAYERS[name]
    layer = variant(name)(12, 6)
    expected = [*own, *PROJECTIONS, *parts]
    assert [key.replace("core.", "") for key in ordered_parameters(layer)] == expected
    assert core_names(layer).keys() >= {*own, *parts}

    module = task(variant(name))
    names = {id(parameter): key for key, parameter in module.named_parameters()}
    (group,) = module.configure_optimizers().param_groups
    found = [names[id(parameter)].replace("core.", "") for parameter in group["params"]]
    assert len(found) == len(set(found)) == len(names)
    for number in range(2):
        start = f"model.encoder.blocks.{number}.attention."
        assert [k.removeprefix(start) for k in found if k.startswith(start)] == expected


def test_every_parameter_once_where_modules_share_one():
    module = task(variant("MGKAttention"))
    blocks = module.model.encoder.blocks
    blocks[1].attention.core.key_shift = blocks[0].attention.core.key_shift
    named = dict(module.named_parameters())
    ordered = ordered_parameters(module)
    assert ordered.keys() == named.keys()
    assert all(ordered[name] is parameter for name, parameter in named.items())


@pytest.mark.parametrize("name", LAYERS)
def test_states_by_name_are_renamed_and_todays_are_left_alone(name):
    module = task(variant(name))
    weights = module.state_dict()
    names = list(dict(module.named_parameters()))
    optimizer = {
        "state": {key: {"step": torch.tensor(float(i))} for i, key in enumerate(names)},
        "param_groups": [{"lr": 0.1, "params": names}],
    }
    today = {"state_dict": dict(weights), "optimizer_states": [optimizer], "global_step": 3}
    old = as_before(today)
    (stored,) = old["optimizer_states"]
    stored["state"] = {k.replace(".core.", "."): v for k, v in stored["state"].items()}
    stored["param_groups"][0]["params"] = [key.replace(".core.", ".") for key in names]
    assert same(old, today) == (not core_names(module))
    rename_checkpoint(old, module)
    assert same(old, today)
    rename_checkpoint(old, module)
    assert same(old, today)
    without = {"state_dict": {}}
    rename_checkpoint(without, module)
    assert without == {"state_dict": {}}
