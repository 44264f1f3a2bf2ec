"""Optimisers keep their state by position: the order of parameters is a part of checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lit_probattn import attention
from lit_probattn.tasks.parameter_order import ordered_parameters
from tests.tasks.tiny import task

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


def variant(name: str) -> Any:
    """What a task calls for each of its layers."""
    return partial(getattr(attention, name), **{"num_heads": 2, **LAYERS[name][0]})


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_core_owns_itself_stands_before_the_projections(name):
    _, own, parts = LAYERS[name]
    layer = variant(name)(12, head_dim=6)
    expected = [*own, *PROJECTIONS, *parts]
    assert [key.replace("core.", "") for key in ordered_parameters(layer)] == expected

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
