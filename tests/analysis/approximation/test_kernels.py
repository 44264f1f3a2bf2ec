"""How concentrated the weights of kernels are."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import elu

from lit_probattn.analysis.approximation.measure import top_mass
from lit_probattn.analysis.head_size.ranks import effective_count


def test_skew_of_the_kernels_on_normal_vectors():
    """exp(entropy) of 512 keys of size 64: 310 for exp, 247 for the square, 509 for elu.

    By theory, 512 exp(−E[w log w]) of a weight w of mean 1: log-normal with σ² near 1, and χ² of
    one degree of freedom, where E[w log w] = ψ(3/2) + log 2.
    """
    draw = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 1, 512, 64, generator=draw) for _ in range(2))
    products = query @ key.mT
    features = (elu(query) + 1) @ (elu(key) + 1).mT
    for kernel, support, mass in (
        ((products / 8).exp(), 310, 0.441),
        (products**2, 247, 0.501),
        (features, 509, 0.147),
    ):
        weights = kernel / kernel.sum(-1, keepdim=True)
        assert float(effective_count(weights).mean()) == pytest.approx(support, abs=0.5)
        assert float(top_mass(weights, 64).mean()) == pytest.approx(mass, abs=0.0005)
    assert 512 * math.exp(-0.5) == pytest.approx(310, rel=0.01)
    digamma = float(torch.digamma(torch.tensor(1.5)))
    assert 512 * math.exp(-digamma - math.log(2)) == pytest.approx(247, rel=0.01)
    steep = products**4
    steep = steep / steep.sum(-1, keepdim=True)
    assert float(effective_count(steep).mean()) == pytest.approx(97, abs=0.5)
