"""Heads of another number or size than a core was made for are refused, not bent into shape."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lit_probattn import functional as LF
from lit_probattn.attention.core import HeadLayout
from lit_probattn.attention.linear.mlk import MLKCore, MLKOptions
from lit_probattn.attention.mgk.core import MGKCore
from lit_probattn.attention.mgk.options import MGKOptions
from lit_probattn.functional.call import head_call
from tests.attention.variants import EMBED, examples, layers

CASES = {**layers(), **examples()}
MIX = torch.ones(4, 2)


def wrong(name, tensor):
    """Return heads that are one too few, one too many, half as many, and cut in size."""
    heads = tensor.flatten(1, 2) if tensor.dim() == 5 else tensor
    count = heads.shape[1]
    yield torch.cat([heads, heads[:, :1]], 1)
    yield heads[..., :-1]
    if count > 1:
        yield heads[:, :-1]
        yield heads[:, : count // 2]
    if tensor.dim() == 5:
        yield tensor[:, :, :1]
        yield tensor.transpose(1, 2)[:, :, :1]
    elif name != "query":
        yield tensor[:, :, None].expand(-1, -1, 2, -1, -1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_wrong_heads_are_refused_by_every_core(case, name):
    layer = CASES[case]().eval()
    call = layer.call(torch.randn(2, 6, EMBED))
    layer.core(call)
    for tensor in wrong(name, getattr(call, name)):
        other = replace(call, **{name: tensor})
        with pytest.raises(ValueError, match=f"^{name} has "):
            layer.core(other)
        with pytest.raises(
            (ValueError, NotImplementedError), match=rf"^{name} has |no attention maps"
        ):
            layer.core.weights(other)


def test_a_swapped_layer_is_held_to_it_too():
    """Two heads of two keys each: a host that gives two keys has given half of them."""
    core = MGKCore(HeadLayout(2, 2, 2, 2, 8, 8, 2))
    query, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="key has 2 heads, expected 4"):
        core(head_call(query, torch.randn(1, 2, 5, 8), value, 2))


@pytest.mark.parametrize("shifted", [False, True])
def test_components_and_the_layout_of_a_core_agree(shifted):
    """Keys per head are the components, or one where components are shifts of one key."""
    layout = HeadLayout(4, 4, 4, 4, 8, 8, keys_per_head=2 if shifted else 1)
    for core, options in ((MGKCore, MGKOptions), (MLKCore, MLKOptions)):
        with pytest.raises(ValueError, match="keys_per_head"):
            core(layout, options=options(num_components=2, shifted_keys=shifted))


@pytest.mark.parametrize("lengths", [(0, 0), (5, 0), (0, 5)], ids=str)
@pytest.mark.parametrize(
    ("attend", "heads"),
    [
        (functools.partial(LF.softmax_attention, enable_gqa=True), (4, 2, 2)),
        (lambda *given, **named: LF.fish_attention(*given, MIX, **named), (2, 2, 4)),
        (lambda *given, **named: LF.linear_fish_attention(*given, MIX, **named), (4, 2, 2)),
        (functools.partial(LF.mgk_attention, key_shift=torch.ones(3, 8)), (4, 4, 4)),
        (functools.partial(LF.linear_attention, enable_gqa=True), (4, 2, 2)),
    ],
)
def test_packed_calls_without_tokens_have_the_heads_of_others(attend, heads, lengths):
    queries, keys = lengths
    query, key, value = (
        torch.randn(1, count, length, 8)
        for count, length in zip(heads, (queries, keys, keys), strict=True)
    )
    bounds = [torch.tensor([0, length, length]) for length in lengths]
    packed = {"cu_seqlens": bounds[0], "cu_seqlens_k": bounds[1]}
    found = attend(query, key, value, **packed)
    assert torch.equal(found, torch.zeros(1, 4, queries, 8))


def attended(form, **given):
    """Four heads, of two keys each unless they are shifted."""
    torch.manual_seed(0)
    query, value = torch.randn(2, 1, 4, 5, 8)
    key = query if form is LF.ast_attention or "key_shift" in given else torch.randn(1, 4, 2, 5, 8)
    return form(query, key, value, **given)


@pytest.mark.parametrize(
    ("form", "name", "shape"),
    [
        (LF.mgk_attention, "log_prior", (2, 2)),
        (LF.mgk_attention, "log_prior", (2, 2, 5)),
        (LF.mgk_attention, "variance", (2, 2)),
        (LF.mgk_attention, "key_shift", (2, 2, 8)),
        (LF.mgk_attention, "key_shift", (8,)),
        (LF.mlk_attention, "prior", (2, 2)),
        (LF.mlk_attention, "prior", (2, 2, 5)),
        (LF.mlk_attention, "key_shift", (2, 2, 8)),
        (LF.mlk_attention, "key_shift", (8,)),
        (LF.ast_attention, "alpha", (2,)),
    ],
)
def test_parameters_have_one_head_or_all(form, name, shape):
    with pytest.raises(ValueError, match=f"^{name} has shape"):
        attended(form, **{name: torch.ones(shape) * 1.5})
    if len(shape) > 1:
        one, all_heads = (torch.ones(count, *shape[1:]) for count in (1, 4))
        found = attended(form, **{name: one})
        torch.testing.assert_close(found, attended(form, **{name: all_heads}))


@pytest.mark.parametrize("backend", ["blockwise", "native", "auto"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("widths", [[], [5], [5, 4]], ids=str)
def test_more_maps_than_heads_are_mixed_to_the_heads_of_the_values(backend, heads, widths):
    sizes = [3, *widths, heads]
    mix = [torch.randn(b, a, dtype=torch.float64) for a, b in pairwise(sizes)]
    query, key = torch.randn(2, 2, 3, 7, 4, dtype=torch.float64).requires_grad_()
    value = torch.randn(2, heads, 7, 5, dtype=torch.float64)
    found = []
    for name in ("reference", backend):
        form = functools.partial(LF.fish_attention, query, key, value, mix, backend=name)
        try:
            out = form(is_causal=True)
        except NotImplementedError:
            pytest.skip("no such engine for this mixing")
        assert out.shape == value.shape
        found.append([out, *torch.autograd.grad(out.square().sum(), [query, key])])
    torch.testing.assert_close(*found, rtol=0, atol=1e-11)
