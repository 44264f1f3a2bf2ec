"""Functional forms with dropout in one graph of `torch.compile`; layers: `test_written.py`."""

from __future__ import annotations

import pytest
import torch

import lit_probattn
from lit_probattn import functional as LF
from lit_probattn.attention.backends import TRACE_UP_TO
from lit_probattn.attention.call import HeadCall, outline
from tests.support.slow import mostly_slow

B, H, N, E = 2, 3, 9, 5


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    torch.compiler.reset()


RNG = torch.Generator().manual_seed(0)


def heads(*counts):
    sizes = [c if isinstance(c, tuple) else (c,) for c in counts]
    return [torch.randn(B, *size, N, E, generator=RNG) for size in sizes]


FORMS = {
    "softmax": (LF.softmax_attention, heads(H, H, H), {}),
    "mgk": (LF.mgk_attention, heads(H, (H, 2), H), {"variance": torch.ones(2)}),
    "fish": (
        *(LF.fish_attention, heads(2, 2, H)),
        {"head_mix": torch.randn(H, 2, generator=RNG), "noise_scale": torch.ones(2)},
    ),
    "linear": (LF.linear_attention, heads(H, H, H), {}),
    "lfish": (
        LF.linear_fish_attention,
        heads(H, 2, 2),
        {"head_mix": torch.randn(H, 2, generator=RNG)},
    ),
}


def run(function, inputs, seed):
    """Return output and gradients."""
    torch.manual_seed(seed)
    given = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*given)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), given)]


def check(function, compiled, inputs):
    eager = run(function, inputs, seed=4)
    for found, expected in zip(run(compiled, inputs, seed=4), eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    other = run(compiled, inputs, seed=5)  # the draw is not a constant of the graph
    assert (other[0] - eager[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", mostly_slow(FORMS, ["fish"]))
def test_a_form_with_dropout_is_one_graph(name):
    function, inputs, given = FORMS[name]

    def attend(*heads):
        return function(*heads, **given, dropout_p=0.4, is_causal=True)

    check(attend, torch.compile(attend, fullgraph=True, backend="aot_eager"), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mgk", "fish"])
def test_inductor_takes_the_graph(name):
    """It draws seeds by a generator of its own; forward and backward see one draw."""
    function, inputs, given = FORMS[name]

    def attend(*heads):
        return function(*heads, **given, dropout_p=0.4)

    compiled = torch.compile(attend, fullgraph=True)
    out, *grads = run(compiled, inputs, seed=4)
    assert torch.equal(run(compiled, inputs, seed=4)[0], out)
    assert (run(compiled, inputs, seed=5)[0] - out).abs().max() > 1e-3
    # Linear in the values: Σ out ∘ d(out) = Σ value ∘ d(value).
    torch.testing.assert_close((grads[-1] * inputs[-1]).sum(), 2 * out.square().sum())


def test_the_choice_in_a_graph(monkeypatch):
    """Passes over rows that are operators are chosen as outside a graph; others give way."""
    core = lit_probattn.create("softmax", 8, 2, dropout=0.4).core
    other = lit_probattn.create(
        "fish", 8, 2, num_global_heads=1, mixer="relu_sum", noise="none"
    ).core
    long = int((TRACE_UP_TO / 2) ** 0.5) + 1
    small, large = (outline(core.layout, 1, n, n, dropout=True) for n in (300, long))
    outside = core.pick(small)
    assert outside != "reference"
    monkeypatch.setattr(HeadCall, "graph", "compiled")
    assert core.pick(small) == outside
    assert other.pick(small) == "reference"
    assert other.pick(large) == "blockwise"
    monkeypatch.setattr(HeadCall, "graph", "exported")
    assert core.pick(small) == "reference"
