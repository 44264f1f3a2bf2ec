"""What bfloat16 may cost: every layer and backend beside float32 scores that are rounded once."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from lit_probattn.attention.mgk.functions import MGK
from lit_probattn.attention.numerics import reference_output, split_precision
from lit_probattn.kernels.cpu import library, selftest
from lit_probattn.randomness import RandomKey
from tests.attention.variants import EMBED, backends_for, layers
from tests.support.slow import mostly_slow

LAYERS = layers()
B, N = 2, 31
KEY = RandomKey(5, step=3, sample_ids=torch.tensor([19, 4]))
LOW = torch.bfloat16
HEADS = ("query", "key", "value")
# Error of a tensor over that of float32 scores: the output, gradients of heads, of parameters. Our
# own code rounds once. PyTorch's kernel also rounds weights and the gradients of scores, of which a
# prior's is a sum that nearly cancels; so do tiles that multiply bfloat16, whose own rule is below.
OURS, FUSED = (2.0, 2.0, 2.0), (3.0, 8.0, 100.0)
# Root mean square of one rounding, relative: the least that is asked of a tensor of few numbers.
ROUNDING = torch.finfo(LOW).eps / 5
needs_library = pytest.mark.skipif(
    library.obstacle() is not None, reason=f"the C library {library.obstacle()}"
)


def heads_of(layer, x):
    """Return heads of a layer in bfloat16, with scores of several units."""
    call = layer.call(x, rng=KEY, is_causal=True)
    query, key, value = (t.detach() for t in (call.query, call.key, call.value))
    return replace(call, query=(3 * query).to(LOW), key=(3 * key).to(LOW), value=value.to(LOW))


def run(core, call, dtype, cotangent, autocast=False):
    """Return the output of heads in `dtype`, and all gradients, by name."""
    leaves = [getattr(call, name).to(dtype).requires_grad_() for name in HEADS]
    parameters = {n: p for n, p in core.named_parameters() if p.requires_grad}
    with torch.autocast("cpu", LOW, enabled=autocast):
        out = core(replace(call, **dict(zip(HEADS, leaves, strict=True))))
    grads = torch.autograd.grad(out, [*leaves, *parameters.values()], cotangent.to(out.dtype))
    return dict(zip(("out", *HEADS, *parameters), (out.detach(), *grads), strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_error_is_that_of_single_precision_scores(name):
    """In bfloat16 and under autocast, output and every gradient, against float64."""
    layer, x = LAYERS[name](), torch.randn(B, N, EMBED)
    with torch.no_grad():
        for parameter in layer.core.parameters():
            parameter.copy_(parameter.to(LOW))  # all precisions compute from the same numbers
    single, call = layer.core, heads_of(layer, x)
    low, exact = copy.deepcopy(single).to(LOW), copy.deepcopy(single).double()
    cotangent = torch.randn(B, layer.layout.out, N, layer.value_head_dim).to(LOW)
    single.backend = exact.backend = "reference"
    true = run(exact, call, torch.float64, cotangent)
    eager = run(single, call, torch.float32, cotangent)

    def error(found, part):
        return (found[part].to(LOW).double() - true[part]).square().mean().sqrt()

    for backend in backends_for(layer, x, is_causal=True):
        low.backend = single.backend = backend
        rounds = backend == "native" and selftest.multiplies_low()
        budget = FUSED if backend == "sdpa" or rounds else OURS
        for found in (run(low, call, LOW, cotangent), run(single, call, LOW, cotangent, True)):
            assert found["out"].dtype == LOW
            for part, value in true.items():
                factor = budget[0 if part == "out" else 1 if part in HEADS else 2]
                least = ROUNDING * value.square().mean().sqrt()
                allowed = factor * torch.maximum(error(eager, part), least)
                assert error(found, part) <= allowed, (backend, part)


def plain_code(core, call, dtype, cotangent):
    """Return what `run` does of the equation with every tensor in the heads' dtype."""
    leaves = [getattr(call, name).to(dtype).requires_grad_() for name in HEADS]
    parameters = {n: p for n, p in core.named_parameters() if p.requires_grad}
    call = replace(call, **dict(zip(HEADS, leaves, strict=True)))
    variant, scored = core.variant(call), call
    if isinstance(variant, MGK):  # which keeps its terms, and shifted keys, in float32
        scored = replace(call, key=variant.components(call.key).to(dtype))
        prior, weight = variant.log_prior, variant.norm_weight
        variant = replace(
            variant,
            key_shift=None,
            variance=variant.variance.to(dtype),
            log_prior=None if prior is None else prior.to(dtype),
            norm_weight=None if weight is None else weight.to(dtype),
        )
    scores = variant.scores(scored)
    assert scores.dtype == dtype
    out = reference_output(scores, call.value, call.masks, call.dropout, variant.normalise)
    grads = torch.autograd.grad(out, [*leaves, *parameters.values()], cotangent.to(out.dtype))
    return dict(zip(("out", *HEADS, *parameters), (out.detach(), *grads), strict=True))


def has_tiles(name):
    """Whether the form of a layer's scores is one that tiles compute, on any processor.

    The others are linear attention, which forms no pairs, and other functions than the softmax.
    Their engines are held to `OURS` above, which allows less than the rule of plain code.
    """
    return "native" in LAYERS[name]().core.backends


TILED = [name for name in LAYERS if has_tiles(name)]


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in TILED])
def test_layers_without_tiles_are_refused_for_their_form(name):
    """And for nothing that another processor or compiler would change."""
    core = LAYERS[name](backend="native").core
    forms = "no backend 'native'|other than softmax"
    with pytest.raises(NotImplementedError, match=forms):
        core.pick(heads_of(LAYERS[name](), torch.randn(B, N, EMBED)))


@needs_library
@pytest.mark.parametrize("name", mostly_slow(TILED, TILED[::3]))
def test_error_of_tiles_is_at_most_that_of_plain_code(name):
    """Output and every gradient against float64, root mean square over several inputs.

    Where the processor multiplies no bfloat16, tiles convert heads, and the rule is the same.
    """
    errors = {}
    for seed in range(4):
        torch.manual_seed(seed)
        layer, x = LAYERS[name](), torch.randn(B, N, EMBED)
        with torch.no_grad():
            for parameter in layer.core.parameters():
                parameter.copy_(parameter.to(LOW))
        call, exact = heads_of(layer, x), copy.deepcopy(layer.core).double()
        low = copy.deepcopy(layer.core).to(LOW)
        exact.backend, low.backend = "reference", "native"
        cotangent = torch.randn(B, layer.layout.out, N, layer.value_head_dim).to(LOW)
        true = run(exact, call, torch.float64, cotangent)
        found = (run(low, call, LOW, cotangent), plain_code(low, call, LOW, cotangent))
        for part, value in true.items():
            squares = [float((one[part].double() - value).square().sum()) for one in found]
            errors.setdefault(part, []).append(squares)
    for part, squares in errors.items():
        ours, plain = torch.tensor(squares).sum(0).sqrt().tolist()
        print(f"{name:24} {part:24} {ours / plain:.2f}")
        assert ours <= plain, part


def test_three_parts_hold_a_single_precision_number():
    """8 bits each, 24 in all."""
    torch.manual_seed(1)
    a = torch.randn(997) * 2.0 ** torch.randint(-9, 9, (997,))
    parts = split_precision(a, LOW)
    assert all(part.dtype == LOW for part in parts)
    assert torch.equal(sum(part.float() for part in parts), a)


@pytest.mark.parametrize("name", ["mish", "linear"])
def test_backward_inside_autocast_is_that_outside(name):
    """PyTorch advises against it, but what backward computes again must not change."""
    layer, x = LAYERS[name](backend="blockwise"), torch.randn(B, N, EMBED)
    grads = []
    for inside in (False, True):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", LOW):
            heads = heads_of(layer, leaf)
            query = heads.query.requires_grad_()
            out = layer.core(replace(heads, query=query)).float().square().sum()
        with torch.autocast("cpu", LOW, enabled=inside):
            grads.append(torch.autograd.grad(out, query)[0])
    assert torch.equal(*grads)
