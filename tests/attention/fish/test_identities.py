"""The exact equivalences of FiSH: each limit, fast form and symmetry as an equation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lit_probattn.attention import FiSHAttention, SoftmaxAttention
from lit_probattn.attention.variant import concatenate_heads
from lit_probattn.randomness import RandomKey

BATCH, LENGTH, EMBED, HEAD = 2, 13, 11, 5
H, G = 7, 3
CLOSE = {"rtol": 0.0, "atol": 1e-12}


def layer_of(**options):
    options = {"num_heads": H, "num_global_heads": G, "noise": "none", **options}
    layer = FiSHAttention(EMBED, head_dim=HEAD, **options).double()
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if name.startswith("core.mixing.weights") and options.get("mixing_init") != "copy":
                value.normal_()
    return layer


def inputs(*shape):
    return torch.randn(*(shape or (BATCH, LENGTH, EMBED)), dtype=torch.float64)


def copy_parameters(source, target, **changed):
    state = {k: v for k, v in source.state_dict().items() if k in target.state_dict()}
    target.load_state_dict({**target.state_dict(), **state, **changed})
    return target


def test_1_concatenated_heads_give_the_mixed_scores():
    query, key = inputs(BATCH, G, LENGTH, HEAD), inputs(BATCH, G, 17, HEAD)
    mix = inputs(H, G)
    wide_query, wide_key = concatenate_heads(query, key, mix)
    expected = torch.einsum("jk,bknd,bkmd->bjnm", mix, query, key)
    torch.testing.assert_close(wide_query @ wide_key.mT, expected, **CLOSE)
    assert wide_key.shape == (BATCH, 1, 17, G * HEAD)
    value = inputs(BATCH, H, 17, G * HEAD)
    fused = F.scaled_dot_product_attention(
        wide_query, wide_key.expand(-1, H, -1, -1), value, scale=HEAD**-0.5
    )
    torch.testing.assert_close(fused, (expected / HEAD**0.5).softmax(-1) @ value, **CLOSE)


def test_2_local_forms_lie_in_the_span_of_the_global_ones():
    layer = layer_of(bias=False)
    x = inputs(1, 29, EMBED)
    wq = layer.query_proj.weight.unflatten(0, (G, HEAD))
    wk = layer.key_proj.weight.unflatten(0, (G, HEAD))
    forms = torch.einsum("jk,kdc,kde->jce", layer.core.mixing.weights[0], wq, wk)
    expected = (torch.einsum("bnc,jce,bme->bjnm", x, forms, x) / HEAD**0.5).softmax(-1)
    torch.testing.assert_close(layer.weights(x), expected, **CLOSE)
    narrow = FiSHAttention(
        EMBED, H, head_dim=2, num_global_heads=G, noise="none", bias=False
    ).double()
    local = narrow.core.scores(narrow.call(x))
    ranks = torch.linalg.matrix_rank(local[0])
    assert (ranks <= G * 2).all()
    assert (ranks > 2).any()


def test_3_identity_mixing_is_multi_head_attention():
    x = inputs()
    softmax = SoftmaxAttention(EMBED, H, head_dim=HEAD).double()
    expected = softmax(x, is_causal=True)
    eye = torch.eye(H, dtype=torch.float64)
    fish = layer_of(num_global_heads=H)
    copy_parameters(softmax, fish, **{"core.mixing.weights.0": eye})
    torch.testing.assert_close(fish(x, is_causal=True), expected, **CLOSE)
    gfish = layer_of(num_global_heads=H, mixer="mlp")
    shift = torch.full((H,), 50.0, dtype=torch.float64)
    names = {
        "core.mixing.weights.0": eye,
        "core.mixing.weights.1": eye,
        "core.mixing.biases.0": shift,
    }
    copy_parameters(softmax, gfish, **names)
    torch.testing.assert_close(gfish(x, is_causal=True), expected, **CLOSE)


def test_3_one_global_head_gives_one_map_up_to_factors():
    layer = layer_of(num_global_heads=1)
    x = inputs()
    scores = layer.core.scores(layer.call(x))
    factors = layer.core.mixing.weights[0][:, 0]
    ratio = factors / factors[0]
    torch.testing.assert_close(scores, scores[:, :1] * ratio[None, :, None, None], **CLOSE)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blockwise"])
def test_4_hard_mish_is_one_softmax_over_concatenated_values(backend):
    layer = layer_of(mixer="shared", backend=backend)
    x = inputs()
    value = layer.value_proj(x)  # (B, N, H·E): one head of width H·E
    p = layer.core.mixing.weights[0][0]
    query = layer.query_proj(x).unflatten(-1, (G, HEAD)) * p[:, None]
    scores = query.flatten(2) @ layer.key_proj(x).mT / HEAD**0.5
    expected = layer.out_proj(scores.softmax(-1) @ value)
    torch.testing.assert_close(layer(x), expected, **CLOSE)
    maps = layer.weights(x)
    assert torch.equal(maps, maps[:, :1].expand_as(maps))


@pytest.mark.parametrize("mixer", ["linear", "shared", "mlp", "relu_sum"])
@pytest.mark.parametrize("noise", ["global", "local", "local_global"])
def test_5_hard_is_noisy_without_noise(mixer, noise):
    noisy = layer_of(mixer=mixer, noise=noise)
    hard = copy_parameters(noisy, layer_of(mixer=mixer))
    x, rng = inputs(), RandomKey(5)
    assert (noisy(x, rng=rng) - hard(x)).abs().max() > 1e-6
    torch.testing.assert_close(noisy.eval()(x, rng=rng), hard(x), **CLOSE)
    with torch.no_grad():
        noisy.core.noise_scale.theta.zero_()
    torch.testing.assert_close(noisy.train()(x, rng=rng), hard(x), **CLOSE)


def test_5_local_noise_is_hard_fish_plus_a_bias():
    noisy = layer_of(noise="local", noise_scale=0.5)
    hard = copy_parameters(noisy, layer_of())
    x, rng = inputs(), RandomKey(5)
    drawn = noisy.core.variant(noisy.call(x, rng=rng)).noise
    epsilon = drawn.draw(x, block=block(LENGTH, LENGTH), num_maps=H)
    c = noisy.core.mixing.weights[0] @ noisy.core.noise_scale()
    bias = c[:, None, None] * epsilon / HEAD**0.5
    torch.testing.assert_close(noisy(x, rng=rng), hard(x, bias=bias), **CLOSE)


def block(rows, cols):
    from lit_probattn.attention.masks import Block

    return Block(range(rows), range(cols))


@pytest.mark.parametrize("mixer", ["linear", "mlp", "relu_sum"])
def test_6_last_bias_cancels_and_has_no_gradient(mixer):
    with_bias = layer_of(mixer=mixer, mixing_bias="all")
    without = copy_parameters(with_bias, layer_of(mixer=mixer))
    x = inputs()
    assert with_bias.core.mixing.last_bias.shape == (H,)
    scores = with_bias.core.scores(with_bias.call(x))
    shifted = scores + with_bias.core.mixing.last_bias[:, None, None]
    torch.testing.assert_close(shifted.softmax(-1), with_bias.weights(x), **CLOSE)
    out = with_bias(x)
    torch.testing.assert_close(out, without(x), **CLOSE)
    out.sum().backward()
    assert not with_bias.core.mixing.last_bias.grad.any()


def test_7_scale_and_first_bias_exchange():
    after = layer_of(mixer="mlp")
    scaled = after.core.mixing.biases[0].detach() / HEAD**0.5
    before = layer_of(mixer="mlp", scale_position="before")
    copy_parameters(after, before, **{"core.mixing.biases.0": scaled})
    x = inputs()
    torch.testing.assert_close(before(x), after(x), **CLOSE)
    unbiased = layer_of(mixer="mlp", mixing_bias="none")
    other = copy_parameters(
        unbiased, layer_of(mixer="mlp", mixing_bias="none", scale_position="before")
    )
    torch.testing.assert_close(other(x), unbiased(x), **CLOSE)


@pytest.mark.parametrize("mixer", ["linear", "mlp"])
def test_8_heads_may_be_permuted(mixer):
    layer = layer_of(mixer=mixer, mixing_bias="all")
    state = layer.state_dict()
    order = torch.tensor([2, 0, 1])
    local = torch.randperm(H)

    def rows(name, perm):
        heads = state[name].unflatten(0, (len(perm), -1))[perm]
        return heads.flatten(0, 1)

    changed = {
        f"{part}_proj.{kind}": rows(f"{part}_proj.{kind}", order)
        for part in ("query", "key")
        for kind in ("weight", "bias")
    }
    changed |= {
        f"value_proj.{kind}": rows(f"value_proj.{kind}", local) for kind in ("weight", "bias")
    }
    changed["out_proj.weight"] = (
        state["out_proj.weight"].unflatten(1, (H, -1))[:, local].flatten(1, 2)
    )
    first = state["core.mixing.weights.0"][:, order]
    changed["core.mixing.weights.0"] = first[local] if mixer == "linear" else first
    if mixer == "mlp":
        changed["core.mixing.weights.1"] = state["core.mixing.weights.1"][local]
    changed["core.mixing.last_bias"] = state["core.mixing.last_bias"][local]
    other = copy_parameters(layer, layer_of(mixer=mixer, mixing_bias="all"), **changed)
    x = inputs()
    torch.testing.assert_close(other(x), layer(x), **CLOSE)


def test_9_two_layers_contain_the_linear_mixing():
    linear = layer_of()
    p = linear.core.mixing.weights[0].detach()
    eye = torch.eye(G, dtype=torch.float64)
    free = torch.zeros(H - 2 * G, G, dtype=torch.float64)
    two = layer_of(mixer="mlp", mixing_bias="none")
    names = {
        "core.mixing.weights.0": torch.cat([eye, -eye, free]),
        "core.mixing.weights.1": torch.cat([p, -p, p.new_zeros(H, H - 2 * G)], 1),
    }
    copy_parameters(linear, two, **names)
    x = inputs()
    torch.testing.assert_close(two(x), linear(x), **CLOSE)


@pytest.mark.parametrize(
    "options", [{"mixer": "linear"}, {"mixer": "mlp"}, {"mixer": "mlp", "mixer_ratios": [0.9, 1.1]}]
)
def test_copies_start_as_the_global_heads(options):
    layer = layer_of(**options, mixing_init="copy")
    source = [j * G // H for j in range(H)]
    softmax = SoftmaxAttention(EMBED, H, head_dim=HEAD).double()
    changed = {}
    for part in ("query", "key"):
        for kind in ("weight", "bias"):
            heads = layer.state_dict()[f"{part}_proj.{kind}"].unflatten(0, (G, HEAD))
            changed[f"{part}_proj.{kind}"] = heads[source].flatten(0, 1)
    for part in ("value", "out"):
        for kind in ("weight", "bias"):
            changed[f"{part}_proj.{kind}"] = layer.state_dict()[f"{part}_proj.{kind}"]
    softmax.load_state_dict(changed)
    x = inputs()
    torch.testing.assert_close(layer(x), softmax(x), **CLOSE)
    layer(x).square().sum().backward()
    assert all(w.grad.abs().sum() > 0 for w in layer.core.mixing.weights)
