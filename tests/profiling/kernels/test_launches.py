"""How many launches a call takes, and that they are counted."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.attention import (
    FiSHAttention,
    HeadCall,
    LinearAttention,
    LinearFiSHAttention,
    MGKAttention,
    MLKAttention,
    SoftmaxAttention,
)
from lit_probattn.kernels.runtime import Launch, forced
from lit_probattn.randomness import RandomKey
from profiling.kernels.cases import Case
from profiling.kernels.parity import make_inputs, run_heads
from tests.profiling.kernels.launches import count_bytes, count_launches

_2_OF_8 = {"num_heads": 8, "num_global_heads": 2}
LAYERS = {
    "softmax": (SoftmaxAttention, {}),
    "gaussian": (SoftmaxAttention, {"score": "gaussian"}),
    "mgk": (MGKAttention, {}),
    "mgk, own variances": (MGKAttention, {"learn_variance": True}),
    "mgk, hard": (MGKAttention, {"e_step": "hard"}),
    "smgk": (MGKAttention, {"shifted_keys": True}),
    "smgk, own variances": (MGKAttention, {"shifted_keys": True, "learn_variance": True}),
    "fish, hard": (FiSHAttention, {"num_heads": 8, "num_global_heads": 2, "noise": "none"}),
    "fish": (FiSHAttention, {"num_heads": 8, "num_global_heads": 4}),
    "linear": (LinearAttention, {"feature_norm": "sum"}),
    "mlk": (MLKAttention, {}),
    "smlk": (MLKAttention, {"shifted_keys": True}),
    "linear fish, hard": (LinearFiSHAttention, {**_2_OF_8, "noise": "none"}),
}


def launches(name, head_dim, masks=()):
    """Launches of the forward and the backward pass, parameters included."""
    cls, options = LAYERS[name]
    layer = cls(64, head_dim=head_dim, **{"num_heads": 4, **options})
    case = Case("", cls, masks=masks)
    inputs = make_inputs(layer, case, 192, 192, torch.bfloat16, seed=0, clear=False)
    leaves = [x.detach().requires_grad_() for x in inputs.tensors]
    call = HeadCall(*leaves, inputs.masks, rng=RandomKey(3))
    made = []
    forward = count_launches(lambda: made.append(run_heads(layer, "triton", call)))
    leaves += layer.core.parameters()
    cotangent = inputs.cotangent.to(made[0].dtype)
    backward = count_launches(lambda: torch.autograd.grad(made[0], leaves, cotangent))
    return forward, backward


@pytest.mark.parametrize(("head_dim", "masks"), [(64, ()), (128, ()), (128, ("key",))])
@pytest.mark.parametrize("name", LAYERS)
def test_a_call_takes_at_most_four_launches_forward_and_seven_backward(name, head_dim, masks):
    """Seven where a coefficient of each component gets a gradient from shared products."""
    forward, backward = launches(name, head_dim, masks)
    assert 1 <= forward.count <= 4, forward
    assert 2 <= backward.count <= (7 if "own variances" in name else 6), backward
    # What is left around the operators concerns parameters of a few numbers, whose count does not
    # depend on the number of tokens.
    assert forward.outside.total() <= 8, forward
    assert not {"mean", "bmm"} & {*forward.outside, *backward.outside}


def test_what_operators_launch_is_counted():
    forward, backward = launches("mgk", 64)
    assert forward.kernels == ["terms_kernel", "forward_kernel"]
    assert backward.kernels == [
        *("delta_kernel", "grad_query_kernel", "grad_key_kernel", "terms_backward_kernel"),
    ]
    assert backward.inside["sum"] == backward.inside.total() == 1  # the parts of sums over points
    padded = launches("mgk", 64, ("key",))  # δ finds the range of keys by the way
    assert padded[0].kernels == ["terms_kernel", "ranges_kernel", "forward_kernel"]
    assert padded[1].kernels == backward.kernels
    # And how far terms are apart, where components share a product.
    assert launches("smgk", 64)[0].kernels == padded[0].kernels
    for masks in ((), ("key",)):  # each program finds its sample's last key in the mask
        forward, backward = launches("fish, hard", 64, masks)
        assert forward.kernels == ["fish_forward_kernel"]
        assert backward.kernels == [
            *("fish_delta_kernel", "fish_query_gradient_kernel"),
            *("fish_key_gradient_kernel", "fish_key_gradient_kernel"),
            *("add_sums_kernel", "add_parts_kernel"),
        ]
        assert not forward.inside, forward
    layer = MGKAttention(64, 4, head_dim=64, num_kv_heads=2)
    inputs = make_inputs(layer, Case("", MGKAttention), 64, 64, torch.bfloat16, 0, clear=False)
    query, key, value = (x.detach().requires_grad_() for x in inputs.tensors)
    one = value[:, :1].detach().requires_grad_()  # values that key heads share are added in torch
    out = []
    call = HeadCall(query, key, one, inputs.masks)
    count_launches(lambda: out.append(run_heads(layer, "triton", call)))
    found = count_launches(
        lambda: torch.autograd.grad(out[0], [query, key, one], torch.empty_like(out[0]))
    )
    assert (found.inside["sum"], found.inside["copy_"]) == (2, 1)


def bytes_of(name, num_heads, length, train):
    """Launches with bytes of one sample, heads of 64, and the layer's tensors."""
    cls, options = LAYERS[name]
    layer = cls(64, head_dim=64, **{**options, "num_heads": num_heads})
    case = Case("", cls, masks=("causal",))
    inputs = make_inputs(layer, case, length, length, torch.float16, seed=0, clear=False)
    leaves = [x[:1].detach().requires_grad_() for x in inputs.tensors]
    call, made = HeadCall(*leaves, inputs.masks, rng=RandomKey(3)), []
    found = count_bytes(lambda: made.append(run_heads(layer, "triton", call)))
    if train:
        wanted = [*leaves, *layer.core.parameters()]
        cotangent = inputs.cotangent[:1].to(made[0].dtype)
        found = count_bytes(lambda: torch.autograd.grad(made[0], wanted, cotangent))
    return found, [x.numel() * x.element_size() for x in (*leaves, made[0])]


@pytest.mark.usefixtures("kernels_on_cpu")
def test_every_byte_that_linear_attention_moves_is_counted():
    with forced(Launch(64, 64)):
        found, (query, key, value, out) = bytes_of("linear", 1, 64, train=False)
    state = 4 * 64 * 65  # stored, read and stored by the running sum, read
    assert found.kernel_bytes == [key + value + state, 2 * state, 4 * query + state + 4 * 64]
    assert found.num_bytes == sum(found.kernel_bytes)
    assert query == out


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    ("name", "num_heads"), [("linear", 2), ("mlk", 2), ("smlk", 2), ("linear fish, hard", 4)]
)
def test_linear_attention_moves_at_most_twice_the_bytes_it_must(name, num_heads, train):
    """Inputs read once, outputs written once; states before and after written and read once."""
    mixes = "fish" in name
    length = 128 if mixes else 512
    tiles = Launch(64, 64) if mixes and train else Launch(32 if train else 64, 256)
    with forced(tiles):
        found, (query, key, value, out) = bytes_of(name, num_heads, length, train)
    state = 2 * 4 * 64 * 65 * -(-length // tiles.block_k)
    sources = 2 if mixes else num_heads
    needed = query + key + value + out + sources * state
    if train:
        needed += query + key + value + num_heads * state
    assert needed < found.num_bytes <= 2 * needed
