"""Random features of the exponential kernel against their expectation."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from lit_probattn.analysis.approximation.random_features import (
    draw_rows,
    log_features,
    random_feature_weights,
)
from tests.analysis.approximation.inputs import E, N, generator, tensors

SQUARED_SUM = 2.32  # ‖q + k‖² in the space divided by E^¼; estimates depend on it alone


NUM_ROWS = 64_000  # in each sample of estimates


def pair():
    """A query and a key with ‖q‖ = 1.65, ‖k‖ = 1.17, E = 16."""
    size = 16
    query, key = torch.zeros(2, size, dtype=torch.float64)
    query[0] = 1.65
    key[0] = (SQUARED_SUM - 1.65**2 - 1.17**2) / (2 * 1.65)
    key[1] = (1.17**2 - key[0] ** 2).sqrt()
    basis = draw_rows(size, size, "performer", generator(2))
    basis = basis / basis.norm(dim=-1, keepdim=True)
    return tuple(x @ basis * size**0.25 for x in (query, key))


def estimate_ratio(query, key, rows):
    """Return (mean of the estimates over features) / exp(q · k / √E) for pairs (…, E); (…)."""
    exponents = log_features(query, rows) + log_features(key, rows)
    exact = (query * key).sum(-1, keepdim=True) * query.shape[-1] ** -0.5
    return (exponents - exact).exp().mean(-1)


@functools.cache
def estimates(rows):
    """Estimate / truth of each row; groups of 16 are drawn independently of each other."""
    return estimate_ratio(*pair(), draw_rows(NUM_ROWS, 16, rows, generator(9))[:, None])


def ratio(rows, num_features):
    """Mean and standard error of estimate / truth with so many features."""
    return mean_and_error(estimates(rows).view(-1, num_features).mean(-1))


def mean_and_error(found):
    return float(found.mean()), float(found.std() / math.sqrt(len(found)))


def mean_over_directions(length):
    """E exp(length · u · (q + k)) / exp(‖q + k‖² / 2), u uniform: a hypergeometric series."""
    z, total, term = length**2 * SQUARED_SUM / 4, 1.0, 1.0
    for n in range(60):
        term *= z / ((8 + n) * (n + 1))
        total += term
    return total * math.exp(-SQUARED_SUM / 2)


@pytest.mark.parametrize("num_features", [16, 64])
def test_corrected_features_are_unbiased(num_features):
    mean, error = ratio("performer", num_features)
    assert abs(mean - 1.0) < 4 * error
    assert error < 0.015


@pytest.mark.parametrize(("num_features", "expected"), [(16, 0.337), (64, 0.319)])
def test_features_as_worded_are_biased_as_computed(num_features, expected):
    """A third of the truth, and hardly any spread: 3.1 % of the truth at F = 16, 0.7 % at 64."""
    draw = generator(9)  # whose rows depend on each other, so each estimate has its own
    drawn = torch.stack([draw_rows(num_features, 16, "literal", draw) for _ in range(1000)])
    mean, error = mean_and_error(estimate_ratio(*pair(), drawn))
    assert mean == pytest.approx(expected, abs=0.0015)
    spread = error * math.sqrt(1000)
    assert spread == pytest.approx(0.031 if num_features == 16 else 0.007, abs=0.0005)
    if num_features == 16:
        assert mean == pytest.approx(mean_over_directions(1.0), abs=5 * error)


def test_without_the_signs_of_qr_the_estimate_is_biased():
    mean, error = ratio("bare_qr", 16)
    assert mean - 1.0 > 4 * error
    assert mean < 1.2


def test_rows_of_length_sqrt_d_are_slightly_biased_and_steadier():
    mean, error = ratio("sqrt_d", 16)
    _, spread = ratio("performer", 16)
    assert error < spread
    assert mean == pytest.approx(mean_over_directions(4.0), abs=5 * error)
    assert mean == pytest.approx(0.935, abs=0.01)


@pytest.mark.parametrize("rows", ["performer", "sqrt_d", "bare_qr"])
def test_rows_are_orthogonal_in_groups(rows):
    drawn = draw_rows(11, 4, rows, generator())
    for start in (0, 4, 8):
        block = drawn[start : start + 4]
        gram = block @ block.mT
        assert float((gram - gram.diagonal().diag()).abs().max()) < 1e-12
    literal = draw_rows(11, 4, "literal", generator())
    torch.testing.assert_close(literal.mT @ literal, torch.eye(4, dtype=torch.float64))


def test_stabilisation_changes_nothing():
    query, key, _ = (x[:, None] for x in tensors())
    rows = draw_rows(13, E, "performer", generator())
    products = log_features(query, rows).exp() @ log_features(key, rows).exp().mT
    allowed = torch.ones(N, N).tril().bool()
    for mask in (None, allowed):
        kept = products if mask is None else products * mask
        found = random_feature_weights(query, key, rows, allowed=mask)
        torch.testing.assert_close(found, kept / kept.sum(-1, keepdim=True), atol=1e-13, rtol=0)


def test_many_features_approach_the_weights():
    query, key, _ = (0.5 * x[:, None] for x in tensors())
    goal = (query @ key.mT / E**0.5).softmax(-1)
    few, many = (
        (
            random_feature_weights(query, key, draw_rows(f, E, "performer", generator())) - goal
        ).norm()
        for f in (16, 4096)
    )
    assert float(many) < 0.2 * float(few)


def test_rows_are_checked():
    with pytest.raises(ValueError, match="rows must be one of performer"):
        draw_rows(4, 4, "other", generator())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sizes must be at least 1"):
        draw_rows(0, 4, "iid", generator())
