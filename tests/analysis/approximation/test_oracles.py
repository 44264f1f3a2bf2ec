"""Value-aware approximations: identities, exact outputs from few keys, every set of keys."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from lit_probattn.analysis.approximation.greedy import (
    Problem,
    first_support,
    grow,
    heaviest_support,
    value_aware,
)
from lit_probattn.analysis.approximation.oracles import (
    by_norm,
    nearest_value,
    sliding_window,
    value_oblivious,
    window_mask,
)
from lit_probattn.analysis.approximation.simplex import Support, reoptimise
from lit_probattn.analysis.approximation.witness import eliminate

EXAMPLE = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
ALPHA = torch.tensor([0.25, 0.35, 0.4], dtype=torch.float64)


def draw(seed: int, num_queries: int, num_keys: int, size: int, skew: float = 1.5, groups: int = 1):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(groups, num_keys, size, generator=generator, dtype=torch.float64)
    scores = torch.randn(groups, num_queries, num_keys, generator=generator, dtype=torch.float64)
    return value, (skew * scores).softmax(-1)


def causal(num_queries: int) -> torch.Tensor:
    return torch.ones(num_queries, num_queries).tril().bool()


def test_worked_example():
    """Squared distances 2.4925, 3.1925, 3.7925; opposite orders of the two oracles."""
    output = ALPHA @ EXAMPLE
    distances = (EXAMPLE - output).square().sum(-1)
    torch.testing.assert_close(
        distances, torch.tensor([2.4925, 3.1925, 3.7925], dtype=torch.float64)
    )
    assert int(nearest_value(EXAMPLE, output[None])) == 0
    assert int(value_oblivious(ALPHA[None], 1).argmax()) == 2
    assert int(by_norm(ALPHA[None], EXAMPLE, 1).argmax()) == 2
    scores = EXAMPLE.square().sum(-1) * (0.5 - ALPHA)  # Eq. (3) for orthogonal values
    torch.testing.assert_close(scores, torch.tensor([0.25, 0.6, 0.9], dtype=torch.float64))
    torch.testing.assert_close(scores, (distances - output @ output) / 2)


def test_the_example_is_a_wrong_ranking_not_an_unbounded_ratio():
    for size, expected in ((10.0, 2.1435), (100.0, 2.2489), (1e6, 2.25)):
        value = torch.diag(torch.tensor([1.0, 2.0, size], dtype=torch.float64))
        output = ALPHA @ value
        squares = (value - output).square().sum(-1)
        ratio = squares[2] / squares[int(nearest_value(value, output[None]))]
        assert float(ratio) == pytest.approx(expected, abs=6e-5)


def test_nearest_value_equals_brute_force():
    value, weights = draw(1, 17, 23, 5)
    output = weights @ value
    brute = (value[:, None] - output[:, :, None]).norm(dim=-1)
    allowed = torch.rand(17, 23) > 0.5
    assert torch.equal(nearest_value(value, output), brute.argmin(-1))
    hidden = brute.masked_fill(~allowed, float("inf")).argmin(-1)
    assert torch.equal(nearest_value(value, output, allowed), hidden)


def test_top_r_takes_the_lower_index_of_equal_weights_and_all_where_there_are_fewer():
    weights = torch.tensor([[0.2, 0.3, 0.3, 0.2], [0.5, 0.5, 0.0, 0.0]])
    allowed = torch.tensor([[True] * 4, [True, True, False, False]])
    kept = value_oblivious(weights, 3, allowed)
    torch.testing.assert_close(kept[0], torch.tensor([0.25, 0.375, 0.375, 0.0]))
    torch.testing.assert_close(kept[1], weights[1])
    torch.testing.assert_close(value_oblivious(weights, 4, allowed), weights)


def test_error_of_top_r_is_not_monotone():
    """Of draws of 20 keys of size 8, about 4 in 5 have a larger error for some r + 1."""
    value, weights = draw(5, 1, 20, 8, skew=1.0, groups=200)
    output = weights @ value
    errors = torch.stack(
        [(value_oblivious(weights, r) @ value - output).norm(dim=-1) for r in range(1, 21)]
    )
    grows = (errors[1:] > errors[:-1] + 1e-12).any(0)
    assert 0.6 < float(grows.double().mean()) < 0.95


@pytest.mark.parametrize("skew", [1.0, 3.0, 6.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_elimination_keeps_the_output_with_few_keys(skew, dtype, tolerance):
    value, weights = draw(11, 24, 128, 16, skew)
    value, weights = value[0].to(dtype), weights[0].to(dtype)
    output, beta = weights @ value, eliminate(value, weights)
    error = (beta @ value - output).norm(dim=-1) / output.norm(dim=-1)
    assert float(error.max()) < tolerance
    assert int((beta > 0).sum(-1).max()) <= 17
    assert float((beta.sum(-1) - 1).abs().max()) < 10 * tolerance
    assert float(beta.min()) >= 0


def test_elimination_leaves_hidden_keys_alone():
    value, weights = draw(13, 60, 60, 5)
    allowed = causal(60)
    weights = (weights[0] * allowed) / (weights[0] * allowed).sum(-1, keepdim=True)
    beta = eliminate(value[0], weights, allowed)
    assert float((beta * ~allowed).abs().max()) == 0.0
    assert int((beta > 0).sum(-1).max()) <= 6
    torch.testing.assert_close(beta @ value[0], weights @ value[0], atol=1e-12, rtol=0)


RANKS = [1, 2, 3, 4, 5]
# Mean error of the solver over the optimum's, from the specification's 40 draws of this size.
MEAN_RATIO = {1: 1.0, 2: 1.13, 3: 1.24, 4: 1.52, 5: 1.74}


def enumerate_optimum(value, weights, num_kept):
    """Return the error of optimal-v-aware-r by trying every set of r values; ()."""
    sets = torch.tensor(list(combinations(range(len(value)), num_kept)))[None]
    live = torch.ones_like(sets, dtype=torch.bool)
    output = (weights @ value).expand(1, sets.shape[1], -1)
    support = Support(sets, live.double() / num_kept, live)
    reoptimise(support, value[None], output)
    return (support.output(value[None]) - output).norm(dim=-1).min()


@pytest.fixture(scope="module")
def solved():
    value, weights = draw(17, 1, 12, 6, groups=25)
    return value, weights, value_aware(value, weights, RANKS, swaps=2)


def test_solver_against_enumeration(solved):
    """An upper estimate: never below the optimum, and equal to it in most small cases."""
    value, weights, found = solved
    for rank in RANKS:
        exact = torch.stack(
            [enumerate_optimum(v, a[0], rank) for v, a in zip(value, weights, strict=True)]
        )
        error = ((found[rank] - weights) @ value)[:, 0].norm(dim=-1)
        assert float((error - exact).min()) > -1e-9
        share = float((error < exact + 1e-7).double().mean())
        assert share == 1.0 if rank == 1 else share >= 0.4
        assert float(error.mean()) < MEAN_RATIO[rank] * float(exact.mean()) + 1e-9


def test_solver_is_never_worse_than_top_r_and_improves_with_r(solved):
    value, weights, found = solved
    before = torch.full((25,), float("inf"), dtype=torch.float64)
    for rank in RANKS:
        error = ((found[rank] - weights) @ value)[:, 0].norm(dim=-1)
        oblivious = ((value_oblivious(weights, rank) - weights) @ value)[:, 0].norm(dim=-1)
        assert (error <= oblivious + 1e-12).all()
        assert (error <= before + 1e-12).all()
        assert int((found[rank] > 0).sum(-1).max()) <= rank
        torch.testing.assert_close(found[rank].sum(-1), torch.ones_like(weights[..., 0]))
        before = error


def test_solver_respects_causal_masks_and_many_groups():
    value, weights = draw(19, 40, 40, 4, groups=3)
    allowed = causal(40)
    weights = weights * allowed / (weights * allowed).sum(-1, keepdim=True)
    found = value_aware(value, weights, [1, 3, 5], allowed=allowed, max_queries=40)
    whole = value_aware(value, weights, [1, 3, 5], allowed=allowed)
    for rank, beta in found.items():
        assert float((beta * ~allowed).abs().max()) == 0.0
        torch.testing.assert_close(beta, whole[rank])
        error = ((beta - weights) @ value).norm(dim=-1)
        oblivious = ((value_oblivious(weights, rank, allowed) - weights) @ value).norm(dim=-1)
        assert (error <= oblivious + 1e-12).all()
    # With as many keys as the size of a value and one, the estimate is nearly exact here.
    assert float(((found[5] - weights) @ value).norm(dim=-1).mean()) < 0.02


def test_rows_that_see_nothing_stay_empty():
    value, weights = draw(23, 6, 9, 4)
    allowed = torch.ones(6, 9, dtype=torch.bool)
    allowed[2] = False
    found = value_aware(value, weights * allowed, [2], allowed=allowed)[2]
    assert float(found[0, 2].abs().max()) == 0.0
    assert float(found[0].sum()) == pytest.approx(5.0)


def test_reweighting_the_heaviest_keys_helps():
    value, weights = draw(29, 30, 40, 7)
    allowed = torch.ones_like(weights, dtype=torch.bool)
    problem = Problem(value, weights, allowed, weights @ value)
    support = heaviest_support(problem, 4)
    oblivious = value_oblivious(weights, 4)
    kept = oblivious > 0
    assert (support.dense(40)[~kept] == 0).all()
    plain = ((oblivious - weights) @ value).square().sum(-1)
    assert (problem.error(support) <= plain + 1e-12).all()
    assert float(problem.error(support).mean()) < 0.9 * float(plain.mean())
    assert torch.equal(
        first_support(problem, 1).index[..., 0], nearest_value(value, weights @ value)
    )


@pytest.mark.parametrize(("select", "second"), [("linesearch", 1), ("lmo", 2)])
def test_the_two_searches_choose_by_gain_and_by_direction(select, second):
    """From 0 towards (1, 0): (2.2, 0) reaches it, (10, 9) is furthest along the residual."""
    value = torch.tensor([[[0.0, 0.0], [2.2, 0.0], [10.0, 9.0]]], dtype=torch.float64)
    allowed = torch.ones(1, 1, 3, dtype=torch.bool)
    output = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    problem = Problem(value, allowed.double() / 3, allowed, output)
    support = first_support(problem, 2)
    grow(problem, support, 2, select)
    assert support.dense(3)[0, 0].nonzero()[:, 0].tolist() == [0, second]


def test_ranks_are_checked():
    value, weights = draw(1, 2, 3, 2)
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        value_aware(value, weights, [0])
    with pytest.raises(ValueError, match="num_kept must be at least 1"):
        value_oblivious(weights, 0)


def test_windows():
    def row(i, **options):
        return window_mask(9, 9, 4, **options)[i].nonzero()[:, 0].tolist()

    assert row(4, is_causal=False) == [2, 3, 4, 5]
    assert row(4, is_causal=False, window="literal") == [2, 3, 4, 5, 6]
    assert row(4, is_causal=True) == [1, 2, 3, 4]
    assert row(0, is_causal=False) == [0, 1]
    assert window_mask(2, 9, 3, is_causal=True)[0].nonzero()[:, 0].tolist() == [5, 6, 7]


def test_window_weights_and_empty_windows():
    _, weights = draw(31, 9, 9, 2)
    inside = window_mask(9, 9, 4, is_causal=False)
    expected = weights * inside / (weights * inside).sum(-1, keepdim=True)
    torch.testing.assert_close(sliding_window(weights, 4, is_causal=False), expected)
    torch.testing.assert_close(
        sliding_window(weights, 17, is_causal=False, window="literal"), weights
    )
    hidden = torch.zeros_like(weights)
    hidden[..., 0] = 1.0  # all weight on a key outside of most windows
    alone = sliding_window(hidden, 1, is_causal=False)
    torch.testing.assert_close(alone[0], torch.eye(9, dtype=torch.float64))
    # Fewer queries than keys stand at the last keys.
    alone = sliding_window(hidden[:, :3], 1, is_causal=True)
    torch.testing.assert_close(alone[0], torch.eye(9, dtype=torch.float64)[6:])
