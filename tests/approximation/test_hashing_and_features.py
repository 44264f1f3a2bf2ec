"""LSH against its counting definition, random features against their expectation, kernels.

Over 300 lines: each oracle stands beside what it holds.
"""

from __future__ import annotations

import math

import pytest
import torch

from lit_probattn.approximation.kernels import (
    effective_support,
    kernel_weights,
    square_features,
    top_mass,
)
from lit_probattn.approximation.lsh import hash_round, lsh_attention
from lit_probattn.approximation.random_features import (
    draw_rows,
    estimate_ratio,
    log_features,
    random_feature_weights,
)

G, N, E = 2, 37, 7


def tensors(length=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (G, length, E)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def exact(query, key, value, allowed=None):
    scores = query @ key.mT * E**-0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ value


# ---- LSH ---------------------------------------------------------------------------------------


def counted(query, key, value, num_kept, num_rounds, duplicates, wrap, allowed=None):
    """The definition: how often each pair is found, as a matrix; lengths without a rest."""
    length, chunk = query.shape[1], num_kept // 2
    draws, times = generator(), torch.zeros(G, length, length)
    for _ in range(num_rounds):
        directions = torch.randn(length // chunk, E, generator=draws, dtype=torch.float64)
        for g in range(G):

            def chunks(x, directions=directions):
                places = []
                for i in range(length):
                    p = directions @ x[i]
                    places.append((int(torch.cat([-p, p]).argmax()), i))
                order = [i for _, i in sorted(places)]
                return [order[c : c + chunk] for c in range(0, length, chunk)]

            queries, keys = chunks(query[g]), chunks(key[g])
            for c, rows in enumerate(queries):
                cols = list(keys[c])
                if len(keys) > 1 and (c or wrap):
                    cols += keys[c - 1]
                for i in rows:
                    for j in cols:
                        times[g, i, j] += 1
    if duplicates == "union":
        times = times.clamp_max(1)
    if allowed is not None:
        times = times * allowed
    weights = times.double() * (query @ key.mT * E**-0.5).exp()
    total = weights.sum(-1, keepdim=True)
    own = torch.eye(length, dtype=torch.float64).expand_as(weights)
    return torch.where(total > 0, weights / total.clamp_min(1e-300), own) @ value


@pytest.mark.parametrize("duplicates", ["count", "union"])
@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize(("num_kept", "num_rounds"), [(12, 1), (12, 3), (8, 4), (72, 2)])
def test_lsh_by_its_definition(duplicates, wrap, num_kept, num_rounds):
    query, key, value = tensors(36)
    if num_kept == 8:
        query, key, value = query[:, :24], key[:, :24], value[:, :24]
    found = lsh_attention(
        *(query, key, value),
        num_kept=num_kept,
        num_rounds=num_rounds,
        generator=generator(),
        duplicates=duplicates,
        wrap=wrap,
    )
    expected = counted(query, key, value, num_kept, num_rounds, duplicates, wrap)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_lsh_with_masks():
    query, key, value = tensors(36)
    allowed = torch.ones(36, 36).tril().bool().expand(G, -1, -1)
    found = lsh_attention(
        query, key, value, num_kept=12, num_rounds=2, generator=generator(), allowed=allowed
    )
    expected = counted(query, key, value, 12, 2, "count", True, allowed)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("length", [37, 40, 64])
def test_full_recall_without_duplicates_is_exact_attention(length):
    query, key, value = tensors(length)
    options = {"num_kept": 2 * length, "num_rounds": 3, "duplicates": "union"}
    found = lsh_attention(query, key, value, generator=generator(), **options)
    torch.testing.assert_close(found, exact(query, key, value), atol=1e-12, rtol=0)
    if length != 37:
        return
    many = lsh_attention(
        *(query, key, value),
        num_kept=24,
        num_rounds=60,
        duplicates="union",
        generator=generator(),
    )
    torch.testing.assert_close(many, exact(query, key, value), atol=1e-9, rtol=0)


def test_counting_pairs_twice_does_not_converge():
    query, key, value = tensors(64)
    goal = exact(query, key, value)

    def error(duplicates, rounds):
        found = lsh_attention(
            *(query, key, value),
            num_kept=16,
            num_rounds=rounds,
            duplicates=duplicates,
            generator=generator(),
        )
        return float((found - goal).norm() / goal.norm())

    assert error("union", 64) < 0.02
    assert error("count", 64) > 0.15
    assert error("union", 1) == pytest.approx(error("count", 1), abs=1e-12)


def test_every_query_sees_two_chunks_of_distinct_keys():
    query, key, _ = tensors(36)
    directions = torch.randn(6, E, generator=generator(), dtype=torch.float64)
    found = hash_round(query, key, directions, 6)
    both = torch.cat([found.key_order.roll(1, 1), found.key_order], -1)
    assert both.shape == (G, 6, 12)
    assert all(len(set(row.tolist())) == 12 for row in both.flatten(0, 1))
    scaled = hash_round(3 * query, key, directions, 6)
    assert torch.equal(found.query_order, scaled.query_order)


@pytest.mark.parametrize(("num_kept", "num_rounds"), [(3, 1), (0, 1), (4, 0)])
def test_lsh_sizes_are_checked(num_kept, num_rounds):
    with pytest.raises(ValueError, match="expected an even num_kept of at least 2"):
        lsh_attention(*tensors(), num_kept=num_kept, num_rounds=num_rounds, generator=generator())


# ---- random features ---------------------------------------------------------------------------


SQUARED_SUM = 2.32  # ‖q + k‖² in the space divided by E^¼; estimates depend on it alone


def ratio(rows, num_features, draws=3000):
    """Mean and standard error of estimate / truth at ‖q‖ = 1.65, ‖k‖ = 1.17, E = 16."""
    size = 16
    query, key = torch.zeros(2, size, dtype=torch.float64)
    query[0] = 1.65
    key[0] = (SQUARED_SUM - 1.65**2 - 1.17**2) / (2 * 1.65)
    key[1] = (1.17**2 - key[0] ** 2).sqrt()
    basis = draw_rows(size, size, "performer", generator(2))
    basis = basis / basis.norm(dim=-1, keepdim=True)
    query, key = (x @ basis * size**0.25 for x in (query, key))
    draw = generator(9)
    found = torch.stack(
        [
            estimate_ratio(query, key, draw_rows(num_features, size, rows, draw))
            for _ in range(draws)
        ]
    )
    return float(found.mean()), float(found.std() / math.sqrt(draws))


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
    """A third of the truth, and hardly any spread: 3 % of the truth at F = 16, 0.8 % at 64."""
    mean, error = ratio("literal", num_features, draws=1000)
    assert mean == pytest.approx(expected, abs=0.0015)
    spread = error * math.sqrt(1000)
    assert spread == pytest.approx(0.03 if num_features == 16 else 0.008, rel=0.12)
    if num_features == 16:
        assert mean == pytest.approx(mean_over_directions(1.0), abs=5 * error)


def test_without_the_signs_of_qr_the_estimate_is_biased():
    mean, error = ratio("bare_qr", 16, draws=4000)
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
    shifted = random_feature_weights(query, key, rows, feature_eps=1e-1)
    assert float((shifted - random_feature_weights(query, key, rows)).abs().max()) > 1e-3


def test_many_features_approach_the_weights():
    query, key, _ = (0.5 * x[:, None] for x in tensors())
    goal = kernel_weights(query, key, "exp")
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


# ---- kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [True, False])
def test_features_of_the_square(compact):
    query, key, _ = tensors()
    found = square_features(query, compact) @ square_features(key, compact).mT
    assert square_features(query, compact).shape[-1] == (E * (E + 1) // 2 if compact else E * E)
    torch.testing.assert_close(found, (query @ key.mT) ** 2, atol=1e-13, rtol=0)


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
    """exp(entropy) of 512 keys of size 64: 316 for exp, 247 for the square, 509 for elu."""
    draw = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 1, 512, 64, generator=draw) for _ in range(2))
    for kernel, support, mass in (("exp", 316, 0.43), ("poly", 247, 0.50), ("elu", 509, 0.15)):
        weights = kernel_weights(query, key, kernel)
        assert float(effective_support(weights).mean()) == pytest.approx(support, rel=0.03)
        assert float(top_mass(weights, 64).mean()) == pytest.approx(mass, abs=0.012)
    steep = kernel_weights(query, key, "poly", degree=4)
    assert float(effective_support(steep).mean()) == pytest.approx(97, rel=0.05)
