"""The operators as PyTorch sees them: schema, fakes, autograd, FLOPs, checkpoints, compilation."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.base.memory import predicted_bytes
from lit_probattn.base.torch_internals import TorchDispatchMode
from lit_probattn.kernels.dense.operators import mixture_attention
from lit_probattn.kernels.operator import define_operators
from lit_probattn.kernels.runtime import draw_tensor, interpreted
from lit_probattn.measure.counters import torch_flops
from lit_probattn.randomness import RandomKey
from profiling.cost.exact import backend_macs
from tests.kernels.test_fish_operators import LAYERS as OTHERS
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPERATORS = torch.ops.lit_probattn
B, H, N, L, E, K = 1, 2, 9, 11, 8, 2


def arguments(products, terms, *, kind="soft", masked=False, grad=True):
    def draw(*shape):
        return torch.randn(*shape, device=DEVICE).requires_grad_(grad)

    query = torch.randn(B, N, H * E, device=DEVICE).unflatten(-1, (H, E)).transpose(1, 2)
    row, col = (draw(B, H, K, N), draw(B, 1, K, L)) if terms else (None, None)
    scales = torch.rand(1, K, device=DEVICE).add(0.5).requires_grad_(grad) if terms else None
    masks = [(torch.rand(B, n) < 0.8).to(DEVICE) if masked else None for n in (L, N)]
    return (
        *(query.requires_grad_(grad), draw(B, 1, products, L, E), draw(B, 1, L, 5)),
        *(scales, row, col, None, *masks, None, None, 0.3, masked, kind == "hard", 0),
    )


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(lambda: arguments(1, False), id="softmax", marks=pytest.mark.slow),
        pytest.param(lambda: arguments(K, True, masked=True), id="mgk", marks=pytest.mark.slow),
        pytest.param(lambda: arguments(K, True, kind="hard"), id="hard"),
        pytest.param(lambda: arguments(1, True), id="smgk", marks=pytest.mark.slow),
    ],
)
def test_operator_passes_opcheck(args):
    torch.library.opcheck(OPERATORS.mixture_attention.default, args(), test_utils=(
        "test_schema", "test_autograd_registration", "test_faketensor",
        "test_aot_dispatch_dynamic",
    ))  # fmt: skip


@pytest.mark.parametrize("shifted", mostly_slow([False, True], [True]))
def test_operator_of_points_passes_opcheck(shifted):
    def draw(*shape):
        return torch.randn(*shape, device=DEVICE).requires_grad_()

    query = torch.randn(B, N, H * E, device=DEVICE).unflatten(-1, (H, E)).transpose(1, 2)
    numbers = torch.rand(1, K, 2 + E if shifted else 2, device=DEVICE).requires_grad_()
    key = draw(B, 1, 1 if shifted else K, L, E)
    torch.library.opcheck(OPERATORS.lower_points.default, (query.requires_grad_(), key, numbers,
        True, False), test_utils=(
        "test_schema", "test_autograd_registration", "test_faketensor",
        "test_aot_dispatch_dynamic",
    ))  # fmt: skip


LAYERS = {
    "softmax": lambda: SoftmaxAttention(16, 2, head_dim=E),
    "mgk": lambda: MGKAttention(16, 2, head_dim=E, num_components=3),
    "mgk hard": lambda: MGKAttention(16, 2, head_dim=E, e_step="hard"),
    "smgk": lambda: MGKAttention(16, 2, head_dim=E, shifted_keys=True),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("train", [False, True])
def test_counted_products_are_those_of_the_formula(name, train):
    layer = LAYERS[name]().to("meta")
    layer.backend = "triton"
    x = torch.empty(1, 29, 16, device="meta", requires_grad=True)

    def step():
        out = layer(x)
        if train:
            out.sum().backward()

    assert torch_flops(step) == 2 * backend_macs(layer, 29, "triton", train=train)


def test_shifted_keys_cost_one_product_and_the_others_what_the_reference_costs():
    for name, make in LAYERS.items():
        layer = make()
        found, plain = (backend_macs(layer, 31, b) for b in ("triton", "reference"))
        # One of two products per pair; the shifts meet every query and every key once instead.
        saved = 31 * 31 * 2 * E - 2 * 31 * 2 * K * E if name == "smgk" else 0
        assert plain - found == saved, name


EVERY = {**LAYERS, **OTHERS}


@pytest.mark.parametrize("name", mostly_slow(EVERY, ["fish"]))
def test_activation_checkpoints_give_the_same_gradients(name):
    layer = EVERY[name]().to(DEVICE)
    layer.backend, layer.dropout = "triton", 0.2
    rng = RandomKey(1, sample_ids=torch.tensor([3]))
    grads = []
    for use in (False, True):
        x = torch.randn(1, 21, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        x.requires_grad_()
        out = checkpoint(layer, x, rng=rng, use_reentrant=False) if use else layer(x, rng=rng)
        out.square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", mostly_slow(EVERY, ["mgk", "gfish", "mlk"]))
def test_nothing_of_size_n_by_n_is_saved(name):
    layer = EVERY[name]().to(DEVICE)
    layer.backend, length = "triton", 61
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(1, length, 16, device=DEVICE), is_causal=True)
    assert max(t.numel() for t in saved) < length * length


@pytest.mark.parametrize("name", mostly_slow(EVERY, ["mgk", "fish", "linear"]))
def test_a_batch_without_samples_or_with_one_token_runs(name):
    layer, rng = EVERY[name]().to(DEVICE), RandomKey(3, 5)
    for batch, length in ((1, 1), (0, 3)):
        x = torch.randn(batch, length, 16, device=DEVICE).requires_grad_()
        made = []
        for layer.backend in ("triton", "reference"):
            out = layer(x, is_causal=True, rng=rng)
            made.append((out, *torch.autograd.grad(out.square().sum(), x)))
        assert made[0][0].shape == x.shape
        for found, expected in zip(*made, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_an_output_without_a_gradient_gives_none():
    class Cut(torch.autograd.Function):
        """The identity, whose result has no gradient."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    args = arguments(K, terms=True)
    out, _ = mixture_attention(*args)
    leaves = [x for x in args if torch.is_tensor(x)]
    assert torch.autograd.grad(Cut.apply(out).sum(), leaves, allow_unused=True) == (None,) * 6


@pytest.mark.skipif(not interpreted(), reason="predicts with fake CPU tensors")
@pytest.mark.parametrize("name", ["mgk of two", "mgk hard", "smgk"])
def test_predicted_memory_of_a_training_step_is_linear_and_below_that_of_twice_the_heads(name):
    """Fake tensors: as many keys as PyTorch's fused softmax with twice the heads, fewer values."""
    makers = {**LAYERS, "mgk of two": lambda: MGKAttention(16, 2, head_dim=E)}

    def peak(make, backend, length):
        def build():
            layer, x = make(), torch.randn(2, length, 16, requires_grad=True)
            layer.backend = backend

            def step():
                layer(x).sum().backward()
                layer.zero_grad(set_to_none=True)
                x.grad = None

            return step, (layer, x)

        return predicted_bytes(build)[0]

    ours = [peak(makers[name], "triton", n) for n in (512, 1024)]
    assert ours[1] < 2.05 * ours[0]
    fused = peak(lambda: SoftmaxAttention(16, 4, head_dim=E), "sdpa", 1024)
    assert ours[1] < 1.2 * fused
    assert peak(makers[name], "reference", 1024) > 20 * ours[1]


@pytest.mark.slow
def test_compiled_model_equals_eager():
    layer = LAYERS["smgk"]().to(DEVICE)
    layer.backend = "triton"
    x = torch.randn(2, 21, 16, device=DEVICE)
    compiled = torch.compile(layer, fullgraph=True)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(a).square().sum().backward()
    compiled(b).square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_words_of_a_draw_are_made_on_the_device():
    """A copy from the host would break the capture of a CUDA graph, and a GPU would wait.

    Torch 2.11 copies in `words[0] = number`.
    """
    devices, names = set(), []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            found = (x for x in (*args, out) if isinstance(x, torch.Tensor))
            devices.update(x.device.type for x in found)
            names.append(str(func))
            return out

    samples = RandomKey(3).samples(5, torch.device("meta"))
    with Recorded():
        words = draw_tensor((1, 2), samples)
    assert devices == {"meta"}
    assert not [name for name in names if "lift" in name]
    assert (words.shape, words.dtype) == ((7,), torch.int64)
    assert draw_tensor((1, 2**32 - 1), torch.tensor([5, 4])).tolist() == [1, 2**32 - 1, 5, 4]


class Seen(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Product(NamedTuple):
    """Inputs of an operator that multiplies."""

    query: torch.Tensor
    key: torch.Tensor


def test_an_operator_computes_gradients_once():
    """A second derivative is an error, and without gradients nothing is recorded."""
    multiply = define_operators(
        ("multiplied", "multiplied_backward"),
        Product,
        lambda call: (call.query * call.key,),
        lambda call, grad, skipped: (grad * call.key, grad * call.query),
        new_outputs=lambda call: (torch.empty_like(call.query),),
        gradients=("query", "key"),
        flops=lambda call, backward: 0,
        has_normaliser=False,
        num_outputs=1,
    )
    x, y, grad = (torch.randn(3, requires_grad=True) for _ in range(3))
    assert multiply(x, y).equal(x * y)
    found = torch.autograd.grad(multiply(x, y), (x, y), grad)
    assert [part.equal(grad * other) for part, other in zip(found, (y, x), strict=True)] == [1, 1]
    assert torch.autograd.grad(multiply(x, y.detach()), x, grad)[0].equal(grad * y)
    with pytest.raises(NotImplementedError):
        torch.autograd.grad(multiply(x, y), x, grad, create_graph=True)
    again, _ = torch.ops.lit_probattn.multiplied_backward(grad, x, y, [])
    with pytest.raises(NotImplementedError):
        torch.autograd.grad(again.sum(), grad)
    with torch.no_grad():
        assert multiply(x, y).grad_fn is None
    assert multiply(x.detach(), y.detach()).grad_fn is None
    with Seen() as seen:
        out = multiply(x, y)
        assert torch.autograd.grad(out, y, grad)[0].equal(grad * x)
    assert [name for name in seen.names if "multiplied" in name] == [
        "lit_probattn::multiplied",
        "lit_probattn::multiplied_backward",
    ]
    out = multiply(x, y)
    with Seen() as seen:
        torch.autograd.grad(out, y, grad)
    assert "lit_probattn::multiplied_backward" in seen.names
    with dual_level():
        for operator in (multiply, OPERATORS.multiplied):
            with pytest.raises(NotImplementedError, match="jvp"):
                operator(make_dual(x.detach(), grad), y.detach())
    rows = torch.randn(4, 3)
    found = torch.autograd.grad(multiply(x, y), y, rows, is_grads_batched=True)
    assert found[0].equal(rows * x)


def test_an_operator_reads_memory_whose_negation_is_computed():
    """The imaginary part of a conjugate has the memory of its negative (`Tensor.is_neg`)."""
    read = []

    def forward(call):
        read.extend(x.is_neg() for x in call)
        return (call.query * call.key,)

    def backward(call, grad, skipped):
        read.extend(x.is_neg() for x in (*call, grad))
        return grad * call.key, grad * call.query

    multiply = define_operators(
        ("multiplied", "multiplied_backward"),
        Product,
        forward,
        backward,
        new_outputs=lambda call: (torch.empty_like(call.query),),
        gradients=("query", "key"),
        flops=lambda call, backward: 0,
        has_normaliser=False,
        num_outputs=1,
    )
    x, y, grad = (torch.randn(3, dtype=torch.complex64).conj().imag for _ in range(3))
    plain = torch.randn(3, requires_grad=True)
    multiply(x, y)
    torch.autograd.grad(multiply(x, plain), plain, grad)
    torch.autograd.grad(multiply(plain, plain), plain, grad)
    assert [x.is_neg(), grad.is_neg(), len(read)] == [True, True, 12]
    assert not any(read)
