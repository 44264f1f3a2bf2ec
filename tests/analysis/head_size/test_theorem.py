"""Theorem 1 and what goes beyond it: constructions, exact thresholds, the counter-example."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.analysis.head_size.fitting import fit_head, random_map
from lit_probattn.analysis.head_size.theorem import (
    attention_map,
    counter_example,
    least_head_size,
    least_head_size_causal,
    left_inverse,
    permutation_by_circle,
    representing_weights,
    tolerance,
    unreachable,
)
from lit_probattn.analysis.head_size.theory import (
    conditioned_inputs,
    construction_table,
    divergence_table,
    threshold_table,
)


def softmax_by_hand(query_weight, key_weight, inputs):
    """Column i: exp of k_j · q_i / √s over all j, divided by their sum; by loops."""
    length, size = inputs.shape[1], query_weight.shape[0]
    found = torch.zeros(length, length, dtype=torch.float64)
    for i in range(length):
        q = query_weight @ inputs[:, i]
        row = torch.stack([(key_weight @ inputs[:, j]) @ q / size**0.5 for j in range(length)])
        found[:, i] = (row - row.max()).exp() / (row - row.max()).exp().sum()
    return found


@pytest.mark.parametrize("length", [2, 7, 16, 33, 64])
@pytest.mark.parametrize("condition", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("options", [{}, {"balanced": True}, {"column_factor": True}])
def test_construction(length, condition, options):
    inputs = conditioned_inputs(length + 5, length, condition, seed=length)
    assert float(torch.linalg.cond(inputs)) == pytest.approx(condition, rel=1e-9)
    weights = random_map(length, seed=3)
    if options.get("column_factor"):
        options = {"column_factor": torch.rand(length, dtype=torch.float64) + 0.1}
    query, key = representing_weights(inputs, weights, length + 3, **options)
    assert query.shape == key.shape == (length + 3, length + 5)
    error = float((attention_map(query, key, inputs) - weights).abs().max())
    assert error <= min(1e-10, tolerance(inputs, weights))


def test_the_map_is_the_papers_formula():
    inputs = conditioned_inputs(9, 6, 5.0, seed=1)
    weights = random_map(6, seed=2)
    query, key = representing_weights(inputs, weights, 6)
    expected = softmax_by_hand(query, key, inputs)
    torch.testing.assert_close(attention_map(query, key, inputs), expected, atol=1e-13, rtol=0)
    torch.testing.assert_close(expected, weights, atol=1e-12, rtol=0)


def test_balanced_factors_are_smaller():
    inputs, weights = conditioned_inputs(40, 32, 3.0, seed=1), random_map(32, seed=2)
    plain = representing_weights(inputs, weights, 32)
    even = representing_weights(inputs, weights, 32, balanced=True)
    assert sum(float(w.norm() ** 2) for w in even) < 0.7 * sum(float(w.norm() ** 2) for w in plain)


def test_the_normal_equations_would_lose_digits():
    inputs, weights = conditioned_inputs(64, 32, 1e6, seed=1), random_map(32, seed=2)
    query, key = representing_weights(inputs, weights, 32)
    error = float((attention_map(query, key, inputs) - weights).abs().max())
    squared = torch.linalg.solve(inputs.mT @ inputs, inputs.mT)
    exact_product = query @ inputs
    worse = attention_map(exact_product @ squared, key @ inputs @ squared, inputs)
    assert error < 1e-7
    assert float((worse - weights).abs().max()) > 100 * error


@pytest.mark.parametrize("length", [3, 8, 21, 64])
def test_one_less_is_enough_and_two_less_is_not(length):
    inputs, weights = conditioned_inputs(length + 2, length, 10.0, seed=4), random_map(length, 5)
    assert least_head_size(weights) == length - 1

    def error(size):
        query, key = representing_weights(inputs, weights, size)
        return float((attention_map(query, key, inputs) - weights).abs().max())

    assert error(length - 1) < 1e-10
    assert error(max(1, length - 2)) > 1e-4


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_least_size_of_a_map_made_by_a_small_head(rank):
    generator = torch.Generator().manual_seed(rank)
    factors = torch.randn(2, rank, 12, generator=generator, dtype=torch.float64)
    weights = torch.softmax(factors[0].mT @ factors[1], 0)
    assert least_head_size(weights) == rank
    query, key = representing_weights(conditioned_inputs(14, 12, 3.0, 1), weights, rank)
    found = attention_map(query, key, conditioned_inputs(14, 12, 3.0, 1))
    torch.testing.assert_close(found, weights, atol=1e-11, rtol=0)


@pytest.mark.parametrize("length", [2, 5, 6, 10, 11, 24])
def test_causal_threshold_is_half(length):
    weights = random_map(length, seed=length, is_causal=True).mT  # row form
    assert least_head_size_causal(weights) == length // 2


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_causal_threshold_of_small_heads(rank):
    generator = torch.Generator().manual_seed(rank)
    factors = torch.randn(2, 13, rank, generator=generator, dtype=torch.float64)
    logits = factors[0] @ factors[1].mT
    later = torch.ones(13, 13, dtype=torch.bool).triu(1)
    weights = torch.softmax(logits.masked_fill(later, float("-inf")), -1)
    assert least_head_size_causal(weights) == rank


@pytest.mark.slow
def test_fits_confirm_the_thresholds():
    """Nothing is left from n − 1 and ⌊n / 2⌋ on, 1e-5 and more one below; fits beat truncation."""
    for is_causal, size in ((False, 7), (True, 4)):
        for seed in (0, 3):
            weights = random_map(8, seed=seed, is_causal=is_causal)
            at = fit_head(weights, size, is_causal=is_causal, steps=400)[1]
            truncated, below = fit_head(weights, size - 1, is_causal=is_causal, steps=400)
            assert at < 1e-9
            assert below > 1e-5
            assert below < 0.5 * truncated


def test_counter_example_fails_as_proved():
    inputs, weights, column = counter_example()
    one = torch.ones(1, 1, dtype=torch.float64)
    errors = []
    for w in torch.linspace(-40, 40, 801, dtype=torch.float64):
        found = attention_map(w * one, one, inputs)
        torch.testing.assert_close(found[:, 1], column, atol=0, rtol=0)
        errors.append(float((found - weights).abs().max()))
    assert min(errors) == pytest.approx(0.25, abs=1e-12)
    assert unreachable(inputs, weights) == pytest.approx(0.7768, abs=1e-3)
    with pytest.raises(ValueError, match=r"width 1 and length 2 have no left inverse"):
        left_inverse(inputs)


def test_certificate_separates_reachable_from_random_maps():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(6, 10, generator=generator, dtype=torch.float64)
    own = torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
    assert unreachable(inputs, attention_map(*own, inputs)) < 1e-12
    assert unreachable(inputs, random_map(10, seed=1)) > 1.0
    assert unreachable(conditioned_inputs(12, 10, 3.0, 1), random_map(10, seed=1)) == 0.0


def test_two_dimensions_are_enough_for_any_arg_max():
    permutation = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    soft = permutation_by_circle(permutation, 4000.0)
    assert torch.equal(soft.argmax(0), permutation)
    assert float(soft.amax(0).min()) > 0.9999999
    assert torch.equal(permutation_by_circle(permutation, 1.0).argmax(0), permutation)


def test_refusals():
    weights = random_map(4, seed=1)
    inputs = conditioned_inputs(5, 4, 2.0, seed=1)
    with pytest.raises(ValueError, match="positive with columns that sum to one"):
        representing_weights(inputs, weights.mT, 4)
    with pytest.raises(ValueError, match="column_factor needs head_size ≥ 4, received 3"):
        representing_weights(inputs, weights, 3, column_factor=torch.ones(4))
    with pytest.raises(ValueError, match="columns of the inputs are linearly dependent"):
        left_inverse(torch.ones(5, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="at least 1e-30"):
        least_head_size(torch.eye(4))


def test_tables():
    construction = construction_table(lengths=(4, 17), conditions=(1.0, 100.0))
    for column in ("error, size n", "balanced", "error, size n - 1"):
        assert (construction[column] < 1e-10).all()
        assert (construction[column] < construction["allowed"]).all()
    assert (construction["error, size n - 2"] > 1e-4).all()
    thresholds = threshold_table((6, 11))
    assert (thresholds["bidirectional"] == thresholds["n - 1"]).all()
    assert (thresholds["causal"] == thresholds["floor(n / 2)"]).all()
    table = divergence_table(lengths=(5,), num_maps=1, steps=20)
    at = table[table["head_size"] == table["limit"]]
    assert (at["fitted_kl"] < 1e-6).all()
