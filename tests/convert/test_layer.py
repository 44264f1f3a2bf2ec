"""Conversion of softmax heads to MGK: its identities and its optima."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lit_probattn.attention import SoftmaxAttention
from lit_probattn.convert import LayerInputs, Mixture, convert_layer
from lit_probattn.convert.fish import convert_to_fish
from lit_probattn.convert.layer import scores_of_components
from lit_probattn.interop.algebra import (
    best_groups,
    jensen_shannon_distances,
    low_rank_regression,
    second_moment,
    shared_query_factors,
    symmetric_roots,
)

C, E, H, K = 11, 3, 4, 2


def softmax_layer(heads=H, **options):
    layer = SoftmaxAttention(C, heads, head_dim=E, **options).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter *= 2
    return layer


def draw_inputs(samples=8, length=17, is_causal=False):
    scale = torch.linspace(0.2, 2.0, C, dtype=torch.float64)
    mask = torch.ones(samples, length, dtype=torch.bool)
    mask[1, 13:] = False
    x = torch.randn(samples, length, C, dtype=torch.float64) * scale + 0.3
    return LayerInputs(x, mask, is_causal)


# ---------------------------------------------------------------------- identities
@pytest.mark.parametrize("bias", [True, False])
def test_joint_softmax_is_a_query_gated_mixture_of_the_old_maps(bias):
    """At width K·E: A_i = Σ_r w_ir P_i^r, w_ir = softmax_r(log Z_ir + c_r)."""
    old, inputs = softmax_layer(bias=bias), draw_inputs()
    new, errors = convert_layer(old, inputs=inputs, head_dim=K * E)
    assert errors.logit_error < 1e-6
    x = inputs.x[:2]
    maps = old.weights(x)  # (B, H, N, N)
    q, k = (p(x).unflatten(-1, (H, E)).transpose(1, 2) for p in (old.query_proj, old.key_proj))
    normaliser = (q @ k.mT / E**0.5).logsumexp(-1)  # (B, H, N)
    logits = new.core.prior.value  # (H/K, K)
    for index, group in enumerate(errors.groups):
        gate = (normaliser[:, group] + logits[index][None, :, None]).softmax(1)
        mixture = (gate[..., None] * maps[:, group]).sum(1)
        torch.testing.assert_close(new.weights(x)[:, index], mixture, atol=1e-10, rtol=0)


def test_every_component_starts_with_the_same_mass():
    inputs = draw_inputs(samples=3, is_causal=True)
    new, _ = convert_layer(softmax_layer(), inputs=inputs)
    masses = []
    for sample in range(3):
        rows = inputs.real[sample].nonzero()[:, 0]
        scores = scores_of_components(new, inputs.x[sample : sample + 1], rows)
        later = torch.arange(17) > rows[:, None]
        hidden = later | ~inputs.real[sample]
        log_z = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)  # (H/K, K, n)
        masses.append(log_z + new.core.prior.value[..., None])
    mean = torch.cat(masses, -1).mean(-1)
    torch.testing.assert_close(mean[:, 0], mean[:, 1], atol=1e-10, rtol=0)


def test_equal_heads_convert_without_error():
    """Pairs of equal heads lose nothing: same map, and outputs add up."""
    old = softmax_layer()
    with torch.no_grad():
        for proj in (old.query_proj, old.key_proj, old.value_proj):
            for part in (proj.weight, proj.bias):
                rows = part.unflatten(0, (H, E))
                rows[3], rows[2] = rows[0].clone(), rows[1].clone()
    inputs = draw_inputs()
    new, errors = convert_layer(old, inputs=inputs)
    assert errors.groups == [[0, 3], [1, 2]]
    assert errors.held_out
    assert errors.output_error < 1e-6
    torch.testing.assert_close(
        new(inputs.x, key_mask=inputs.key_mask)[inputs.real],
        old(inputs.x, key_mask=inputs.key_mask)[inputs.real],
        atol=1e-10,
        rtol=0,
    )
    # Without data the maps and the summed outputs of equal heads are exact too.
    blind, errors = convert_layer(old)
    assert errors.output_error is None
    assert errors.groups == [[0, 3], [1, 2]]
    x = inputs.x[:1]
    torch.testing.assert_close(blind(x), old(x), atol=1e-10, rtol=0)


def test_errors_are_what_the_layers_do():
    old, inputs = softmax_layer(), draw_inputs(samples=8)
    new, errors = convert_layer(old, inputs=inputs)
    test = inputs.part(slice(6, 8))  # the last quarter is held out
    before, after = (m(test.x, key_mask=test.key_mask)[test.real] for m in (old, new))
    expected = (after - before).norm() / (before - old.out_proj.bias).norm()
    assert abs(errors.output_error - expected.item()) < 1e-6
    wide, wide_errors = convert_layer(old, inputs=inputs, head_dim=K * E, value_head_dim=K * E)
    assert wide_errors.output_error < errors.output_error
    assert wide.value_head_dim == K * E
    _, few = convert_layer(old, inputs=inputs.part(slice(0, 3)))
    assert not few.held_out
    assert "on the fitted inputs" in few.line()


# ---------------------------------------------------------------------- optima
def test_cut_is_the_best_of_its_rank_and_its_error_the_discarded_share():
    old = [torch.randn(K, E, 7, dtype=torch.float64) for _ in range(2)]
    forms = old[0].mT @ old[1]
    factors = shared_query_factors(*old, E)
    found = factors.query.mT @ factors.keys
    error = (found - forms).square().sum() / forms.square().sum()
    torch.testing.assert_close(error.item(), 1 - factors.kept / factors.total, atol=1e-12, rtol=0)
    exact = shared_query_factors(*old, K * E)
    torch.testing.assert_close(exact.query.mT @ exact.keys, forms, atol=1e-12, rtol=0)
    # Query and keys carry the same weight.
    norms = factors.query.square().sum(1), factors.keys.square().sum((0, 2))
    torch.testing.assert_close(*norms, atol=1e-12, rtol=1e-12)


def test_weighted_cut_minimises_the_mean_squared_logit_error():
    old = [torch.randn(K, E, 7, dtype=torch.float64) for _ in range(2)]
    forms = old[0].mT @ old[1]
    x = torch.randn(4000, 7, dtype=torch.float64) * torch.linspace(0.1, 3, 7).double()
    moment = second_moment(x)

    def error(query, keys):
        """E (qᵀ Δ k)² = tr(Δ C Δᵀ C) for independent q and k."""
        delta = query.mT @ keys - forms
        return torch.einsum("rab,bc,rdc,da->", delta, moment, delta, moment)

    best = shared_query_factors(*old, E, moment)
    lowest = error(best.query, best.keys)
    torch.testing.assert_close(lowest.item(), best.total - best.kept, atol=1e-9, rtol=1e-9)
    plain = shared_query_factors(*old, E)
    assert error(plain.query, plain.keys) > 1.05 * lowest
    for _ in range(20):
        q, k = (t + 0.01 * torch.randn_like(t) for t in (best.query, best.keys))
        assert error(q, k) > lowest
    tokens = x[torch.randperm(4000)]
    drawn = torch.einsum("na,rab,nb->rn", x, best.query.mT @ best.keys - forms, tokens)
    assert abs(drawn.square().mean(1).sum() / lowest - 1) < 0.2


def test_roots_of_a_singular_moment_leave_out_what_never_occurs():
    x = torch.randn(50, 3, dtype=torch.float64) @ torch.randn(3, 7, dtype=torch.float64)
    moment = second_moment(x)
    root, inverse = symmetric_roots(moment)
    torch.testing.assert_close(root @ root, moment, atol=1e-12, rtol=0)
    projector = root @ inverse
    torch.testing.assert_close(x @ projector, x, atol=1e-10, rtol=0)
    assert abs(projector.trace() - 3) < 1e-6


def test_regression_is_least_squares_at_full_rank_and_best_below():
    g = torch.randn(60, 5, dtype=torch.float64)
    y = g @ torch.randn(5, 7, dtype=torch.float64) + torch.randn(60, 7, dtype=torch.float64)
    gram, cross = g.mT @ g, g.mT @ y

    def error(into, out):
        return (g @ (out @ into).mT - y).square().sum()

    full = torch.linalg.lstsq(g, y).solution
    into, out = low_rank_regression(gram, cross, 7)
    torch.testing.assert_close((out @ into).mT, full, atol=1e-10, rtol=0)
    into, out = low_rank_regression(gram, cross, 2)
    assert into.shape == (2, 5)
    assert out.shape == (7, 2)
    lowest = error(into, out)
    u, s, vt = torch.linalg.svd(full, full_matrices=False)
    cut = ((vt[:2].mT * s[:2]) @ u[:, :2].mT).mT  # the truncated solution ignores the predictors
    assert lowest < (g @ cut - y).square().sum()
    for _ in range(20):
        noise = 0.01 * torch.randn_like(into), 0.01 * torch.randn_like(out)
        assert error(into + noise[0], out + noise[1]) > lowest


def test_with_a_ridge_the_map_stays_where_predictors_hardly_vary():
    """The minimum of Σ‖y − Bᵀg‖² + ρ t ‖B − B_0‖², and B_0 along what has no variance."""
    g = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([1.0, 1.0, 1e-6, 0.0])
    y, start = (torch.randn(n, 3, dtype=torch.float64) for n in (50, 4))
    into, out = low_rank_regression(g.mT @ g, g.mT @ y, 3, toward=start, ridge=0.1)
    found, weight = (out @ into).mT, 0.1 * (g.mT @ g).diagonal().mean()
    gradient = g.mT @ (g @ found - y) + weight * (found - start)
    assert gradient.abs().max() < 1e-9
    torch.testing.assert_close(found[2:], start[2:], rtol=0, atol=1e-4)
    loose = low_rank_regression(g.mT @ g, g.mT @ y, 3)
    assert (loose[1] @ loose[0]).abs().max() > 1e3  # what it would be otherwise


def test_divergence_and_groups():
    maps = torch.rand(4, 5, 7, dtype=torch.float64)
    maps[0, 0, 2] = 0.0
    maps = maps / maps.sum(-1, keepdim=True)
    found = jensen_shannon_distances(maps)
    for i, j in itertools.product(range(4), repeat=2):
        total = 0.0
        for row in range(5):
            for p, q in zip(maps[i, row].tolist(), maps[j, row].tolist(), strict=True):
                middle = (p + q) / 2
                total += sum(v / 2 * math.log(v / middle) for v in (p, q) if v > 0)
        assert abs(found[i, j].item() - total / 5) < 1e-12
    distances = torch.rand(6, 6, dtype=torch.float64)
    distances = distances + distances.T
    cost = {
        tuple(map(tuple, groups)): sum(float(distances[a, b]) for a, b in groups)
        for groups in (
            [sorted(p[i : i + 2]) for i in (0, 2, 4)] for p in itertools.permutations(range(6))
        )
    }
    chosen = best_groups(distances, 2)
    assert abs(sum(float(distances[a, b]) for a, b in chosen) - min(cost.values())) < 1e-12
    many = best_groups(torch.rand(14, 14), 2)  # greedy
    assert sorted(itertools.chain(*many)) == list(range(14))
    assert {len(g) for g in best_groups(torch.rand(9, 9), 3)} == {3}


@pytest.mark.parametrize(
    ("layer", "components", "message"),
    [
        (lambda: softmax_layer(), 3, "must divide num_heads=4, received 3"),
        (lambda: softmax_layer(score="gaussian"), 2, "score=gaussian"),
        (lambda: softmax_layer(num_kv_heads=2), 2, "num_kv_heads=2 of 4"),
        (lambda: softmax_layer(rotary_dim=2), 2, "no rotary positions"),
    ],
)
def test_layers_that_cannot_be_converted_are_refused(layer, components, message):
    with pytest.raises(ValueError, match=message):
        convert_layer(layer(), Mixture(num_components=components))


@pytest.mark.parametrize("convert", [convert_layer, convert_to_fish])
@pytest.mark.parametrize("has_inputs", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_the_new_layer_has_the_mode_of_the_old_one(convert, has_inputs, mode):
    old = softmax_layer().train(mode)
    new, _ = convert(old, inputs=draw_inputs() if has_inputs else None)
    assert {module.training for module in (old, *new.modules())} == {mode}


# ---------------------------------------------------------------------- samples without tokens
def hide(inputs, *samples):
    mask = inputs.key_mask.clone()
    mask[list(samples)] = False
    return LayerInputs(inputs.x, mask, inputs.is_causal)


@pytest.mark.parametrize("convert", [convert_layer, convert_to_fish])
@pytest.mark.parametrize("samples", [(0,), (2, 5), (7,), (6, 7)], ids=str)
def test_samples_without_real_tokens_are_left_out(convert, samples):
    old, inputs = softmax_layer(), draw_inputs()
    kept = [i for i in range(8) if i not in samples]
    new, errors = convert(old, inputs=hide(inputs, *samples))
    others = LayerInputs(inputs.x[kept], inputs.key_mask[kept], False)
    expected, same = convert(old, inputs=others)
    assert errors == same
    for found, wanted in zip(new.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("convert", [convert_layer, convert_to_fish])
def test_inputs_without_real_tokens_are_refused(convert):
    with pytest.raises(ValueError, match="no real token"):
        convert(softmax_layer(), inputs=hide(draw_inputs(), *range(8)))


@pytest.mark.parametrize("spread", [-1.0, math.inf, math.nan])
def test_a_spread_that_is_no_deviation_is_refused(spread):
    with pytest.raises(ValueError, match="spread"):
        Mixture(shifted_keys=True, spread=spread)
