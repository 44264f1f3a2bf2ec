"""Mixed heads of queries or keys alone, against sums written out by head."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lit_probattn.attention import FiSHAttention, SoftmaxAttention
from lit_probattn.attention.own.contract import CHECKS
from tests.attention.fish.oracle import local_maps
from tests.attention.mgk.oracles import combine
from tests.support.helpers import assert_equals_the_sums, cpu_backends
from tests.support.slow import FEWER, some_of, taking_turns

BATCH, EMBED, HEAD = 2, 11, 5
SIZES = {"num_heads": 7, "num_global_heads": 3, "noise": "none"}
MIXINGS = {
    "linear": {},
    "affine": {"mixing_bias": "all"},
    "simplex": {"mixing": "simplex"},
    "shared": {"mixer": "shared"},
    "mlp": {"mixer": "mlp", "mixing_bias": "all"},
    "three layers": {"mixer": "mlp", "mixer_ratios": [2, 1.5], "mixing_bias": "hidden"},
    "as written": {"mixer": "relu_sum"},
}
ON = pytest.mark.parametrize("mix_on", ["query", "key"])
EVERY = pytest.mark.parametrize("name", MIXINGS)
CALLS = [((13, 13), "none", True), ((5, 17), "key", False), ((17, 7), "key+pairs+bias", False)]


def mixed(mix_on, name="mlp", **more):
    options = {**SIZES, **MIXINGS[name], **more}
    layer = FiSHAttention(EMBED, head_dim=HEAD, mix_on=mix_on, **options).double()
    with torch.no_grad():
        for parameter in layer.core.mixing.parameters():
            parameter.normal_()
    return layer


def oracle(
    query, key, value, *, masks, dropout, mixing, last_bias, num_heads, mix_on, scale_ratio=1.0
):
    given = query if mix_on == "query" else key
    made = local_maps(given.unbind(1), mixing, num_heads, last_bias)
    density = []
    for j in range(num_heads):
        q, k = (made[j], key[:, j]) if mix_on == "query" else (query[:, j], made[j])
        score = torch.einsum("bie,bje->bij", q, k) * scale_ratio / HEAD**0.5
        density.append(score.exp())
    return combine(torch.stack(density, 1), value, masks, dropout)


@ON
@EVERY
@pytest.mark.parametrize("backend", cpu_backends(FiSHAttention(4, 2, noise="none", mix_on="key")))
@pytest.mark.parametrize("share", FEWER)
def test_every_backend_equals_the_sums(mix_on, name, backend, share):
    layer = mixed(mix_on, name)
    for case in some_of(CALLS, share, mix_on, name, backend):
        assert_equals_the_sums(layer, oracle, [backend], case, tolerance=1e-13)


@ON
def test_the_released_order_of_training(mix_on):
    """Linear, ReLU, Linear over the heads, heads last, with both biases; then 1/√E."""
    layer = mixed(mix_on)
    x = torch.randn(BATCH, 13, EMBED, dtype=torch.float64)
    split = {"query": layer.query_proj, "key": layer.key_proj, "value": layer.value_proj}
    heads = {n: p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for n, p in split.items()}
    mixing = layer.core.mixing
    inner = F.relu(F.linear(heads[mix_on].movedim(1, -1), mixing.weights[0], mixing.biases[0]))
    heads[mix_on] = F.linear(inner, mixing.weights[1], mixing.last_bias).movedim(-1, 1)
    weights = ((heads["query"] * HEAD**-0.5) @ heads["key"].mT).softmax(-1)
    expected = layer.out_proj((weights @ heads["value"]).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.weights(x), weights, rtol=0, atol=1e-12)


@ON
def test_the_last_bias_matters_for_queries_alone(mix_on):
    layer, x = mixed(mix_on), torch.randn(BATCH, 13, EMBED, dtype=torch.float64)
    before = layer(x)
    with torch.no_grad():
        layer.core.mixing.last_bias += 1.0
    moved = (layer(x) - before).abs().max().item()
    assert moved > 1e-3 if mix_on == "query" else moved == 0.0
    layer(x).square().sum().backward()
    grad = layer.core.mixing.last_bias.grad.abs().max().item()
    assert grad > 1e-4 if mix_on == "query" else grad == 0.0


@ON
def test_a_linear_mixing_is_a_softmax_layer_with_merged_projections(mix_on):
    layer = mixed(mix_on, "linear")
    plain = SoftmaxAttention(EMBED, 7, head_dim=HEAD).double()
    state = {k: v for k, v in layer.state_dict().items() if not k.startswith("core.")}
    for kind in ("weight", "bias"):
        rows = state[f"{mix_on}_proj.{kind}"].unflatten(0, (3, HEAD))
        merged = torch.einsum("jk,ke...->je...", layer.core.mixing.weights[0], rows)
        state[f"{mix_on}_proj.{kind}"] = merged.flatten(0, 1)
    plain.load_state_dict(state)
    x = torch.randn(BATCH, 13, EMBED, dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mix_on", "check"), taking_turns(["query", "key"], CHECKS))
def test_it_keeps_the_promises_of_every_layer(mix_on, check):
    def make(**more):
        options = {**SIZES, "mixer": "mlp", "mixing_bias": "all", **more}
        return FiSHAttention(11, head_dim=HEAD, mix_on=mix_on, **{**options, "num_heads": 4})

    CHECKS[check].run(make)


@ON
@EVERY
def test_macs_are_those_that_a_counter_finds_and_parameters_are_counted(mix_on, name):
    layer = mixed(mix_on, name).to("meta")
    x = torch.empty(1, 29, EMBED, dtype=torch.float64, device="meta")
    layer.backend = "reference"
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() // 2 == layer.cost(29).macs
    assert layer.cost(29).num_parameters == sum(p.numel() for p in layer.parameters())
    assert layer.cost(29).break_even_head_dim is None


def test_operations_by_the_rule_of_appendix_d():
    n, c, e, h, g = 29, EMBED, HEAD, 7, 3
    layer = mixed("query", "mlp", bias=False)
    pair = h * (2 * g - 1) + h * (2 * h - 1) + h + h + h  # two products, biases and ReLU
    expected = n * n * h * (2 * e - 1) + n * e * pair  # scores and mixing
    expected += n * (g + h) * e * (2 * c - 1)  # queries and keys
    expected += n * h * e * (2 * c - 1) + n * h * e * (2 * n - 1) + n * c * (2 * h * e - 1)
    assert layer.cost(n).paper_flops == expected


@ON
@pytest.mark.parametrize("mixer", ["linear", "mlp"])
def test_shifted_windows_with_position_bias(mix_on, mixer):
    """Windows of a Swin model, written out: mixed heads, 1/√E, bias and mask of local heads."""
    timm = pytest.importorskip("timm")
    from lit_probattn.models.images.replace import replace_attention

    sizes = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 12}
    made = timm.models.swin_transformer.SwinTransformer(
        **sizes, depths=(2,), num_heads=(4,), num_classes=3
    )
    factory = partial(FiSHAttention, mix_on=mix_on, mixer=mixer, mixing_bias="all", noise="none")
    replace_attention(made, factory, global_heads=2)
    made = made.double()
    block = made.layers[0].blocks[1]
    layer, windows = block.attn.attention, block.attn
    assert (block.shift_size[0], layer.num_global_heads, layer.num_heads) == (2, 2, 4)
    with torch.no_grad():
        for parameter in block.attn.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(8, 16, 12, dtype=torch.float64, requires_grad=True)
    leaves = [x, *block.attn.parameters()]
    found = block.attn(x, block.attn_mask)
    project = {"query": layer.query_proj, "key": layer.key_proj, "value": layer.value_proj}
    heads = {n: p(x).unflatten(-1, (-1, 3)).transpose(1, 2) for n, p in project.items()}
    mixing = layer.core.mixing
    values = mixing.values(None)
    last = mixing.last_bias  # of keys softmax cancels it
    heads[mix_on] = torch.stack(local_maps(heads[mix_on].unbind(1), values, 4, last), 1)
    scores = torch.einsum("bhie,bhje->bhij", heads["query"], heads["key"]) / 3**0.5
    scores = scores + windows.position_bias()
    scores = scores + block.attn_mask.repeat(2, 1, 1)[:, None] * 1e9  # 0 or -100 there
    out = (scores.softmax(-1) @ heads["value"]).transpose(1, 2).flatten(2)
    expected = layer.out_proj(out)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(found)
    for a, b in zip(
        gradients(found, weight, leaves), gradients(expected, weight, leaves), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def gradients(out, weight, leaves):
    return torch.autograd.grad((out * weight).sum(), leaves, retain_graph=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": "global"}, "mix_on=query has no global scores to add noise to.*noise=none"),
        (
            {"noise": "none", "noise_position": "scaled"},
            "mix_on=query has no global scores .*set noise_position=raw",
        ),
        ({"scale_position": "before"}, "set scale_position=after, received before"),
        ({"mix_on": "value"}, "mix_on must be one of scores, query, key"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        FiSHAttention(EMBED, 7, head_dim=HEAD, **{"mix_on": "query", "noise": "none", **options})
