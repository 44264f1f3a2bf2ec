"""The counters: handles that are exact, and operations that must not count as zero."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lit_probattn.attention import Attention, LinearAttention, SoftmaxAttention
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.measure.counters import (
    fvcore_macs,
    torch_flops,
    torch_macs,
)
from profiling.cost.exact import backend_macs
from tests.attention.variants import shipped_variants


class Calls(nn.Module):
    """Wraps a function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def both(function, *shape):
    model, x = Calls(function), torch.empty(*shape, device="meta")
    return fvcore_macs(model, x).products, torch_macs(model, x).products


def test_matrix_products_and_broadcasting():
    other = torch.empty(3, 1, 5, 7, device="meta")
    assert both(lambda x: x @ other, 4, 2, 5) == (3 * 4 * 2 * 5 * 7,) * 2


def test_einsum_is_exact():
    other = torch.empty(3, 7, 5, device="meta")
    assert both(lambda x: torch.einsum("bik,bjk->bij", x, other), 3, 2, 5) == (3 * 2 * 7 * 5,) * 2


def test_fused_attention_counts_both_products():
    """Values have a size of their own."""
    key = torch.empty(2, 3, 11, 7, device="meta")
    value = torch.empty(2, 3, 11, 13, device="meta")
    counts = both(lambda q: F.scaled_dot_product_attention(q, key, value), 2, 3, 5, 7)
    assert counts == (2 * 3 * 5 * 11 * (7 + 13),) * 2


def test_distance_is_charged_like_a_product():
    other = torch.empty(2, 7, 5, device="meta")
    assert both(lambda x: torch.cdist(x, other), 2, 3, 5) == (2 * 3 * 7 * 5,) * 2


def test_norms_are_kept_apart():
    count = fvcore_macs(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), torch.empty(3, 4))
    assert (count.products, count.norms) == (3 * 4 * 6, 5 * 3 * 6)


class Twice(torch.autograd.Function):
    """A product inside an autograd function."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x.mT

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad + grad.mT) @ x


def test_products_inside_autograd_functions_count():
    assert both(lambda x: Twice.apply(x), 3, 5) == (3 * 3 * 5,) * 2


@torch.library.custom_op("profiling_test::mystery_attention", mutates_args=())
def mystery_attention(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT @ x


@mystery_attention.register_fake
def _(x):
    return torch.empty_like(x)


def test_operation_without_a_formula_is_an_error():
    model, x = Calls(mystery_attention), torch.randn(4, 4)
    with pytest.raises(UnsupportedError, match="mystery_attention"):
        torch_macs(model, x)
    with pytest.raises(UnsupportedError, match="mystery_attention"):
        fvcore_macs(model, x)


def test_backward_is_counted():
    x = torch.randn(3, 5, requires_grad=True)
    w = torch.randn(5, 7, requires_grad=True)
    assert torch_flops(lambda: (x @ w).sum().backward()) == 3 * 2 * 3 * 5 * 7


def test_fused_attention_on_the_cpu_counts_with_grouped_heads():
    """Forward 2, backward 5 products, one of them made again; PyTorch 2.11 has no formula."""
    query = torch.randn(2, 6, 7, 5, requires_grad=True)
    key, value = torch.randn(2, 3, 11, 5, requires_grad=True), torch.randn(2, 3, 11, 5)

    def call():
        attend = torch.nn.functional.scaled_dot_product_attention
        attend(query, key, value, enable_gqa=True).sum().backward()

    pairs = 2 * 2 * 6 * 7 * 11
    assert torch_flops(call) == pairs * (2 * 5 + 5 * 5)


def test_products_that_are_added_in_place_count_as_elsewhere():
    first, second, total = torch.ones(2, 3, 5), torch.ones(2, 5, 7), torch.zeros(2, 3, 7)
    assert torch_flops(lambda: total.baddbmm_(first, second)) == 2 * 2 * 3 * 5 * 7


def _training_flops(layer: Attention, backend: str) -> int:
    layer.backend = backend
    x = torch.randn(2, 61, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", shipped_variants())
def test_the_c_library_counts_like_blocks_of_the_same_form(name):
    """PyTorch's counter sees the operators of the library, which layers select by themselves."""
    cls, options = shipped_variants()[name]
    layer = cls(32, **options)
    try:
        found = _training_flops(layer, "native")
    except NotImplementedError:
        pytest.skip(f"{name} is not computed by the library")
    expected = _training_flops(layer, "blockwise")
    if name == "mish":  # blocks mix once for all heads, the library once for each
        expected += 2 * 4 * 2 * 61 * 61 * 2 * (layer.num_heads - 1)
    assert found == expected
    closed = backend_macs(layer, 61, "native", train=True)
    assert closed is None or found == 2 * 2 * closed


def test_each_pass_counts_alone():
    layer, x = SoftmaxAttention(32, 4, backend="native"), torch.randn(1, 50, 32, requires_grad=True)
    counts = []
    for inside in ((True, False), (False, True)):
        counter = FlopCounterMode(display=False)
        with counter if inside[0] else nullcontext():
            out = layer(x)
        with counter if inside[1] else nullcontext():
            out.sum().backward()
        counts.append(counter.get_total_flops())
    forward, both = backend_macs(layer, 50, "native"), backend_macs(layer, 50, "native", train=True)
    assert counts == [2 * forward, 2 * (both - forward)]


def test_a_formula_of_the_counter_replaces_that_of_the_package():
    layer, x = SoftmaxAttention(32, 4, backend="native").eval(), torch.randn(1, 50, 32)
    layer(x)  # defines the operator
    operator, found = torch.ops.lit_probattn.tiles, []
    for mapping in ({}, {operator: lambda *_, **__: 7}):
        counter = FlopCounterMode(display=False, custom_mapping=mapping)
        with counter:
            layer(x)
        found.append(counter.get_flop_counts()["Global"][operator])
    assert found == [2 * 2 * 50 * 50 * 32, 7]


def test_pairs_within_chunks_of_causal_linear_attention_count():
    """Chunks have 48 positions; sums of features are a column of the values."""
    layer, x = LinearAttention(32, 4, backend="native"), torch.randn(2, 61, 32)
    counts = []
    for is_causal in (False, True):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            layer(x, is_causal=is_causal)
        counts.append(counter.get_total_flops())
    assert counts[1] - counts[0] == 2 * 2 * 4 * (48**2 + 13**2) * (8 + 8 + 1)
