"""The operators of a compiled graph as PyTorch sees them: schema, fakes, autograd."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.attention.deletion_proof import left
from tests.functional.written_table import inputs, layer_of
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
HOLDERS = left(HOLDERS)
CASES = [
    *((*holder, False) for holder in HOLDERS),
    *((*holder, True) for holder in HOLDERS if holder[0] in ("tiles", "philox_words")),
]
# With the tensors that may be missing; the slow cases are without.
FAST = left(
    [
        ("tiles", "smgk", "auto", True),
        ("entmax", "ast", "auto", False),
        ("keep_pairs", "ast", "auto", False),
        ("normal_noise", "fish", "auto", False),
        ("philox_words", "smgk", "auto", True),
        ("random_features", "favor", "auto", False),
    ]
)
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@cache
def calls_of(name, backend, masked):
    """Return the calls of our operators in a training step's graph: name -> operator, arguments."""
    found = {}

    class Spy(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if getattr(target, "namespace", "") == "lit_probattn":
                found[target.name()] = (target, args, kwargs)
            return super().call_function(target, args, kwargs)

    torch.compiler.reset()
    layer = layer_of(name, dropout=0.3).train()
    layer.backend = backend
    run = torch.compile(layer, fullgraph=True, backend=lambda graph, _: Spy(graph).run)
    torch.manual_seed(3)
    given = {"key_mask": inputs(6, 2)[..., 0] < 0.8} if masked else {}
    run(inputs(6, 1), **given)
    return found


def leaf(x):
    """Return an argument of its own, with a gradient where it can have one."""
    return x.detach().clone().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x


@pytest.mark.parametrize(("operator", "name", "backend", "masked"), mostly_slow(CASES, FAST))
def test_an_operator_passes_opcheck(operator, name, backend, masked):
    target, args, kwargs = calls_of(name, backend, masked)[f"lit_probattn::{operator}"]
    assert not kwargs
    torch.library.opcheck(target, tuple(map(leaf, args)), test_utils=CHECKS)
