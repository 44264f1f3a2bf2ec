"""Divided causal sums against the maps written out: maps, groups, spans, rows without sums."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from lit_probattn.attention.linear.average import causal_average
from lit_probattn.attention.linear.features import FeatureMap
from lit_probattn.attention.linear.functions import LinearForm, finish
from lit_probattn.attention.masks import make_masks
from tests.support.slow import taking_turns

EPS, FACTOR = 1e-3, 0.7
MAPS = {"none": lambda x: x, "elu": lambda x: nn.functional.elu(x) + 1.0, "relu": torch.relu}


def direct(query, key, value, row_map, col_map, eps=0.0, factor=1.0):
    """The lower triangle of the maps, divided by the sums of its rows."""
    groups = query.shape[1] // key.shape[1]
    rows, cols = MAPS[row_map](query), MAPS[col_map](key)
    kernel = (rows @ cols.repeat_interleave(groups, 1).mT).tril()
    total = kernel.sum(-1, keepdim=True) + eps
    return factor * (kernel @ value.repeat_interleave(groups, 1)) / total


def draw(batch, heads, kv_heads, length, features, size, maps):
    shapes = [(heads, features), (kv_heads, features), (kv_heads, size)]
    drawn = [torch.randn(batch, h, length, n, dtype=torch.float64) for h, n in shapes]
    for place, name in enumerate(maps):
        drawn[place] = drawn[place].abs() + 0.1 if name == "none" else drawn[place]
    return [x.requires_grad_() for x in drawn]


CHUNKS = [
    ((2, 6, 3, 45, 5, 7), 4, 32),  # spans of some heads, groups, a shorter chunk at the end
    ((2, 6, 3, 45, 5, 7), 8, 2000),  # all heads of a sample at once
    ((1, 4, 4, 64, 8, 8), None, None),
    ((3, 2, 1, 7, 4, 3), 3, 9),  # one matrix at a time
    ((2, 2, 2, 67, 3, 5), 2, 1 << 17),  # more chunks than a span may have
]


@pytest.mark.parametrize(("maps", "chunks"), taking_turns(product(MAPS, repeat=2), CHUNKS))
def test_output_and_gradients_equal_the_maps_written_out(maps, chunks):
    sizes, chunk, span = chunks
    inputs = draw(*sizes, maps)
    form = {"row_map": maps[0], "col_map": maps[1], "eps": EPS, "factor": FACTOR}
    found = causal_average(*inputs, **form, chunk=chunk, span=span)
    expected = direct(*inputs, **form)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    cotangent = torch.randn_like(expected)
    for _ in range(2):  # backward leaves what was kept as it is
        grads = torch.autograd.grad(found, inputs, cotangent, retain_graph=True)
    for a, b in zip(grads, torch.autograd.grad(expected, inputs, cotangent), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_heads_that_are_views_of_tokens():
    """As layers give them: heads of a position side by side."""
    form = {"row_map": "elu", "col_map": "elu"}
    tokens = [torch.randn(2, 37, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs = [x.transpose(1, 2) for x in tokens]
    found, expected = causal_average(*inputs, **form, chunk=4, span=64), direct(*inputs, **form)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert found.transpose(1, 2).is_contiguous()  # joining heads copies nothing
    cotangent = torch.randn_like(expected)
    pairs = zip(
        *(torch.autograd.grad(y, tokens, cotangent) for y in (found, expected)), strict=True
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("name", MAPS)
def test_predictions_of_memory_run_it_without_numbers(name):
    inputs = [x.to("meta") for x in draw(2, 6, 3, 45, 5, 7, (name, name))]
    found = causal_average(*inputs, row_map=name, col_map=name)
    assert found.is_meta
    assert found.shape == (2, 6, 45, 7)


def test_rows_without_a_sum_give_zeros_and_faint_ones_no_gradient():
    inputs = draw(1, 1, 1, 6, 3, 2, ("relu", "relu"))
    query, key, _ = inputs
    with torch.no_grad():
        query[..., :2, :], key[..., 0, :] = -1.0, 1.0
        query[..., 2, :] = 1e-200  # its sum is above the least number, and its square is not
    found = causal_average(*inputs, row_map="relu", col_map="relu", chunk=4)
    assert torch.equal(found[..., :2, :], torch.zeros(1, 1, 2, 2, dtype=torch.float64))
    assert (found[..., 2, :] != 0).all()
    grads = torch.autograd.grad(found.sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][..., :3, :] == 0).all()
    assert (grads[0][..., 3:, :] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients_without_a_sum_are_zero_and_faint_ones_have_no_gradient(dtype):
    """Between the least number and its root a row keeps its value; a gradient would overflow."""
    least = torch.finfo(dtype).tiny
    total = torch.tensor([0.0, least * 10, least**0.5 / 2, 0.5], dtype=dtype)[:, None]
    numerator = (total * torch.tensor([1.0, 3.0], dtype=dtype)).requires_grad_()
    total.requires_grad_()
    found = finish(numerator, total, 8, LinearForm(FeatureMap()), make_masks(1, 1, 4, 4))
    expected = torch.tensor([[0.0, 0.0], [1.0, 3.0], [1.0, 3.0], [1.0, 3.0]], dtype=dtype)
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(found.sum(), (numerator, total))
    live = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=dtype)[:, None]
    assert torch.equal(grads[0], 2.0 * live.expand(4, 2))
    assert torch.equal(grads[1], -8.0 * live)


def test_there_is_no_second_derivative():
    inputs = draw(1, 1, 1, 6, 3, 2, ("elu", "elu"))
    found = causal_average(*inputs, row_map="elu", col_map="elu")
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(found.sum(), inputs, create_graph=True)
