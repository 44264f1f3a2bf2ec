"""FiSH and linear operators as PyTorch sees them: schema, fakes, FLOPs, refusals."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lit_probattn.attention import FiSHAttention, LinearAttention, LinearFiSHAttention, MLKAttention
from lit_probattn.attention.cost.fish import Mixing, mixing_macs
from lit_probattn.kernels.fish.operators import fish_forward
from lit_probattn.measure.counters import torch_flops
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
B, G, H, N, L, E, D, U = 1, 1, 2, 9, 11, 5, 7, 3
CHECKS = (
    *("test_schema", "test_autograd_registration", "test_faketensor"),
    "test_aot_dispatch_dynamic",
)


def draw(*shape):
    return torch.randn(*shape, device=DEVICE).requires_grad_()


def draw_query(heads):
    """Heads beside each other, as projections leave them; gradients are dense nevertheless."""
    return torch.randn(B, N, heads, E, device=DEVICE).transpose(1, 2).requires_grad_()


def fish_arguments(noise, units):
    first = draw(units or H, G)
    second, bias_1 = (draw(H, units), draw(units)) if units else (None, None)
    scale = draw((0, G, units or H)[noise]) if noise else None
    words = torch.randint(2**32, (2 + B,), device=DEVICE) if noise else None
    masks = (torch.rand(B, L, device=DEVICE) < 0.8, torch.rand(B, N, device=DEVICE) < 0.8)
    return (
        *(draw_query(G), draw(B, G, L, E), draw(B, H, L, D), first, bias_1, second, scale),
        *(words, None, *masks, None, draw(1, H, N, L), True, noise, 3, 0.5, 0),
    )


@pytest.mark.parametrize(("noise", "units"), mostly_slow([(0, 0), (1, U), (2, 0)], [(2, 0)]))
def test_fish_passes_opcheck(noise, units):
    operator = torch.ops.lit_probattn.fish_forward.default
    torch.library.opcheck(operator, fish_arguments(noise, units), test_utils=CHECKS)


def test_gradients_of_tensors_without_data_have_the_strides_of_real_ones():
    """Memory is predicted, and models are compiled, with the former."""
    found = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            args = fish_arguments(0, 0)
            out = fish_forward(*args)[0]
            grads = torch.autograd.grad(out, args[:4], torch.ones_like(out))
        found.append([grad.stride() for grad in grads])
    assert found[0] == found[1]
    assert args[0].stride() != found[0][0]


@pytest.mark.parametrize("weighted", mostly_slow([False, True], [True]))
def test_linear_passes_opcheck(weighted):
    heads = H if weighted else 2 * G
    weights = (draw(H, G), draw(H, G), draw(B, G, E, D)) if weighted else (None, None, None)
    mixture = (None, None) if weighted else (draw(G, 2, 1), draw(G, 2, E))
    inputs = (draw_query(heads), draw(B, G, L, E), draw(B, G, L, D))
    masks = (torch.rand(B, L, device=DEVICE) < 0.8, torch.rand(B, G, L, device=DEVICE))
    switches = (1, not weighted, False, True, True, 0.01, 0.7, True)
    args = (*inputs, *mixture, *weights, *masks, *switches)
    torch.library.opcheck(torch.ops.lit_probattn.linear_forward.default, args, test_utils=CHECKS)


FISH = {"num_heads": 3, "num_global_heads": 2}
LAYERS = {
    "fish": lambda: FiSHAttention(16, head_dim=E, **FISH),
    "hard fish": lambda: FiSHAttention(16, head_dim=E, **FISH, noise="none"),
    "gfish": lambda: FiSHAttention(16, head_dim=E, **FISH, mixer="mlp", mixer_ratios=[2]),
    "linear": lambda: LinearAttention(16, 4, head_dim=E, num_kv_heads=2),
    "mlk": lambda: MLKAttention(16, 2, head_dim=E),
    "lfish": lambda: LinearFiSHAttention(16, head_dim=E, **FISH, noise="none"),
}


def fish_scores_macs(layer, length):
    mixing = layer.core.mixing
    kind = Mixing(mixing.widths, mixing.mixer, noise=layer.core.noise_kind)
    return length * length * (layer.num_global_heads * layer.head_dim + mixing_macs(kind))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["fish", "hard fish", "gfish"])
def test_fish_counts_the_products_of_the_formula(name, train):
    """As the reference; training counts the scores once more, which backward computes again."""
    layer = LAYERS[name]().to("meta")
    layer.backend = "triton"
    x = torch.empty(1, 29, 16, device="meta", requires_grad=True)

    def step():
        out = layer(x)
        if train:
            out.sum().backward()

    macs = layer.cost(29).macs
    expected = 3 * macs + fish_scores_macs(layer, 29) if train else macs
    assert torch_flops(step) == 2 * expected


@pytest.mark.parametrize("name", ["linear", "mlk"])
def test_linear_counts_the_products_of_the_formula(name):
    layer = LAYERS[name]().to("meta")
    layer.backend = "triton"
    x = torch.empty(1, 29, 16, device="meta")
    assert torch_flops(lambda: layer(x)) == 2 * layer.cost(29).macs


@pytest.mark.parametrize(
    ("layer", "call", "reason"),
    [
        (lambda: FiSHAttention(16, head_dim=E, **FISH, mixer="relu_sum"), {}, "mixer=relu_sum"),
        (
            lambda: FiSHAttention(16, head_dim=E, **FISH, mixer="mlp", mixer_ratios=[1, 1]),
            {},
            "3 matrices",
        ),
        (lambda: FiSHAttention(16, head_dim=129, **FISH), {}, "received 129"),
        (
            lambda: FiSHAttention(16, 40, head_dim=E, num_global_heads=17),
            {},
            "global maps, received 17",
        ),
        (lambda: LinearFiSHAttention(16, head_dim=E, **FISH, mixer="mlp"), {}, "through a ReLU"),
        (
            lambda: MLKAttention(16, 2, head_dim=E),
            {"attn_mask": torch.ones(3, 3, dtype=torch.bool)},
            "attn_mask",
        ),
        (
            lambda: LinearAttention(16, 2, head_dim=64, feature_map="favor"),
            {},
            "features of a state, received 267",
        ),
    ],
)
def test_what_kernels_cannot_do_is_refused_with_what_works(layer, call, reason):
    layer = layer().to(DEVICE)
    layer.backend = "triton"
    call = {k: v.to(DEVICE) for k, v in call.items()}
    with pytest.raises(NotImplementedError, match=reason) as caught:
        layer(torch.randn(2, 3, 16, device=DEVICE), **call)
    assert "reference" in str(caught.value)
    layer.backend = "auto"
    assert layer(torch.randn(2, 3, 16, device=DEVICE), **call).shape == (2, 3, 16)


def test_decoding_from_a_state_and_double_precision_are_refused():
    layer = MLKAttention(16, 2, head_dim=E, backend="triton").to(DEVICE)
    x = torch.randn(2, 3, 16, device=DEVICE)
    with pytest.raises(NotImplementedError, match="from a state"):
        layer(x, is_causal=True, cache=layer.new_cache())
    layer = FiSHAttention(16, head_dim=E, **FISH, backend="triton").to(DEVICE).double()
    with pytest.raises(NotImplementedError, match="float64"):
        layer(x.double())


def test_a_broadcast_bias_that_wants_a_gradient_is_refused():
    layer = FiSHAttention(16, head_dim=E, **FISH, backend="triton").to(DEVICE)
    x, bias = torch.randn(2, 3, 16, device=DEVICE), torch.randn(1, 3, 1, 3, device=DEVICE)
    assert layer(x, bias=bias).isfinite().all()
    with pytest.raises(NotImplementedError, match="blockwise"):
        layer(x, bias=bias.requires_grad_())
