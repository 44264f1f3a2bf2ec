"""Kernels and their weights against loops over pairs; how concentrated their weights are."""

from __future__ import annotations

import math

import pytest
import torch

from lit_probattn.analysis.approximation.measure import top_mass
from lit_probattn.analysis.head_size.ranks import effective_count
from tests.analysis.approximation.inputs import E, G, tensors
from tests.support.value_aware import kernel_weights


@pytest.mark.parametrize("kernel", ["exp", "poly", "elu"])
def test_kernel_weights_by_loops(kernel):
    query, key, _ = (x[:, None, :6] for x in tensors())
    allowed = torch.ones(6, 6).tril().bool()

    def one(q, k):
        if kernel == "exp":
            return math.exp(float(q @ k) / E**0.5)
        if kernel == "poly":
            return float(q @ k) ** 2
        features = [torch.where(x > 0, x + 1, x.exp()) for x in (q, k)]
        return float(features[0] @ features[1])

    found = kernel_weights(query, key, kernel, allowed=allowed)
    for g in range(G):
        for i in range(6):
            row = [one(query[g, 0, i], key[g, 0, j]) for j in range(i + 1)]
            for j in range(i + 1):
                assert float(found[g, 0, i, j]) == pytest.approx(row[j] / sum(row), abs=1e-9)
            assert float(found[g, 0, i, i + 1 :].abs().sum()) == 0.0


def test_skew_of_the_kernels_on_normal_vectors():
    """exp(entropy) of 512 keys of size 64: 310 for exp, 247 for the square, 509 for elu.

    By theory, 512 exp(−E[w log w]) of a weight w of mean 1: log-normal with σ² near 1, and χ² of
    one degree of freedom, where E[w log w] = ψ(3/2) + log 2.
    """
    draw = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 1, 512, 64, generator=draw) for _ in range(2))
    for kernel, support, mass in (("exp", 310, 0.441), ("poly", 247, 0.501), ("elu", 509, 0.147)):
        weights = kernel_weights(query, key, kernel)
        assert float(effective_count(weights).mean()) == pytest.approx(support, abs=0.5)
        assert float(top_mass(weights, 64).mean()) == pytest.approx(mass, abs=0.0005)
    assert 512 * math.exp(-0.5) == pytest.approx(310, rel=0.01)
    digamma = float(torch.digamma(torch.tensor(1.5)))
    assert 512 * math.exp(-digamma - math.log(2)) == pytest.approx(247, rel=0.01)
    steep = kernel_weights(query, key, "poly", degree=4)
    assert float(effective_count(steep).mean()) == pytest.approx(97, abs=0.5)
