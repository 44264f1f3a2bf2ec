"""Setting B: responsibilities, the M-step over micro-batches, and when it does not run."""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch.func import functional_call, functionalize, grad, jvp, vmap

from lit_probattn.attention import MGKAttention
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.mgk.functions import MGK
from lit_probattn.attention.mgk.m_step import responsibility_sums
from lit_probattn.models.transformer import Transformer
from tests.support.helpers import double
from tests.support.slow import mostly_slow

B, H, N, L, E, K, C = 2, 3, 11, 13, 5, 3, 17
EXACT = 1e-13


@pytest.fixture
def mixture():
    return {
        "query": double(B, H, N, E),
        "key": double(B, H, K, L, E),
        "prior": torch.rand(H, K, 1, dtype=torch.float64) + 0.1,
        "sigma2": torch.rand(H, K, dtype=torch.float64) + 0.5,
    }


@pytest.mark.parametrize("weighting", ["uniform", "posterior"])
def test_responsibilities_equal_sums_over_real_pairs(mixture, weighting):
    """Two query heads share each mixture; a bias moves the weight of a pair, not its shares."""
    _, k, prior, sigma2 = mixture.values()
    q, bias = double(B, 2 * H, L, E), double(1, 2 * H, L, L)
    key_mask = torch.rand(B, L) < 0.7
    masks = Masks(L, L, key_mask=key_mask, is_causal=True, bias=bias)
    numerator, denominator, _ = responsibility_sums(
        q,
        k,
        MGK(prior.log(), sigma2),
        masks=masks,
        query_mask=key_mask,
        weighting=weighting,
        block_scores=200,
    )
    expected, count = torch.zeros(H, K, L, dtype=torch.float64), torch.zeros(H, L).double()
    for b, h, i in itertools.product(range(B), range(2 * H), range(L)):
        own = h // 2
        seen = [j for j in range(i + 1) if key_mask[b, j] and key_mask[b, i]]
        terms = {
            j: prior[own, :, 0]
            * torch.exp(-(q[b, h, i] - k[b, own, :, j]).square().sum(-1) / (2 * sigma2[own]))
            for j in seen
        }
        total = sum(t.sum() * bias[0, h, i, j].exp() for j, t in terms.items())
        for j, term in terms.items():
            weight = 1.0
            if weighting == "posterior":
                weight = term.sum() * bias[0, h, i, j].exp() / total
            expected[own, :, j] += weight * term / term.sum()
            count[own, j] += weight
    torch.testing.assert_close(numerator, expected, atol=EXACT, rtol=0)
    torch.testing.assert_close(denominator, count[:, None].expand_as(numerator), atol=EXACT, rtol=0)


@pytest.mark.parametrize("share", ["layer", "head", "head_position"])
def test_m_step_over_micro_batches_equals_one_batch(share):
    positions = {"max_positions": L + 2} if share == "head_position" else {}
    layer = MGKAttention(
        C, H, head_dim=E, num_components=K, e_step="soft", prior_share=share, **positions
    ).double()
    whole, parts = layer, copy.deepcopy(layer)
    x, key_mask = double(4, L, C), torch.rand(4, L) < 0.8
    whole(x, key_mask=key_mask)
    before = whole.core.prior.value.clone()
    for piece in ((0, 1), (1, 4)):
        parts(x[slice(*piece)], key_mask=key_mask[slice(*piece)])
    assert torch.equal(before, whole.core.prior.value), "the prior changes only when it is applied"
    numerator, denominator = whole.core.prior_statistics()
    whole.core.apply_prior_update(whole.core.prior_statistics())
    seen, mean = denominator > 0, numerator / denominator
    torch.testing.assert_close(whole.core.prior.value[seen], mean[seen], atol=EXACT, rtol=0)
    parts.core.apply_prior_update(parts.core.prior_statistics())
    torch.testing.assert_close(whole.core.prior.value, parts.core.prior.value, atol=EXACT, rtol=0)
    assert (whole.core.prior.value - before).abs().max() > 1e-3
    if share == "head_position":
        assert torch.equal(whole.core.prior.value[..., L:], before[..., L:]), (
            "unseen positions stay"
        )
    else:
        sums = whole.core.prior.value.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=EXACT, rtol=0)
    assert whole.core.prior_statistics().abs().sum() == 0, "sums start again"


def test_m_step_ignores_evaluation_and_recomputation():
    def make(checkpointing):
        torch.manual_seed(1)
        return Transformer(
            partial(MGKAttention, num_heads=H, e_step="soft"),
            **{"embed_dim": C, "head_dim": E, "num_layers": 2, "mlp_dim": 7},
            activation_checkpointing=checkpointing,
        ).double()

    x = double(B, N, C)
    sums = []
    for checkpointing in (False, True):
        model = make(checkpointing)
        model(x).sum().backward()
        sums.append(model.blocks[0].attention.core.prior_statistics().clone())
        model.eval()(x)
        assert torch.equal(sums[-1], model.blocks[0].attention.core.prior_statistics())
    assert sums[0].sum() > 0
    torch.testing.assert_close(sums[0], sums[1], atol=EXACT, rtol=0)


def test_sums_are_added_in_place():
    """A replayed CUDA graph accumulates nothing in a tensor that each pass replaces."""
    densities = {"include_log_det": True, "em_weighting": "posterior"}
    layer = MGKAttention(16, 2, e_step="soft", m_step_variance=True, **densities)
    x = torch.randn(2, 7, 16)
    parts = layer.core.prior, layer.core.variance
    places = []
    for _ in range(2):
        layer(x)
        places.append([part.statistics().data_ptr() for part in parts])
    assert places[0] == places[1]


def test_sums_of_transformed_passes_outlive_the_transform():
    densities = {"include_log_det": True, "em_weighting": "posterior"}
    layer = MGKAttention(16, 2, e_step="soft", m_step_variance=True, **densities).double()
    x, copied = torch.randn(2, 7, 16, dtype=torch.float64), copy.deepcopy(layer)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters):
        return functional_call(layer, parameters, x).square().sum()

    transforms = grad(loss), lambda p: jvp(loss, (p,), (p,)), functionalize(loss), grad(loss)
    for transformed in transforms:
        transformed(parameters)
        copied(x)
    again = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    expected = copied.core.prior_statistics()
    torch.testing.assert_close(again.core.prior_statistics(), expected, rtol=0, atol=1e-12)
    buffers = {name: buffer[None] for name, buffer in layer.named_buffers()}
    mask = torch.ones(1, 2, 7, dtype=torch.bool)
    for mapped, entries in (
        (grad(lambda x: layer(x[None]).sum()), x),
        (lambda memory: layer(x, memory), x[None]),
        (lambda mask: layer(x, key_mask=mask), mask),
        (lambda buffers: functional_call(layer, buffers, (x,)), buffers),
    ):
        with pytest.raises(NotImplementedError, match="e_step=learned"):
            vmap(mapped)(entries)
    layer.core.eval()
    assert vmap(layer)(x[None]).shape == (1, *x.shape)


def test_setting_b_has_no_gradient_and_setting_c_no_prior():
    soft, hard = (
        MGKAttention(C, H, head_dim=E, e_step="soft"),
        MGKAttention(C, H, head_dim=E, e_step="hard"),
    )
    assert "core.prior.value" not in dict(soft.named_parameters())
    assert "core.prior.value" in soft.state_dict()
    assert hard.core.prior is None
    assert hard.core.prior_statistics() is None


# ---------------------------------------------------------------------- variances by the M-step
EM = {"e_step": "soft", "em_weighting": "posterior", "include_log_det": True}


def em_layer(seed, **options):
    """A layer whose priors and variances start away from where they end."""
    torch.manual_seed(seed)
    options = {**EM, "num_components": K, "variance": [0.6, 1.0, 2.5], **options}
    return MGKAttention(C, H, head_dim=E, m_step_variance=True, **options).double().train()


def log_likelihood(layer, x, key_mask):
    """Σ_i log p(q_i) over real queries and heads, one by one; p is uniform over visible keys."""
    call = layer.call(x, key_mask=key_mask, is_causal=True)
    keys, core, total = layer.core.components(call.key), layer.core, 0.0
    prior, sigma2 = core.prior(L).exp(), core.variance()
    for b, h, i in itertools.product(range(B), range(H), range(L)):
        seen = [j for j in range(i + 1) if key_mask[b, j]]
        if not key_mask[b, i]:
            continue
        pi = prior[h].expand(K, L)[:, seen]
        squares = (call.query[b, h, i] - keys[b, h, :, seen]).square().sum(-1)  # (K, seen)
        scale = (2 * torch.pi * sigma2[h, :, None]) ** (-E / 2)
        densities = pi * scale * torch.exp(-squares / (2 * sigma2[h, :, None]))
        total += float((densities.sum() / len(seen)).log())
    return total


@pytest.mark.parametrize(
    ("seed", "share"),
    mostly_slow(
        itertools.product(range(4), ["layer", "head", "head_position"]),
        enumerate(["layer", "head", "head_position"]),
    ),
)
@torch.no_grad()
def test_an_iteration_never_makes_queries_less_likely(seed, share):
    positions = {"max_positions": L} if share == "head_position" else {}
    layer = em_layer(seed, prior_share=share, **positions)
    x, key_mask = 2.0 * double(B, L, C), torch.rand(B, L) < 0.8
    found = [log_likelihood(layer, x, key_mask)]
    for _ in range(6):
        layer(x, key_mask=key_mask, is_causal=True)
        layer.core.apply_prior_update(layer.core.prior_statistics())
        found.append(log_likelihood(layer, x, key_mask))
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert min(steps) >= -1e-10, steps
    assert steps[0] > 1e-2, "the first iteration gains"
    spread = layer.core.variance() / E**0.5
    assert (spread - torch.tensor([0.6, 1.0, 2.5])).abs().max() > 1e-2, "variances moved"


@torch.no_grad()
def test_variances_of_the_m_step_equal_the_sums():
    """Two heads share a mixture; masks, padding and a bias weigh pairs; bounds hold."""
    layer = em_layer(0, num_kv_heads=1).double()
    x, key_mask, bias = double(B, L, C), torch.rand(B, L) < 0.8, double(1, H, L, L)
    call = layer.call(x, key_mask=key_mask, is_causal=True, bias=bias)
    weights, shares = layer.core.posterior(call)
    keys = layer.core.components(call.key)
    squares = (call.query[:, :, None, :, None] - keys[:, :, :, None]).square().sum(-1)
    joint = weights[:, :, None] * shares * key_mask[:, None, None, :, None]
    expected = (joint * squares).sum((0, 1, 3, 4)) / (E * joint.sum((0, 1, 3, 4)))
    layer(x, key_mask=key_mask, is_causal=True, bias=bias)
    layer.core.apply_prior_update(layer.core.prior_statistics())
    torch.testing.assert_close(layer.core.variance()[0], expected, atol=EXACT, rtol=0)
    layer(1e3 * x, key_mask=key_mask)
    layer.core.apply_prior_update(layer.core.prior_statistics())
    assert (layer.core.variance() <= 8 * E**0.5 + EXACT).all()


def test_variances_of_micro_batches_and_of_nothing():
    whole = em_layer(1)
    parts, x = copy.deepcopy(whole), double(4, L, C)
    whole(x)
    for piece in (slice(0, 1), slice(1, 4)):
        parts(x[piece])
    start = whole.core.variance().clone()
    for layer in (whole, parts):
        layer.core.apply_prior_update(layer.core.prior_statistics())
    torch.testing.assert_close(whole.core.variance(), parts.core.variance(), atol=EXACT, rtol=0)
    assert (whole.core.variance() - start).abs().max() > 1e-3
    assert whole.core.prior_statistics().abs().sum() == 0, "sums start again"
    before = copy.deepcopy(whole.core.state_dict())
    whole.core.apply_prior_update(whole.core.prior_statistics())  # a step that was skipped
    for name, value in whole.core.state_dict().items():
        torch.testing.assert_close(value, before[name], atol=EXACT, rtol=0)
    assert "core.variance.log_variance" not in dict(whole.named_parameters())
    other = em_layer(2)
    other.load_state_dict(whole.state_dict())
    torch.testing.assert_close(other.core.variance(), whole.core.variance(), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"e_step": "learned"}, "e_step=soft, received learned"),
        ({"em_weighting": "uniform"}, "em_weighting=posterior, received uniform"),
        ({"score": "dot"}, "score=gaussian, received dot"),
        ({"include_log_det": False}, "include_log_det=True, received False"),
        ({"learn_variance": True}, "learn_variance=False, received True"),
        ({"key_norm_weight": 1.0}, "key_norm_weight=None, received 1.0"),
    ],
)
def test_variances_of_the_m_step_need_densities(options, needed):
    with pytest.raises(ValueError, match=f"m_step_variance needs {needed}"):
        em_layer(0, **options)
