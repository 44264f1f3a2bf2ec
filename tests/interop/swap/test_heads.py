"""The weight form: components that start apart, heads that are joined."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lit_probattn
from lit_probattn.attention.core import HeadLayout
from lit_probattn.attention.mgk.functions import MGK, component_scores
from lit_probattn.interop.swap.core import joined, scaled
from lit_probattn.interop.swap.settings import Settings
from lit_probattn.interop.weights import (
    HeadWeights,
    group_heads,
    merge_scores,
    read_heads,
    rotary_rows,
    widen_keys,
)
from tests.interop.swap.checks import swapped
from tests.interop.swap.models import TORCH
from tests.support.helpers import double

H, KV, G, K, E, C = 6, 3, 2, 3, 4, 11


def weights(bias: bool = True) -> HeadWeights:
    torch.manual_seed(0)

    def rows(heads):
        return double(heads * E, C), double(heads * E) if bias else None

    return read_heads(rows(H), rows(KV), rows(KV), (double(C, H * E), double(C)), H, KV)


# ---------------------------------------------------------------------- components
def test_components_lie_around_the_key_that_they_were():
    old = weights()
    wide = widen_keys(old, 4, 0.1, seed=1)
    assert wide.key.shape == (KV, 4, E, C + 1)
    torch.testing.assert_close(wide.key.mean(1), old.key[:, 0], rtol=0, atol=1e-12)
    apart = wide.key - old.key
    assert torch.equal(apart[..., -1], torch.zeros_like(apart[..., -1]))  # biases stay
    # Less the mean of four, draws keep 3/4 of their variance.
    ratio = apart[..., :-1].std() / (0.1 * old.key[..., :-1].std() * 0.75**0.5)
    assert abs(ratio - 1) < 0.1
    assert torch.equal(widen_keys(old, 4, 0.1, seed=1).key, wide.key)
    assert not torch.equal(widen_keys(old, 4, 0.1, seed=2).key, wide.key)
    assert not torch.equal(wide.key[0, 0] - old.key[0, 0], wide.key[1, 0] - old.key[1, 0])


def test_the_error_of_starting_apart_is_of_second_order():
    model, call = TORCH["encoder"]()
    before = call(model)
    errors = [(call(swapped(model, spread=s)[0]) - before).norm() for s in (0.02, 0.04)]
    assert 3.8 < errors[1] / errors[0] < 4.2


@pytest.mark.parametrize("spread", [0.0, None])
def test_equal_components_never_separate_and_others_do(spread):
    model, call = TORCH["encoder"]()
    options = {} if spread is None else {"spread": spread}
    model, report = lit_probattn.swap(model, "mgk", **options)
    keys = [m for m in model.modules() if hasattr(m, "cores")]
    assert len(keys) == 2
    apart = [distance(key) for key in keys]
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(10):
        optimiser.zero_grad()
        call(model).square().mean().backward()
        optimiser.step()
    after = [distance(key) for key in keys]
    if spread == 0.0:
        assert max(after) < 1e-9
        assert "components start equal" in str(report)
    else:
        assert all(a != b and b > 0.01 for a, b in zip(apart, after, strict=True))
        assert "components start 0.1 apart" in str(report)


def test_priors_per_position_are_said_to_count_padding():
    for share, said in (("head", False), ("head_position", True)):
        model, _ = TORCH["encoder"]()
        options = {"max_positions": 64} if said else {}
        _, report = lit_probattn.swap(model, "mgk", prior_share=share, **options)
        assert ("positions include padding" in str(report)) == said


def distance(layer: nn.Module) -> float:
    second = layer.cores.core(0).key_weight[0]
    return float((layer.in_proj_weight[24:48] - second).detach().abs().max())


@pytest.mark.parametrize("score", ["dot", "gaussian"])
def test_a_factor_per_head_multiplies_scores(score):
    """Products are linear in the query; squared distances need both sides."""
    query, key, factor = (
        double(2, 3, 5, 4),
        double(2, 6, 7, 4),
        torch.rand(1, 3, 1, 1).double() + 0.5,
    )
    core = Settings(score=score).make_core(HeadLayout(3, 3, 3, 3, 4, 4, keys_per_head=2))

    def scores(q, k):
        keys = k.unflatten(1, (3, 2))
        arguments = MGK(None, torch.full((3, 2), 2.0).double(), score)
        return component_scores(q, keys, arguments)

    found = scores(*scaled(core, query, key, factor))
    torch.testing.assert_close(found, scores(query, key) * factor[:, :, None])


# ---------------------------------------------------------------------- joined heads
def test_groups_are_the_most_similar_heads():
    old = weights()
    twin = old.key.clone()
    twin[2] = 1.5 * old.key[0]
    query = old.query.clone()
    query[4:] = query[:2]
    like = replace(old, key=torch.cat([twin, old.key[1:2] + 0.01]), query=query[[*range(6), 2, 3]])
    assert group_heads(like, 2) == [[0, 2], [1, 3]]


def test_a_cut_for_rotary_positions_is_the_best_that_commutes_with_them():
    """Squared error of the logits over many distances: no nearby maps are better."""
    query, keys = double(G, K, E, C), double(K, E, C)
    angles = 100.0 * torch.rand(400, E // 2, dtype=torch.float64)
    for layout in ("halves", "neighbours"):
        first, second = rotary_rows(E, layout)

        def turned(rows, first=first, second=second):
            out = rows.expand(len(angles), *rows.shape).clone()
            cos, sin = (f(angles).view(-1, *[1] * (rows.dim() - 2), E // 2, 1) for f in TURNS)
            a, b = rows[..., first, :], rows[..., second, :]
            out[..., first, :], out[..., second, :] = a * cos - b * sin, a * sin + b * cos
            return out

        old = torch.einsum("gkec,tked->tgkcd", query, turned(keys))

        def error(q, k, old=old, turned=turned):
            return (torch.einsum("gec,tked->tgkcd", q, turned(k)) - old).square().mean()

        best = merge_scores(query, keys, layout)
        lowest = error(*best)
        assert lowest < 0.9 * old.square().mean()
        for _ in range(20):
            assert error(*(t + 0.03 * torch.randn_like(t) for t in best)) > lowest
        plain = merge_scores(query, keys)
        assert error(*plain) > 1.02 * lowest


TURNS = (torch.cos, torch.sin)


def test_more_components_than_joined_heads():
    model, call = TORCH["encoder"]()
    two, _ = swapped(model, "mgk", heads=0.5)
    four, report = swapped(model, "mgk", heads=0.5, num_components=4, spread=0.0)
    assert report.layers[0].components == (1, 4)
    torch.testing.assert_close(call(four), call(two), rtol=1e-9, atol=1e-9)
    third = nn.ModuleList([nn.MultiheadAttention(24, 6).double()])
    _, report = lit_probattn.swap(third, "mgk", heads=1 / 3)
    assert report.layers[0].kv_heads == (6, 2)
    assert report.layers[0].components == (1, 3)


@pytest.mark.parametrize("shape", [(H, 5, 7), (1, H, 5, 7), (2, H, 5, 7)])
def test_masks_and_biases_of_joined_heads_are_joined_with_and_without_a_batch(shape):
    """PyTorch's attention takes a mask of heads without a batch dimension."""
    groups = [[0, 3], [1, 2, 5], [4]]
    bias, allowed = torch.randn(shape), torch.rand(shape) > 0.5
    for part, group in enumerate(groups):
        mean = sum(bias.select(-3, head) for head in group) / len(group)
        some = torch.stack([allowed.select(-3, head) for head in group]).any(0)
        torch.testing.assert_close(joined(bias, groups).select(-3, part), mean)
        assert torch.equal(joined(allowed, groups).select(-3, part), some)
    for unchanged in (torch.randn(5, 7), torch.randn(2, 1, 5, 7), torch.randn(3, 5, 7)):
        assert joined(unchanged, groups) is unchanged


# ---------------------------------------------------------------------- after the swap
class Adapter(nn.Module):
    """A wrapper as peft's: another output, and the weight of its layer to merge into."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.delta = nn.Parameter(0.3 * double(base_layer.out_features, base_layer.in_features))

    def forward(self, x):
        return self.base_layer(x) + nn.functional.linear(x, self.delta)

    def merged(self):
        """Return the layer with the adapter in its weight."""
        self.base_layer.weight.data += self.delta.data
        return self.base_layer


class Fused(nn.Module):
    """Attention with one projection without a bias."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 48, bias=False), nn.Linear(16, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(heads.transpose(1, 2).flatten(2))


def fused(variant, **options):
    torch.manual_seed(0)
    x = double(2, 7, 8)
    return lit_probattn.swap(Fused().double(), variant, example=x, **options)[0], x


@pytest.mark.parametrize("variant", ["softmax", "smgk"])
def test_adapters_on_weights_that_a_swap_keeps_can_be_merged(variant):
    model, x = fused(variant)
    model.qkv, model.out = Adapter(model.qkv), Adapter(model.out)
    out = model(x)
    model.qkv, model.out = model.qkv.merged(), model.out.merged()
    torch.testing.assert_close(model(x), out)


@pytest.mark.parametrize("heads", [1.0, 0.5])
@pytest.mark.parametrize("name", ["qkv", "out"])
def test_adapters_on_weights_with_other_rows_are_refused(heads, name):
    """The rows that are not stored, and further components, would lose the merged adapter."""
    model, x = fused("mgk", heads=heads)
    setattr(model, name, Adapter(getattr(model, name)))
    if (heads, name) == (1.0, "out"):  # unchanged by the swap
        out = model(x)
        model.out = model.out.merged()
        torch.testing.assert_close(model(x), out)
        return
    with pytest.raises(RuntimeError, match=rf"{name} was wrapped .*Adapter\): adapters and quan"):
        model(x)


def test_a_new_weight_with_all_rows_is_refused_where_rows_were_dropped():
    """Quantisation sets one; its rows would have been read as those of other heads."""
    model, x = fused("mgk", heads=0.5)
    model.qkv.weight = nn.Parameter(model.qkv.weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"qkv was wrapped or replaced .*linear\.Linear\): "):
        model(x)
