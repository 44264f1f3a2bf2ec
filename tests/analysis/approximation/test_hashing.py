"""LSH attention against its counting definition and against exact attention."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.analysis.approximation.lsh import hash_round, lsh_attention
from tests.analysis.approximation.inputs import E, G, generator, tensors


def exact(query, key, value, allowed=None):
    scores = query @ key.mT * E**-0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ value


def counted(query, key, value, num_kept, num_rounds, duplicates, allowed=None):
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
                if len(keys) > 1:
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
@pytest.mark.parametrize(("num_kept", "num_rounds"), [(12, 1), (12, 3), (8, 4), (36, 2), (72, 2)])
def test_lsh_by_its_definition(num_kept, num_rounds, duplicates):
    query, key, value = tensors(36)
    if num_kept == 8:
        query, key, value = query[:, :24], key[:, :24], value[:, :24]
    found = lsh_attention(
        *(query, key, value),
        num_kept=num_kept,
        num_rounds=num_rounds,
        generator=generator(),
        duplicates=duplicates,
    )
    expected = counted(query, key, value, num_kept, num_rounds, duplicates)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_lsh_with_masks():
    query, key, value = tensors(36)
    allowed = torch.ones(36, 36).tril().bool().expand(G, -1, -1)
    found = lsh_attention(
        query, key, value, num_kept=12, num_rounds=2, generator=generator(), allowed=allowed
    )
    expected = counted(query, key, value, 12, 2, "count", allowed)
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

    assert error("union", 32) < 0.02
    assert error("count", 32) > 0.15
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
