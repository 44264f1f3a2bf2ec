"""The polynomial kernel against loops, its backends, its cache and its limits."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.analysis.approximation.measure import (
    Witnesses,
    observed,
    score,
    score_approximated,
)
from lit_probattn.analysis.approximation.methods import RandomFeatures
from lit_probattn.attention import HeadCall, HeadLayout, PolynomialAttention
from lit_probattn.attention.masks import make_masks
from lit_probattn.attention.polynomial import PolynomialCore, polynomial_scores
from lit_probattn.base.errors import UnsupportedError
from tests.analysis.approximation.test_swap import KINDS, LENGTH, batches, language_model, layers_of
from tests.attention.mgk.oracles import combine
from tests.support.helpers import (
    largest_difference,
    run_with_gradients,
    skip_without_library,
    use_oracle,
)

B, N, C, E, H = 2, 13, 11, 5, 3


def oracle(query, key, value, *, masks, dropout, degree):
    """The kernel as products of differences: (Σ_e q_e k_e)^degree, entry by entry."""
    groups = query.shape[1] // key.shape[1]
    density = torch.zeros(*query.shape[:3], key.shape[2], dtype=query.dtype)
    for h in range(query.shape[1]):
        product = (query[:, h, :, None] * key[:, h // groups, None]).sum(-1)
        density[:, h] = product**degree
    return combine(density, value, masks, dropout)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "native"])
@pytest.mark.parametrize("masks", ["none", "causal", "key", "pairs"])
@pytest.mark.parametrize("degree", [2, 4])
def test_layer_equals_the_sums(backend, masks, degree):
    def layer():
        torch.manual_seed(3)
        return PolynomialAttention(C, H, head_dim=E, degree=degree).double()

    skip_without_library(backend)
    ours, theirs = layer(), layer()
    ours.backend = backend
    use_oracle(theirs, oracle)
    x = torch.randn(B, N, C, dtype=torch.float64)
    call = {"is_causal": masks == "causal"}
    if masks == "key":
        call["key_mask"] = torch.rand(B, N) > 0.3
    if masks == "pairs":
        call["attn_mask"] = torch.rand(N, N) > 0.5
    found = run_with_gradients(ours, [x], lambda t: ours(t[0], **call))
    expected = run_with_gradients(theirs, [x], lambda t: theirs(t[0], **call))
    out, grad = largest_difference(found, expected)
    assert out < 1e-9  # the floor of 1e-12 beside squares of order 1e-3 and more
    assert grad < 1e-6


def test_rows_without_products_are_uniform():
    query, key = torch.zeros(1, 1, 2, E), torch.randn(1, 1, N, E)
    weights = polynomial_scores(query, key, degree=2).softmax(-1)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / N))


def test_a_temperature_cancels_and_high_degrees_pick_the_largest_product():
    query, key = torch.randn(1, 1, 3, E).double(), torch.randn(1, 1, N, E).double()
    weights = polynomial_scores(query, key, degree=2).softmax(-1)
    scaled = polynomial_scores(7 * query, key, degree=2).softmax(-1)
    torch.testing.assert_close(weights, scaled, atol=1e-9, rtol=0)
    sharp = polynomial_scores(query, key, degree=400).softmax(-1)
    largest = (query @ key.mT).abs().argmax(-1)
    assert torch.equal(sharp.argmax(-1), largest)
    assert float(sharp.amax(-1).min()) > 0.9


@pytest.mark.parametrize("bad", [float("nan"), 1e25])
def test_products_that_are_not_finite_give_nan_in_the_library_too(bad):
    skip_without_library("native")
    layer = PolynomialAttention(C, H, head_dim=E)
    query, key, value = (torch.randn(1, H, N, E) for _ in range(3))
    query[0, 1, 4] = bad
    found = {}
    for backend in ("reference", "native"):
        layer.core.backend = backend
        found[backend] = layer.core(HeadCall(query, key, value, make_masks(1, H, N, N)))
    expected = torch.zeros(1, H, N, E, dtype=torch.bool)
    expected[0, 1, 4] = True
    assert torch.equal(found["reference"].isnan(), expected)
    assert torch.equal(found["native"].isnan(), expected)


@pytest.mark.parametrize("degree", [0, 1, 3])
def test_odd_degrees_are_refused(degree):
    with pytest.raises(ValueError, match=f"degree must be even and at least 2.*received {degree}"):
        PolynomialAttention(C, H, head_dim=E, degree=degree)


def test_any_scale_cancels():
    core = PolynomialCore(HeadLayout(H, H, H, H, E, 4))
    query, key = (torch.randn(B, H, n, E, dtype=torch.float64) for n in (7, N))
    value, masks = torch.randn(B, H, N, 4, dtype=torch.float64), make_masks(B, H, 7, N)
    found = core(HeadCall(query, key, value, masks, scale=0.2))
    expected = core(HeadCall(query, key, value, masks))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# ---- inside a model: what studies of approximation say of it ----------------------------------


def model():
    return language_model(
        lambda c, head_dim, **o: PolynomialAttention(c, H, head_dim=head_dim, **o)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_all_keys_give_exact_attention(kind):
    task = model()
    exact = score(task, batches(padded=True))
    found = score_approximated(task, batches(padded=True), layers_of(task), kind(LENGTH))
    assert found.value == pytest.approx(exact.value, rel=1e-5)


def test_outputs_of_a_model_have_witnesses():
    task = model()
    found = observed(Witnesses(), task, batches(), layers_of(task))
    assert found.most_keys <= found.limit == E + 1
    assert found.largest_error < 1e-12


def test_hashing_and_features_need_the_exponential_kernel():
    task = model()
    with pytest.raises(UnsupportedError, match="remove lsh and orf"):
        score_approximated(task, batches(1), layers_of(task), RandomFeatures(8, "performer", 0))
