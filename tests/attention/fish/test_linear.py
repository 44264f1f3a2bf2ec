"""Linear FiSH against loops over positions in float64; causal, padded, cached, with noise."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lit_probattn.attention import LinearFiSHAttention
from lit_probattn.attention.own.contract import CHECKS
from lit_probattn.randomness import RandomKey
from tests.attention.fish.oracle import draw, local_maps
from tests.attention.mgk.oracles import visible_pairs
from tests.support.helpers import (
    assert_equals_the_sums,
    assert_same,
    largest_difference,
    make_call,
    run_with_gradients,
)
from tests.support.slow import FEWER, some_of

BATCH, EMBED, HEAD, VALUE = 2, 11, 5, 3
H, G = 7, 3
SHAPES = [(13, 13), (5, 17), (17, 7), (1, 3)]
TOLERANCE = 1e-11  # float64; normalisers divide by sums that start near 1
GENERAL = {"mixer": "mlp"}
VARIANTS = {
    "lfish": {},
    "lfish simplex": {"mixing": "simplex"},
    "glfish": GENERAL,
    "glfish, no bias": {**GENERAL, "mixing_bias": False},
    "glfish, three layers": {**GENERAL, "mixer_ratios": [2, 3]},
}
CASES = [
    pytest.param(name, noise, backend, id=f"{name}-{noise}-{backend}")
    for name in VARIANTS
    for noise in ("none", "global")
    for backend in ("reference", "blockwise")
]


def make_layer(options, **extra):
    sizes = {"num_heads": H, "num_global_heads": G, "value_head_dim": VALUE}
    options = {**sizes, **options, **extra}
    if options.get("noise") != "none":
        options.setdefault("noise_scale", 0.3)
    layer = LinearFiSHAttention(EMBED, head_dim=HEAD, **options).double()
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if name.startswith(("core.mixing", "core.normalizer")):
                value.normal_()
    return layer


def psi(x):
    return torch.where(x > 0, x + 1, x.exp())


def oracle(
    query,
    key,
    value,
    *,
    masks,
    dropout,
    form,
    mixing,
    last_bias,
    norm_mix,
    noise=None,
    state=None,
):
    """Sum over pairs, one local and one global head at a time; the mlp over states of positions."""
    q, k = psi(query), psi(key)
    batch, rows, cols = q.shape[0], q.shape[2], k.shape[2]
    visible = visible_pairs(masks, batch, 1, rows, cols)[:, 0]
    shift = torch.zeros(batch, G, HEAD, VALUE, dtype=torch.float64)
    if noise is not None:
        shift = mixing.noise_scale[:, None, None] * draw(noise, batch, G, HEAD, VALUE)
    first = mixing.weights[0]
    local = None
    if mixing.mixer == "mlp":
        states = torch.einsum("bin,bgnf,bgne->bgife", visible, k, value) + shift[:, :, None]
        local = local_maps(states.unbind(1), mixing, H, last_bias)
    outputs = []
    for j in range(H):
        top, total = 0.0, 0.0
        for g in range(G):
            pairs = torch.einsum("bif,bnf->bin", q[:, j], k[:, g]) * visible
            total = total + norm_mix[j, g] * pairs.sum(-1, keepdim=True)
            if local is None:
                top = top + first[j, g] * (pairs @ value[:, g] + q[:, j] @ shift[:, g])
        if local is not None:
            top = torch.einsum("bif,bife->bie", q[:, j], local[j])
        out = top / (total + form.eps)
        seen = visible.sum(-1, keepdim=True) > 0
        outputs.append(torch.where(seen, out, 0.0))
    return torch.stack(outputs, 1)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize("share", FEWER)
@pytest.mark.parametrize(("name", "noise", "backend"), CASES)
def test_backend_equals_the_sums(name, noise, backend, share):
    layer = make_layer(VARIANTS[name], noise=noise)
    rng = RandomKey(3, step=5, sample_ids=torch.tensor([41, 7])).fold(2)
    both = [("none", False), ("key", True)]
    cases = [(shape, *settings) for shape in SHAPES for settings in both]
    cases += [(SHAPES[0], "key", False), (SHAPES[0], "none", True)]
    for case in some_of(cases, share, name, noise, backend):
        assert_equals_the_sums(layer, oracle, [backend], case, rng=rng, tolerance=TOLERANCE)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_without_keys_have_no_gradient_without_eps(name):
    CHECKS["rows without keys"].run(partial(make_layer, {**VARIANTS[name], "eps": 0.0}))


@pytest.mark.parametrize("options", [{}, GENERAL])
def test_chunks_of_any_size_agree(options, monkeypatch):
    layer = make_layer(options)
    inputs, call = make_call(layer, 61, 61, "key", True, RandomKey(2))
    layer.backend = "reference"
    expected = run_with_gradients(layer, inputs, call)
    layer.backend = "blockwise"
    for numbers in (1, 3000, 1 << 30):
        budget = {"cpu": numbers, "cuda": numbers}
        monkeypatch.setattr("lit_probattn.attention.fish.linear.CHUNK_STATES", budget)
        monkeypatch.setattr("lit_probattn.attention.linear.chunkwise.SPAN_PAIRS", budget)
        assert_same(run_with_gradients(layer, inputs, call), expected, TOLERANCE)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_from_a_state_equals_the_full_pass(name, is_causal):
    layer = make_layer(VARIANTS[name], noise="global", noise_at_eval=True).eval()
    x = torch.randn(BATCH, 13, EMBED, dtype=torch.float64)
    mask = torch.ones(BATCH, 13, dtype=torch.bool)
    mask[1, 2] = False
    rng = RandomKey(11, step=3, sample_ids=torch.tensor([19, 23]))
    expected = layer(x, key_mask=mask, is_causal=is_causal, rng=rng)
    state = layer.new_cache()
    sizes, parts, start = set(), [], 0
    with torch.no_grad():
        for step in (3, 1, 1, 6, 2):
            part = slice(start, start + step)
            parts.append(
                layer(x[:, part], key_mask=mask[:, part], is_causal=is_causal, cache=state, rng=rng)
            )
            sizes.add(state.num_bytes)
            start += step
    found = torch.cat(parts, 1) if is_causal else parts[-1]
    torch.testing.assert_close(found, expected[:, -found.shape[1] :], rtol=0, atol=TOLERANCE)
    assert sizes == {BATCH * G * HEAD * (VALUE + 1) * 8}
    assert state.length == 13


def test_hard_is_noisy_without_noise_and_noise_repeats_at_evaluation():
    for options in (VARIANTS["lfish"], GENERAL):
        noisy = make_layer(options, noise="global")
        hard = make_layer(options, noise="none")
        hard.load_state_dict({k: v for k, v in noisy.state_dict().items() if "scale" not in k})
        x = torch.randn(BATCH, 13, EMBED, dtype=torch.float64)
        drawn = noisy(x, rng=RandomKey(1, 2))
        assert (drawn - hard(x)).abs().max() > 1e-3
        assert not torch.equal(drawn, noisy(x, rng=RandomKey(1, 3)))
        noisy.eval()
        assert torch.equal(noisy(x, rng=RandomKey(1, 2)), hard(x))
        noisy.core.noise_at_eval = True
        first = noisy(x, rng=RandomKey(1, 2, torch.tensor([4, 9])))
        again = noisy(x.flip(0), rng=RandomKey(1, 77, torch.tensor([9, 4])))
        torch.testing.assert_close(first, again.flip(0), rtol=0, atol=TOLERANCE)


def test_simplex_mixing_of_equal_heads_is_linear_attention():
    """With all global heads alike, any convex mixture is one linear attention head."""
    layer = make_layer({"mixing": "simplex", "noise": "none", "eps": 0.0})
    with torch.no_grad():
        for proj, size in ((layer.key_proj, HEAD), (layer.value_proj, VALUE)):
            for parameter in (proj.weight, proj.bias):
                heads = parameter.unflatten(0, (G, size))
                heads.copy_(heads[:1].expand_as(heads).clone())
    x = torch.randn(BATCH, 13, EMBED, dtype=torch.float64)
    q = F.elu(layer.query_proj(x)).unflatten(-1, (H, HEAD)).transpose(1, 2) + 1
    k = F.elu(layer.key_proj(x)[..., :HEAD]) + 1
    pairs = (q @ k[:, None].mT).tril()
    out = (pairs / pairs.sum(-1, keepdim=True)) @ layer.value_proj(x)[:, None, :, :VALUE]
    expected = layer.out_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, is_causal=True), expected, rtol=0, atol=TOLERANCE)


def test_dropped_values_agree_between_backends():
    layer = make_layer({}, dropout=0.3)
    inputs, call = make_call(layer, 13, 13, "key", True, RandomKey(2))
    layer.backend = "reference"
    expected = run_with_gradients(layer, inputs, call)
    layer.backend = "blockwise"
    found = run_with_gradients(layer, inputs, call)
    assert max(largest_difference(found, expected)) < TOLERANCE
    layer.eval()
    assert largest_difference(run_with_gradients(layer, inputs, call), expected)[0] > 1e-3
