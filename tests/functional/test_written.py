"""Graphs of every variant against the layer itself; transforms, nested tensors, derivatives."""

from __future__ import annotations

import ast
import sys
from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd import forward_ad

import lit_probattn
from lit_probattn import functional as LF
from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.randomness import RandomKey
from tests.functional.graphs import (
    FORMS,
    LARGEST,
    PRESETS,
    PUBLIC,
    SIZES,
    bound,
    compile_whole,
    error,
    export,
    inputs,
    layer_of,
)
from tests.support.paths import ROOT
from tests.support.slow import mostly_slow

CELLS = [(form, name, size) for form, name, size in product(FORMS, PUBLIC, SIZES)]
CELLS = [cell for cell in CELLS if cell[2] <= LARGEST.get(cell[:2], cell[2])]
CELLS += [(form, "ast", 160) for form in ("export", "compile")]  # some blocks
CELLS += [(form, name, 512) for form, name in product(FORMS, PRESETS)]
# Every form; ONNX takes seconds.
FAST_CELLS = [
    ("export", "polynomial", 512),
    ("compile", "mgk_hard_e", 512),
    ("export_dynamic", "smgk", 32),
    ("onnx", "fish", 32),
]


@pytest.mark.parametrize(("form", "name", "size"), mostly_slow(CELLS, FAST_CELLS))
def test_a_graph_computes_what_the_layer_does(form, name, size):
    if form == "onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    assert error(form, name, size) < bound(name, size)


def own_operators(program):
    """Return the names of our custom operators in a program."""
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    return {name for name in names if "lit_probattn" in name}


@pytest.mark.parametrize(
    ("name", "train"),
    mostly_slow(
        product(["smgk", "fish", "ast", "mgk_hard_e", "favor"], [False, True]),
        [("ast", False)],
    ),
)
def test_an_exported_program_holds_pytorchs_operators_only(name, train, monkeypatch):
    layer = layer_of(name, dropout=0.2 if train else 0.0).train(train)
    variant = sys.modules[type(layer).__module__]
    if hasattr(variant, "_BISECTIONS"):  # each has the same operators
        monkeypatch.setattr(variant, "_BISECTIONS", 2)
    if name == "favor" and train:
        pytest.skip("random features are drawn by operators of their own")
    program = torch.export.export(layer, (inputs(24, 0),))
    assert not own_operators(program)


@pytest.mark.parametrize("name", mostly_slow(["softmax", "smgk", "fish"], ["softmax"]))
def test_draws_of_an_exported_program(name):
    """A key is a constant of the program; without one it draws as the layer does."""

    class Keyed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer_of(name, dropout=0.3).train()
            self.rng = RandomKey(3, 2, torch.arange(5, 7))

        def forward(self, query):
            return torch.cat([self.layer(query, rng=rng) for rng in (self.rng, None)])

    layer, x, found = Keyed(), inputs(40, 1), []
    program = export(layer, 40)
    for run in (layer, program):
        torch.manual_seed(7)
        found.append(run(x))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    assert not own_operators(program)


@pytest.mark.parametrize("name", ["smgk", "talking_heads"])
def test_a_program_for_any_sizes_has_masks_and_a_bias(name):
    layer, (batch, length) = layer_of(name), (torch.export.Dim(name, min=2) for name in "bn")

    def call(size, samples):
        x = torch.randn(samples, size, layer.embed_dim)
        key_mask = torch.rand(samples, size) < 0.7
        return x, {"key_mask": key_mask, "bias": torch.randn(size, size), "is_causal": True}

    x, masks = call(24, 3)
    shapes = {"query": {0: batch, 1: length}, "key_mask": {0: batch, 1: length}}
    shapes |= {"bias": {0: length, 1: length}, "is_causal": None}
    program = torch.export.export(layer, (x,), masks, dynamic_shapes=shapes).module()
    x, masks = call(31, 5)
    torch.testing.assert_close(program(x, **masks), layer(x, **masks), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "smgk", "hard_fish", "linear"])
def test_a_jit_trace_is_for_any_sizes(name):
    class Causal(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer_of(name)

        def forward(self, x, key_mask):
            return self.layer(x, key_mask=key_mask, is_causal=True)

    def call(size, samples):
        x = torch.randn(samples, size, layer.layer.embed_dim)
        return x, torch.rand(samples, size) < 0.7

    layer = Causal()
    with torch.no_grad():
        graph = torch.jit.trace(layer, call(24, 3), check_trace=False)
        for given in (call(31, 5), call(17, 1)):
            torch.testing.assert_close(graph(*given), layer(*given), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layer_type", [SoftmaxAttention, partial(MGKAttention, shifted_keys=True)])
def test_a_jit_trace_rotates_any_number_of_positions(layer_type):
    """Sizes are tensors while it is recorded, and the first position is a difference of them."""
    layer = layer_type(12, 2, rotary_dim=4, backend="reference").eval()
    with torch.no_grad():
        graph = torch.jit.trace(layer, (torch.randn(2, 24, 12),), check_trace=False)
        for x in (torch.randn(2, 31, 12), torch.randn(1, 17, 12)):
            torch.testing.assert_close(graph(x), layer(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("trace", ["make_fx", "jit"])
def test_traces(trace):
    layer, x = layer_of("smgk"), inputs(64, 0)
    with torch.no_grad():
        if trace == "jit":
            graph = torch.jit.trace(layer, (x,), check_trace=False)
        else:
            graph = torch.fx.experimental.proxy_tensor.make_fx(layer)(x)
        torch.testing.assert_close(graph(inputs(64, 1)), layer(inputs(64, 1)), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_training_with_dropout_in_one_graph(name):
    """Draws and gradients are those of the layer, and a draw is not a constant of the graph."""
    layer, x = layer_of(name, dropout=0.3).train(), inputs(48, 1)
    compiled, found = compile_whole(layer, 48), []
    for run, seed in ((layer, 5), (compiled, 5), (compiled, 6)):
        torch.manual_seed(seed)
        given = x.clone().requires_grad_()
        out = run(given)
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for graph, eager in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(graph, eager, rtol=0, atol=1e-4)
    assert (found[2][0] - found[0][0]).abs().max() > 1e-3


def test_a_backend_that_is_no_operation_of_pytorch_is_refused():
    layer = layer_of("smgk")
    layer.backend = "native"
    with pytest.raises(NotImplementedError, match=r"native.*cannot be exported.*reference"):
        export(layer, 32)
    layer.backend = "blockwise"
    with pytest.raises(NotImplementedError, match=r"blockwise.*dynamic.*reference"):
        FORMS["export_dynamic"](layer, 32)


@pytest.mark.parametrize("name", mostly_slow(PUBLIC, ["smgk", "mgk_hard_e", "ast", "linear"]))
def test_transforms_of_torch_func(name):
    layer, x = layer_of(name).double(), inputs(10, 1).double()
    tangent = inputs(10, 2).double()

    def loss(x):
        return layer(x).square().sum()

    given = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(given), given)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    torch.testing.assert_close(torch.func.vmap(layer)(x[None])[0], layer(x))
    _, slope = torch.func.jvp(loss, (x,), (tangent,))
    torch.testing.assert_close(slope, (expected * tangent).sum())
    with forward_ad.dual_level():
        dual = loss(forward_ad.make_dual(x, tangent))
        assert forward_ad.unpack_dual(dual).tangent.equal(slope)
    if "blockwise" in layer.core.backends:
        layer.backend = "blockwise"
        with pytest.raises(NotImplementedError, match=r"torch\.func.*reference"):
            torch.func.grad(loss)(x)


def test_the_entries_of_vmap_have_one_draw():
    layer, x = lit_probattn.create("fish", 16, 2, dropout=0.5), torch.randn(1, 2, 7, 16)
    every = x.expand(3, -1, -1, -1)
    same = torch.func.vmap(layer, randomness="same")(every)
    torch.testing.assert_close(same, same[:1].expand_as(same))
    with pytest.raises(NotImplementedError, match=r'randomness="same", or pass rng=RandomKey'):
        torch.func.vmap(layer, randomness="different")(every)


def test_nested_heads_are_refused():
    heads = torch.nested.nested_tensor([torch.randn(2, 3, 8)] * 2)
    with pytest.raises(NotImplementedError, match=r"query.*nested.*key_mask"):
        LF.softmax_attention(heads, heads, heads)


@pytest.mark.parametrize("name", mostly_slow(PUBLIC, ["smgk", "mgk_hard_e", "fish", "ast"]))
def test_second_derivatives_are_right_or_refused(name):
    layer, x = layer_of(name).double(), inputs(10, 1).double()
    direction = inputs(10, 2).double()

    def first(x):
        given = x.detach().requires_grad_()
        return torch.autograd.grad(layer(given).square().sum(), given)[0]

    def second():
        given = x.clone().requires_grad_()
        loss = layer(given).square().sum()
        (found,) = torch.autograd.grad(loss, given, create_graph=True)
        return torch.autograd.grad(found.square().sum(), given)[0]

    layer.backend, step = "reference", 1e-6
    moved = [first(x + sign * step * direction).square().sum() for sign in (1, -1)]
    expected = second()
    slope = (moved[0] - moved[1]) / (2 * step)
    torch.testing.assert_close((expected * direction).sum(), slope, rtol=1e-3, atol=1e-6)
    for backend in ("auto", *layer.core.backends):
        layer.backend = backend
        try:
            first(x)
        except NotImplementedError:
            continue  # does not support this variant at all
        try:
            found = second()
        except NotImplementedError as refused:
            assert 'backend="reference"' in str(refused)  # noqa: PT017
        else:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", mostly_slow(PUBLIC, ["smgk", "mgk_hard_e", "fish", "linear"]))
@pytest.mark.parametrize("is_causal", [False, True])
def test_several_gradients_at_once_are_right_or_refused(name, is_causal):
    """As `torch.autograd.functional.jacobian(vectorize=True)` computes them."""
    layer, x = layer_of(name).double(), inputs(10, 1).double().requires_grad_()
    rows = torch.randn(2, *x.shape, dtype=torch.float64)
    for backend in ("auto", *layer.core.backends):
        layer.backend = backend
        try:
            out = layer(x, is_causal=is_causal)
        except NotImplementedError:
            continue  # does not support this variant at all
        alone = [torch.autograd.grad(out, x, row, retain_graph=True)[0] for row in rows]
        try:
            (found,) = torch.autograd.grad(out, x, rows, is_grads_batched=True)
        except NotImplementedError as refused:
            assert 'backend="reference"' in str(refused)  # noqa: PT017
            assert backend != "reference"
        else:
            torch.testing.assert_close(found, torch.stack(alone))


def test_memory_alone_is_asked_in_one_place():
    texts = {
        path: path.read_text(encoding="utf-8") for path in (ROOT / "lit_probattn").rglob("*.py")
    }
    calls = [
        path.relative_to(ROOT).as_posix()
        for path, text in texts.items()
        if "has_numbers(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "has_numbers"
    ]
    assert set(calls) == {"lit_probattn/base/memory.py"}


def test_every_public_variant_is_here():
    assert len(PUBLIC) == 36
    assert len(PRESETS) == 36
    assert set(PUBLIC) | set(PRESETS) == set(lit_probattn.list_attention())
