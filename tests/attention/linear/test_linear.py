"""Linear attention: every backend against float64 loops, feature maps, switches, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch

from lit_probattn.attention import (
    LinearAttention,
    MLKAttention,
    ReleasedLinearAttention,
    ReleasedMLKAttention,
)
from lit_probattn.attention.linear.features import (
    FeatureMap,
    feature_normals,
    orthogonal_projection,
)
from lit_probattn.attention.linear.functions import LinearForm, finish
from lit_probattn.attention.masks import make_masks
from lit_probattn.kernels.cpu import selftest
from lit_probattn.randomness import RandomKey
from tests.attention.linear.oracle import linear_oracle
from tests.support.helpers import (
    assert_equals_the_sums,
    largest_difference,
    run_with_gradients,
    use_backend,
    use_oracle,
)
from tests.support.slow import FEWER, mostly_slow, some_of

BATCH, EMBED, HEAD = 2, 11, 3
MASKS = ["none", "key", "key+pairs"]
SHAPES = [(13, 13), (5, 7), (7, 5), (1, 17), (3, 1)]
TOLERANCE = 1e-12  # float64, sums of at most 17 terms of order one
KINDS = {
    "linear, elu": (LinearAttention, {"num_heads": 3}),
    "linear, relu": (LinearAttention, {"num_heads": 3, "feature_map": "relu"}),
    "linear, dpfp-2": (
        LinearAttention,
        {"num_heads": 3, "feature_map": "dpfp", "dpfp_nu": 2, "feature_norm": "sum"},
    ),
    "linear, favor": (
        LinearAttention,
        {"num_heads": 3, "feature_map": "favor", "num_features": 7},
    ),
    "linear, grouped, value size 5": (
        LinearAttention,
        {"num_heads": 6, "num_kv_heads": 3, "value_head_dim": 5},
    ),
    "linear, no denominator": (
        ReleasedLinearAttention,
        {"num_heads": 3, "denominator": "sqrt_len"},
    ),
    "mlk, elu": (MLKAttention, {"num_heads": 3}),
    "mlk, K=3, relu": (MLKAttention, {"num_heads": 3, "num_components": 3, "feature_map": "relu"}),
    "linear, favor, normalised": (
        LinearAttention,
        {"num_heads": 3, "feature_map": "favor", "num_features": 7, "feature_norm": "sum"},
    ),
    "mlk, dpfp, multi-query": (
        MLKAttention,
        {"num_heads": 2, "num_kv_heads": 1, "feature_map": "dpfp"},
    ),
    "mlk, favor": (MLKAttention, {"num_heads": 3, "feature_map": "favor", "num_features": 7}),
    "mlk, before, no denominator": (
        ReleasedMLKAttention,
        {"num_heads": 3, "mix": "before", "denominator": "sqrt_len", "padded_len": 19},
    ),
    "mlk, per position, eps": (
        ReleasedMLKAttention,
        {
            "num_heads": 3,
            "prior_share": "head_position",
            "max_positions": 17,
            "feature_norm": "sum",
            "eps": 1e-5,
            "output_scale": "inv_sqrt_head_dim",
        },
    ),
    "smlk, elu": (MLKAttention, {"num_heads": 3, "shifted_keys": True}),
}

BACKENDS = ["reference", "blockwise", *([] if selftest.failure() else ["native"])]


def make(name, **options):
    cls, kind = KINDS[name]
    layer = cls(EMBED, head_dim=HEAD, **kind, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():  # priors differ by component and position
            parameter += 0.1 * torch.rand_like(parameter)
    return layer


# Every kind is causal once and not causal once, with two of the masks, which take turns.
FAST = [
    (name, MASKS[(number + causal) % 3], bool(number % 2) != bool(causal))
    for number, name in enumerate(KINDS)
    for causal in (0, 1)
]


@pytest.mark.parametrize("share", FEWER)
@pytest.mark.parametrize(
    ("name", "masks", "is_causal"),
    mostly_slow(itertools.product(KINDS, MASKS, [False, True]), FAST),
)
def test_backends_equal_loops_over_the_sums(name, masks, is_causal, share):
    layer = make(name).eval()
    backends = BACKENDS[: 1 if masks == "key+pairs" else len(BACKENDS)]
    # Products of rectified features can add up to little, by which sums are divided.
    tolerance = TOLERANCE if "dpfp" in name else TOLERANCE / 10
    shapes = SHAPES if masks == "key" else SHAPES[:3]
    for shape in some_of(shapes, share, name, masks, is_causal):
        case = (shape, masks, is_causal)
        square = shape[0] == shape[1] or not is_causal
        here = [name for name in backends if square or name != "native"]
        assert_equals_the_sums(layer, linear_oracle, here, case, tolerance=tolerance)


@pytest.mark.parametrize("name", ["linear, elu", "linear, favor", "mlk, elu", "smlk, elu"])
def test_dropout_is_the_same_in_both_forms(name):
    x = torch.randn(BATCH, 13, EMBED, dtype=torch.float64)
    key = RandomKey(3, 5, torch.tensor([17, 4]))
    found = {}
    for backend in [*BACKENDS, "oracle"]:
        torch.manual_seed(0)
        layer = make(name, dropout=0.4).train()
        if backend == "oracle":
            use_oracle(layer, linear_oracle)
        else:
            layer.backend = backend
        found[backend] = run_with_gradients(
            layer, [x], lambda leaves, layer=layer: layer(leaves[0], is_causal=True, rng=key)
        )
    for backend in BACKENDS:
        assert max(largest_difference(found[backend], found["oracle"])) < TOLERANCE
    torch.manual_seed(0)
    kept = make(name).train()(x, is_causal=True, rng=key)
    assert (kept - found["oracle"][0]).abs().max() > 1e-3


def test_favor_estimates_the_softmax_kernel():
    """The mean over draws of φ(q)·φ(k) is exp(q·k/√E); its spread bounds the tolerance."""
    head, draws = 5, 200
    q, k = torch.randn(3, head, dtype=torch.float64), torch.randn(4, head, dtype=torch.float64)
    x, y = q * head**-0.25, k * head**-0.25
    estimates = []
    for step in range(draws):
        w = orthogonal_projection(feature_normals(RandomKey(1, step), 10, head))
        rows = torch.exp(x @ w.T - x.square().sum(-1, keepdim=True) / 2)
        cols = torch.exp(y @ w.T - y.square().sum(-1, keepdim=True) / 2)
        estimates.append(rows @ cols.T / 10)
    estimates = torch.stack(estimates)
    error = estimates.mean(0) - torch.exp(q @ k.T / head**0.5)
    assert (error.abs() < 4.5 * estimates.std(0) / draws**0.5).all()


def test_favor_features_are_orthogonal_and_the_layer_uses_them():
    w = orthogonal_projection(feature_normals(RandomKey(1), 7, 5))
    gram = w[:5] @ w[:5].T
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-12, rtol=0)
    features = FeatureMap("favor")
    x = torch.randn(2, 3, 13, 5, dtype=torch.float64)
    for part in (features.query(x, w), features.key(x, w)[0]):
        assert part.shape == (2, 3, 13, 7)
        assert part.max() == 1.0  # the largest exponent is taken out
        assert part.min() > 0


def test_favor_is_redrawn_by_the_key_in_training_and_fixed_in_evaluation():
    layer = make("linear, favor")
    x = torch.randn(BATCH, 13, EMBED, dtype=torch.float64)
    keys = [RandomKey(3, step) for step in (1, 1, 2)]
    layer.train()
    a, b, c = (layer(x, rng=key) for key in keys)
    assert torch.equal(a, b)
    assert (a - c).abs().max() > 1e-3
    assert (a - layer(x, rng=keys[0].fold(1))).abs().max() > 1e-3
    # Micro-batches of one step share their features.
    one = layer(x[1:], rng=RandomKey(3, 1, torch.tensor([9])))
    torch.testing.assert_close(one, a[1:], atol=1e-14, rtol=0)
    layer.eval()
    d, e = (layer(x, rng=key) for key in (keys[0], keys[2]))
    assert torch.equal(d, e)
    copy = make("linear, favor").eval()
    copy.load_state_dict(layer.state_dict())
    assert torch.equal(copy(x), d)


def test_favor_survives_keys_of_large_norm():
    """exp(−‖k‖²/2) of every key underflows in float32; the common factor prevents it."""
    layer = make("linear, favor").eval()
    x = torch.randn(BATCH, 13, EMBED, dtype=torch.float64)
    with torch.no_grad():
        layer.key_proj.bias += 14.0
    keys = layer.call(x).key / HEAD**0.25
    assert keys.square().sum(-1).min() / 2 > 104
    exact = layer(x)
    assert (exact - layer.out_proj.bias).abs().max() > 0.1
    torch.testing.assert_close(layer.float()(x.float()).double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_favor_decodes_keys_of_large_norm_behind_masked_tokens(step):
    """Masked tokens have no factor: one of theirs would lose the keys, which underflow."""
    layer = make("linear, favor").eval().float()
    with torch.no_grad():
        layer.key_proj.bias += 14.0
    x, mask = torch.randn(1, 11, EMBED), torch.arange(11)[None] >= 4

    def decoded(x, mask):
        cache = layer.new_cache()
        parts = zip(x.split(step, 1), mask.split(step, 1), strict=True)
        return torch.cat([layer(x, key_mask=m, is_causal=True, cache=cache) for x, m in parts], 1)

    found, alone = decoded(x, mask)[:, 4:], decoded(x[:, 4:], mask[:, 4:])
    assert (alone - layer.out_proj.bias).abs().max() > 0.1
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-3)


def test_normalised_favor_features_do_not_depend_on_other_keys():
    """A key whose features are e³⁰⁰ below those of another has shares and gradients, too."""
    features, x = FeatureMap("favor", norm="sum"), torch.randn(1, 1, 2, 5)
    x[..., 1, :] *= 40.0 / x[..., 1, :].norm()
    x = x.requires_grad_()
    w = orthogonal_projection(feature_normals(RandomKey(1), 7, 5)).float()
    found = features.key(x, w)[0]
    scaled = x.detach().double() / 5**0.25
    torch.testing.assert_close(
        found.double(), (scaled @ w.double().mT).softmax(-1), atol=1e-5, rtol=0
    )
    (grad,) = torch.autograd.grad(found[..., 0].sum(), x)
    assert grad.isfinite().all()


def test_favor_factor_of_a_mixture_is_that_of_its_largest_component():
    """Components whose features are e¹⁰⁰ apart: the factor of the smaller would cut the larger."""
    layer = make("mlk, favor").eval()
    with torch.no_grad():
        layer.key_proj.bias.view(3, 2, HEAD)[:, 0] += 14.0
    x = torch.randn(BATCH, 13, EMBED, dtype=torch.float64)
    sizes = layer.call(x).key.square().sum(-1) / (2 * HEAD**0.5)  # (B, H, K, L)
    assert (sizes[:, :, 0].amin(-1) - sizes[:, :, 1].amax(-1)).min() > 100
    use_oracle(layer, linear_oracle)
    expected = layer(x)
    for backend in BACKENDS:
        use_backend(layer, backend)
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", ["linear, elu", "mlk, elu"])
def test_half_precision_keeps_sums_in_single_precision(name, backend):
    """4096 keys in bfloat16: sums in bfloat16 would stop growing after 256."""
    layer = make(name, backend=backend).eval()
    x = torch.rand(1, 4096, EMBED, dtype=torch.float64)
    exact = layer(x, is_causal=True)
    low = layer.to(torch.bfloat16)(x.to(torch.bfloat16), is_causal=True)
    assert low.dtype == torch.bfloat16
    rounded = layer.double()  # the weights that the low-precision layer had
    reference = rounded(x.to(torch.bfloat16).double(), is_causal=True)
    assert (low.double() - reference).abs().max() < 2**-6 * exact.abs().max()
    layer.backend = "auto"  # the C library does not continue from a state
    state = layer.to(torch.bfloat16).new_cache()
    layer(x[:, :3].to(torch.bfloat16), is_causal=True, cache=state)
    assert state.sums.dtype == torch.float32


def test_cost_of_the_specification():
    sizes = {"embed_dim": 64, "head_dim": 32}
    assert LinearAttention(**sizes, num_heads=8).cost(4096).paper_flops == 670_785_280


def test_refusals_name_what_works():
    layer, x = make("linear, elu"), torch.randn(BATCH, 5, EMBED, dtype=torch.float64)
    with pytest.raises(ValueError, match="pass attn_mask to hide pairs, or use a softmax variant"):
        layer(x, bias=torch.zeros(5, 5, dtype=torch.float64))
    layer.backend = "blockwise"
    with pytest.raises(NotImplementedError, match=r"attn_mask.*use one of: auto, reference"):
        layer(x, attn_mask=torch.ones(5, 5, dtype=torch.bool))
    if "native" in BACKENDS:
        layer.backend, longer = "native", torch.cat([x, x], 1)
        with pytest.raises(NotImplementedError, match=r"as many keys as queries, received 5 .* 10"):
            layer(x, longer, longer, is_causal=True)
    layer.backend = "auto"
    with pytest.raises(NotImplementedError, match="no backend supports this call"):
        layer(x, attn_mask=torch.ones(5, 5, dtype=torch.bool), cache=layer.new_cache())
    with pytest.raises(NotImplementedError, match="has no backend 'sdpa'"):
        make("linear, elu", backend="sdpa")(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_map": "dpfp", "dpfp_nu": 6}, r"from 1 to 2·head_dim − 1 = 5, received 6"),
        ({"eps": -1.0}, "eps must be in"),
        ({"padded_len": 0}, "padded_len must be at least 1, received 0"),
        ({"num_features": 7}, "num_features is for feature_map=favor"),
        ({"num_features": 0, "feature_map": "favor"}, "at least 1, received 0"),
        ({"feature_map": "favor", "eps": 1e-5}, "needs denominator=sum and eps=0"),
    ],
)
def test_contradicting_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ReleasedLinearAttention(EMBED, 3, head_dim=HEAD, **options)


def test_dpfp_has_twice_the_head_size_of_features_by_default():
    """ν = 1: F = 2 E."""
    layer = LinearAttention(EMBED, 3, head_dim=HEAD, feature_map="dpfp")
    assert layer.core.kind_of_features.number == 2 * HEAD


def test_one_random_feature_is_enough():
    layer = LinearAttention(EMBED, 3, head_dim=HEAD, feature_map="favor", num_features=1)
    assert layer.core.kind_of_features.number == 1


@pytest.mark.parametrize(("head_dim", "number"), [(1, 1), (2, 2), (3, 4), (64, 267)])
def test_favor_has_e_ln_e_features_by_default(head_dim, number):
    """0, 1.4, 3.3 and 266.2, rounded up; no fewer than E."""
    layer = LinearAttention(EMBED, 3, head_dim=head_dim, feature_map="favor")
    assert layer.core.kind_of_features.number == number


def test_a_call_that_is_refused_leaves_its_cache_as_it_was():
    layer, x = make("linear, elu"), torch.randn(BATCH, 5, EMBED, dtype=torch.float64)
    cache = layer.new_cache()
    with pytest.raises(ValueError, match="pass attn_mask to hide pairs"):
        layer(x, bias=torch.zeros(5, 5, dtype=torch.float64), cache=cache)
    assert cache.length == 0
    torch.testing.assert_close(layer(x, is_causal=True, cache=cache), layer(x, is_causal=True))


def test_the_slope_of_elu_at_zero_is_one_for_transforms_too():
    """Padding gives vectors of zeros, where the two branches of the feature map meet."""
    features, x = FeatureMap("elu"), torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)

    def total(x):
        return features.query(x, None).sum()

    slope = torch.autograd.grad(total(given := x.clone().requires_grad_()), given)[0]
    torch.testing.assert_close(slope, torch.tensor([-2.0, 0.0, 0.0]).double().exp())
    torch.testing.assert_close(torch.func.grad(total)(x), slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients_without_a_sum_are_zero_and_faint_ones_have_no_gradient(dtype):
    """Between the least number and its root a row keeps its value; a gradient would overflow."""
    least = torch.finfo(dtype).tiny
    total = torch.tensor([0.0, least * 10, least**0.5 / 2, 0.5], dtype=dtype)[:, None]
    numerator = (total * torch.tensor([1.0, 3.0], dtype=dtype)).requires_grad_()
    total.requires_grad_()
    found = finish(numerator, total, 8, LinearForm(FeatureMap()), make_masks(1, 1, 4, 4))
    expected = torch.tensor([[0.0, 0.0], [1.0, 3.0], [1.0, 3.0], [1.0, 3.0]], dtype=dtype)
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(found.sum(), (numerator, total))
    live = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=dtype)[:, None]
    assert torch.equal(grads[0], 2.0 * live.expand(4, 2))
    assert torch.equal(grads[1], -8.0 * live)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("cls", [ReleasedLinearAttention, ReleasedMLKAttention])
def test_no_tokens_have_no_length_to_divide_by(cls, lengths):
    layer = cls(16, 2, denominator="sqrt_len")
    query, key = (torch.randn(2, length, 16, requires_grad=True) for length in lengths)
    for backend in ("reference", "blockwise", "auto"):
        layer.backend = backend
        out = layer(query, key)
        out.sum().backward()
        assert out.equal(layer.out_proj.bias.expand_as(query))
        assert not query.grad.any()
        assert not key.grad.any()
