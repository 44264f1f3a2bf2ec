"""Setting B: responsibilities, the M-step over micro-batches, and when it does not run."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from lit_probattn.attention import MGKAttention
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.mgk.functions import MGKArguments
from lit_probattn.attention.mgk.m_step import responsibility_sums
from lit_probattn.configs import ConfigError, upgrade
from lit_probattn.models.transformer import Transformer

B, H, N, L, E, K, C = 2, 3, 11, 13, 5, 3, 17
EXACT = 1e-13


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def mixture():
    return {
        "query": draw(B, H, N, E),
        "key": draw(B, H, K, L, E),
        "prior": torch.rand(H, K, 1, dtype=torch.float64) + 0.1,
        "sigma2": torch.rand(H, K, dtype=torch.float64) + 0.5,
    }


@pytest.mark.parametrize("weighting", ["uniform", "posterior"])
def test_responsibilities_equal_sums_over_real_pairs(mixture, weighting):
    """Two query heads share each mixture; a bias moves the weight of a pair, not its shares."""
    _, k, prior, sigma2 = mixture.values()
    q, bias = draw(B, 2 * H, L, E), draw(1, 2 * H, L, L)
    key_mask = torch.rand(B, L) < 0.7
    masks = Masks(L, L, key_mask=key_mask, is_causal=True, bias=bias)
    numerator, denominator = responsibility_sums(
        q,
        k,
        MGKArguments(prior.log(), sigma2),
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
    layer = MGKAttention(
        C, H, head_dim=E, num_components=K, e_step="soft", prior_share=share, max_positions=L + 2
    ).double()
    whole, parts = layer, copy.deepcopy(layer)
    x, key_mask = draw(4, L, C), torch.rand(4, L) < 0.8
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
            lambda c, head_dim: MGKAttention(c, H, head_dim=head_dim, e_step="soft"),
            *(C, E, 2, 7),
            activation_checkpointing=checkpointing,
        ).double()

    x = draw(B, N, C)
    sums = []
    for checkpointing in (False, True):
        model = make(checkpointing)
        model(x).sum().backward()
        sums.append(model.blocks[0].attention.core.prior_statistics().clone())
        model.eval()(x)
        assert torch.equal(sums[-1], model.blocks[0].attention.core.prior_statistics())
    assert sums[0].sum() > 0
    torch.testing.assert_close(sums[0], sums[1], atol=EXACT, rtol=0)


def test_setting_b_has_no_gradient_and_setting_c_no_prior():
    soft, hard = (
        MGKAttention(C, H, head_dim=E, e_step="soft"),
        MGKAttention(C, H, head_dim=E, e_step="hard"),
    )
    assert "core.prior.value" not in dict(soft.named_parameters())
    assert "core.prior.value" in soft.state_dict()
    assert hard.core.prior is None
    assert hard.core.prior_statistics() is None


def test_saved_configurations_with_a_momentum_of_zero_open():
    name = "lit_probattn.attention.MGKAttention"
    saved = {"class_path": name, "init_args": {"num_heads": 2, "prior_momentum": 0.0}}
    assert upgrade(saved) == {"class_path": name, "init_args": {"num_heads": 2}}
    saved["init_args"]["prior_momentum"] = 0.9
    with pytest.raises(ConfigError, match="no longer has the option prior_momentum"):
        upgrade(saved)
