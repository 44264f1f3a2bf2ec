"""The operators of a compiled graph as PyTorch sees them: schema, fakes, autograd."""

from __future__ import annotations

from functools import cache
from unittest import mock

import pytest
import torch

from lit_probattn.base.torch_internals import TorchDispatchMode
from tests.functional.graphs import inputs, layer_of
from tests.support.slow import mostly_slow

# Operator, the layer whose graph holds it, its backend.
HOLDERS = [
    ("tiles", "smgk", "auto"),
    ("tiles", "fish", "native"),
    ("entmax", "ast", "auto"),
    ("keep_pairs", "ast", "auto"),
    ("normal_noise", "fish", "auto"),
    ("philox_words", "smgk", "auto"),
    ("random_features", "favor", "auto"),
]
CASES = [
    *((*holder, False) for holder in HOLDERS),
    *((*holder, True) for holder in HOLDERS if holder[0] in ("tiles", "philox_words")),
]
# With the tensors that may be missing; the slow cases are without.
FAST = [
    ("tiles", "smgk", "auto", True),
    ("entmax", "ast", "auto", False),
    ("keep_pairs", "ast", "auto", False),
    ("normal_noise", "fish", "auto", False),
    ("philox_words", "smgk", "auto", True),
    ("random_features", "favor", "auto", False),
]
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


class Spy(TorchDispatchMode):
    """Collects the calls of our operators: name -> operator, arguments."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lit_probattn":
            self.found[func.name()] = (func, args, kwargs)
        return func(*args, **(kwargs or {}))


def layer_and_inputs(name, backend, masked):
    layer = layer_of(name, dropout=0.3).train()
    layer.backend = backend
    torch.manual_seed(3)
    return layer, {"key_mask": inputs(6, 2)[..., 0] < 0.8} if masked else {}


@cache
def calls_of(name, backend, masked):
    """Return the calls of our operators in a training step, as while a graph is recorded.

    To record one takes a second; see the last test.
    """
    layer, given = layer_and_inputs(name, backend, masked)
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True), Spy() as spy:
        layer(inputs(6, 1), **given)
    return spy.found


def leaf(x):
    """Return an argument of its own, with a gradient where it can have one."""
    return x.detach().clone().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x


@pytest.mark.parametrize(("operator", "name", "backend", "masked"), mostly_slow(CASES, FAST))
def test_an_operator_passes_opcheck(operator, name, backend, masked):
    target, args, kwargs = calls_of(name, backend, masked)[f"lit_probattn::{operator}"]
    assert not kwargs
    torch.library.opcheck(target, tuple(map(leaf, args)), test_utils=CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend", "masked"), dict.fromkeys(c[1:] for c in CASES))
def test_a_graph_holds_these_calls(name, backend, masked):
    """The operators that `torch.compile` records, and their arguments."""
    found = {}

    class Run(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if getattr(target, "namespace", "") == "lit_probattn":
                found[target.name()] = (target, args, kwargs)
            return super().call_function(target, args, kwargs)

    torch.compiler.reset()
    layer, given = layer_and_inputs(name, backend, masked)
    run = torch.compile(layer, fullgraph=True, backend=lambda graph, _: Run(graph).run)
    run(inputs(6, 1), **given)
    expected = calls_of(name, backend, masked)
    assert found.keys() == expected.keys()
    for operator, (target, args, _) in found.items():
        assert target == expected[operator][0]
        for ours, theirs in zip(args, expected[operator][1], strict=True):
            assert torch.equal(ours, theirs) if torch.is_tensor(ours) else ours == theirs
