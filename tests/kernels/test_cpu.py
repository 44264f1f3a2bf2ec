"""The C library of the CPU: built once and safely, with the bits of torch, never required."""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import aot_function, nop

import lit_probattn
from lit_probattn.attention import (
    FiSHAttention,
    MGKAttention,
    SoftmaxAttention,
    recorded_choices,
)
from lit_probattn.attention.call import HeadCall, outline
from lit_probattn.attention.draws import keep_pairs, normal_noise
from lit_probattn.attention.engines.native import by_tiles
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.variant import Scores
from lit_probattn.functional import linear_attention, softmax_attention
from lit_probattn.kernels.cpu import draws, library, linear, selftest, tiles
from lit_probattn.randomness import AttentionDropout, RandomKey
from lit_probattn.randomness import normal_noise as torch_noise

CPU = torch.device("cpu")
KEY = RandomKey(5, 3, torch.tensor([5, 2**40 + 9])).fold(1)


def forget():
    library.load.cache_clear()
    selftest.failure.cache_clear()
    selftest.draws_noise.cache_clear()


@pytest.fixture
def fresh():
    """Forget the library before and after a test that changes where or whether it is built."""
    forget()
    yield
    forget()


needs_library = pytest.mark.skipif(
    selftest.failure() is not None, reason=f"the C library {selftest.failure()}"
)


@needs_library
def test_the_peak_of_exponentials_is_of_exponentials_and_writes_nothing_else():
    """One after the other: the operands, the results, and what is not ours."""
    peak, buffer = library.load().peak_exponentials, torch.zeros(1 << 14)
    count = peak(buffer.data_ptr(), 1)
    buffer[:count], buffer[2 * count :] = torch.linspace(-3.0, 3.0, count), 7.0
    assert peak(buffer.data_ptr(), 3) == 3 * count
    expected = torch.linspace(-3.0, 3.0, count).double().exp()
    torch.testing.assert_close(buffer[count : 2 * count].double(), expected, rtol=1e-6, atol=0)
    assert (buffer[2 * count :] == 7.0).all()
    before = buffer.fill_(0.5).clone()
    assert peak(buffer.data_ptr(), 0) == 0
    assert torch.equal(buffer, before)


@needs_library
def test_the_peak_of_products_is_of_products_of_operands_that_are_apart():
    """x (rows, 128), y (128, columns), and their product, which each round adds to the result."""
    buffer, depth = torch.ones(1 << 15), 128
    pairs = library.load().peak_products(buffer.data_ptr(), 3) // (3 * 2 * depth)
    (changed,) = torch.where(buffer != 1.0)
    assert len(changed) == pairs
    assert (buffer[changed] == 1.0 + 3 * depth).all()
    assert changed[-1] - changed[0] == pairs - 1
    sizes, rest = divmod(int(changed[0]), depth)  # rows + columns, of which `pairs` is the product
    assert rest == 0
    assert math.isqrt(sizes**2 - 4 * pairs) ** 2 == sizes**2 - 4 * pairs


@needs_library
@pytest.mark.parametrize(
    ("p", "row", "col"),
    [
        (0.1, range(7), range(3, 99)),
        (0.5, range(3, 130), range(1000)),
        (0.9, range(1), range(1)),
        (0.0, range(9), range(77)),
        (0.3, range(5, 9), range(511, 1025)),
        (0.2, range(4), range(0)),
    ],
)
def test_keep_decisions_have_the_bits_of_torch(p, row, col):
    dropout = AttentionDropout(p, KEY)
    expected = dropout.keep(2, 3, row, col, CPU)
    assert torch.equal(draws.keep(dropout, 2, 3, row, col), expected)
    assert torch.equal(keep_pairs(dropout, 2, 3, row, col, CPU), expected)


@needs_library
@pytest.mark.parametrize("maps", [1, 2, 3, 4, 5, 8])
def test_noise_has_the_bits_of_torch(maps):
    row, col = range(3, 12), range(5, 205)
    for dtype in (torch.float32, torch.float64):
        expected = torch_noise(KEY, 2, maps, row, col, CPU, dtype)
        assert torch.equal(normal_noise(KEY, 2, maps, row, col, CPU, dtype), expected)
    # Call the library directly: torch may compute the call above, with other bits.
    expected = torch_noise(KEY, 2, maps, row, col, CPU, torch.float32)
    found = draws.normal_noise(KEY, 2, maps, row, col)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def in_c(query, key, value, masks, dropout, **terms):
    """Attend by tiles to scores with these terms."""
    call = HeadCall(query, key, value, masks, dropout=dropout)
    return by_tiles(call, Scores(query, key, **terms))


@needs_library
@pytest.mark.parametrize("threads", [3, 4, 6])
def test_rows_that_threads_do_not_divide_are_computed_too(threads, nan_filled_empties):
    query, key = torch.randn(1, 1, 1001, 4), torch.randn(1, 1, 13, 4)
    value = torch.randn(1, 1, 13, 4)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = in_c(query, key[:, :, None], value, Masks(1001, 13), None)
    finally:
        torch.set_num_threads(before)
    assert (out - (query @ key.mT).softmax(-1) @ value).abs().max() < 1e-6


def biases(queries, keys):
    """Yield additive biases whose numbers do not lie one after the other, or are for many pairs."""
    whole = torch.randn(2, 3, keys, queries, dtype=torch.float64)
    yield "transposed", whole.mT
    yield "expanded over keys", whole[..., :1, :].mT.expand(2, 3, queries, keys)
    yield "expanded over queries", whole[..., :1].mT.expand(2, 3, queries, keys)
    yield "expanded over heads", whole[:, :1].mT.expand(2, 3, queries, keys)
    yield "one per query", whole[..., :1, :].mT
    yield "one per key", whole[..., :1].mT
    yield "one per head", whole[:1, :, :1, :1]
    yield "every other", torch.randn(1, 3, queries, 2 * keys, dtype=torch.float64)[..., ::2]


@needs_library
@pytest.mark.parametrize("gradient", [False, True])
def test_a_bias_is_read_by_all_of_its_strides(gradient):
    layer = SoftmaxAttention(12, 3, head_dim=4, backend="native").double()
    x, target = torch.randn(2, 11, 12, dtype=torch.float64), torch.randn(2, 11, 12).double()
    for name, bias in biases(11, 11):
        found = []
        for backend in ("native", "reference"):
            layer.core.backend = backend
            leaf = bias.detach().requires_grad_(gradient)
            out = layer(x, bias=leaf)
            grads = torch.autograd.grad((out * target).sum(), leaf) if gradient else ()
            found.append((out.detach(), *grads))
        for one, other in zip(*found, strict=True):
            assert (one - other).abs().max() < 1e-13, name


@needs_library
def test_nan_stays_nan_and_infinite_scores_do_not_spread():
    bias = torch.randn(1, 1, 3, 9)
    bias[..., 0, 4] = float("nan")
    bias[..., 1, 2] = float("-inf")
    bias[..., 2, :] = float("-inf")
    query, key = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 1, 9, 4)
    out = in_c(query, key, torch.eye(9)[None, None], Masks(3, 9, bias=bias), None)[0, 0]
    assert out[0].isnan().all()
    assert torch.allclose(out[1], bias[0, 0, 1].softmax(-1), atol=1e-7)
    assert (out[2] == 0).all()


@needs_library
def test_loading_the_library_keeps_denormal_numbers():
    library.load()
    assert (torch.tensor([1e-40]) * 1.0).item() > 0.0


def test_without_a_compiler_torch_computes_and_native_gives_the_reason(fresh, monkeypatch):
    monkeypatch.setenv("CC", "false")
    reason = selftest.failure()
    assert reason is not None
    assert reason.startswith("cannot be compiled by")
    dropout = AttentionDropout(0.3, KEY)
    expected = dropout.keep(2, 3, range(5), range(9), CPU)
    assert torch.equal(keep_pairs(dropout, 2, 3, range(5), range(9), CPU), expected)
    layer, x = MGKAttention(12, 2, head_dim=5, backend="native"), torch.randn(2, 7, 12)
    with pytest.raises(
        NotImplementedError, match=r"backend 'native' cannot be compiled by .*use one"
    ):
        layer(x)
    monkeypatch.setenv("CC", "no-such-compiler")
    forget()
    assert selftest.failure() == "cannot find the C compiler CC=no-such-compiler"


# Variant, its options, dropout, keys -> what `auto` takes with the library and without.
MGK_HARD, SMGK = {"e_step": "hard"}, {"shifted_keys": True}
FISH = {"num_global_heads": 1, "noise": "none"}
AUTO = [
    (SoftmaxAttention, {}, False, 4096, "native", "sdpa"),
    (SoftmaxAttention, {}, False, 511, "sdpa", "sdpa"),
    (SoftmaxAttention, {}, True, 4096, "native", "blockwise"),
    (SoftmaxAttention, {}, True, 1023, "native", "reference"),
    (SoftmaxAttention, {}, True, 64, "native", "reference"),
    (MGKAttention, {}, False, 4096, "native", "sdpa"),
    (MGKAttention, {}, False, 128, "native", "sdpa"),
    (MGKAttention, {}, False, 127, "sdpa", "sdpa"),
    (MGKAttention, {}, True, 4096, "native", "blockwise"),
    (MGKAttention, MGK_HARD, False, 4096, "native", "blockwise"),
    (MGKAttention, MGK_HARD, False, 256, "native", "reference"),
    (MGKAttention, MGK_HARD, False, 255, "native", "reference"),
    (MGKAttention, SMGK, False, 4096, "native", "sdpa"),
    (MGKAttention, SMGK | {"head_dim": 16}, False, 4096, "native", "sdpa"),
    (MGKAttention, SMGK | {"head_dim": 8}, False, 4096, "native", "sdpa"),
    (MGKAttention, SMGK | {"head_dim": 8}, True, 4096, "native", "blockwise"),
    (FiSHAttention, FISH, False, 4096, "native", "blockwise"),
    (FiSHAttention, FISH, False, 96, "native", "reference"),
    (FiSHAttention, FISH, False, 95, "reference", "reference"),
    (FiSHAttention, FISH, True, 4096, "native", "blockwise"),
    (FiSHAttention, FISH, True, 96, "native", "reference"),
    (FiSHAttention, FISH, True, 95, "reference", "reference"),
]


@pytest.mark.parametrize(("cls", "options", "dropout", "keys", "with_library", "without"), AUTO)
def test_auto_takes_the_library_where_it_was_faster(
    cls, options, dropout, keys, with_library, without, monkeypatch
):
    core = cls(64, 2, **{"head_dim": 32, **options}).core
    call = outline(core.layout, 1, keys, keys, dropout=dropout)
    refusal = "lit_probattn.attention.engines.native.native_refusal"
    monkeypatch.setattr(refusal, lambda device: None)
    assert core.pick(call) == with_library
    monkeypatch.setattr(refusal, lambda device: "cannot be found")
    assert core.pick(call) == without


def test_auto_works_without_a_compiler_and_warns_once(fresh, monkeypatch, logged):
    monkeypatch.setenv("CC", "no-such-compiler")
    layer, x = MGKAttention(12, 2, head_dim=5, e_step="hard"), torch.randn(2, 7, 12)
    monkeypatch.setattr(layer.core.makes, "name", "hard mgk without a compiler")
    for _ in range(2):
        layer(x).sum().backward()
    told = [message for message in logged.messages if "C library" in message]
    assert told == [
        "the C library for CPUs cannot find the C compiler CC=no-such-compiler; using torch "
        "operations instead"
    ]
    assert recorded_choices()["hard mgk without a compiler (cpu, float32)"] == "reference"


@needs_library
def test_the_self_test_runs_outside_modes(fresh):
    """The first call may come while sizes are predicted, on tensors that hold nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device("meta"), torch.inference_mode():
        assert selftest.failure() is None
        assert selftest.draws_noise() in (True, False)


def test_draws_on_the_cpu_do_not_depend_on_the_default_device(nan_filled_empties):
    dropout, block = AttentionDropout(0.3, KEY), (range(9), range(20))
    kept, noise = keep_pairs(dropout, 2, 3, *block, CPU), normal_noise(KEY, 2, 3, *block, CPU)
    with torch.device("meta"):
        assert torch.equal(keep_pairs(dropout, 2, 3, *block, CPU), kept)
        assert torch.equal(normal_noise(KEY, 2, 3, *block, CPU), noise)


def test_draws_inside_functionalize_have_the_same_bits():
    """New tensors have no memory there; the draws are of torch."""
    dropout, block = AttentionDropout(0.3, KEY), (range(9), range(20))

    def draw(x):
        kept = keep_pairs(dropout, 2, 3, *block, CPU)
        return x + kept, x + normal_noise(KEY, 2, 3, *block, CPU)

    zero = torch.zeros(())
    inside = torch.func.functionalize(draw)(zero)
    assert all(map(torch.equal, inside, draw(zero)))


class Subclass(torch.Tensor):
    """A tensor as other libraries derive it: operations on it return the same class."""


@needs_library
@pytest.mark.parametrize("attend", [softmax_attention, linear_attention])
def test_a_subclass_of_tensor_is_computed_like_a_tensor(attend, nan_filled_empties):
    given = [torch.randn(1, 2, 60, 4) for _ in range(3)]
    results = []
    for cls in (torch.Tensor, Subclass):
        inputs = [x.as_subclass(cls).requires_grad_() for x in given]
        out = attend(*inputs, backend="native")
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=0)


@needs_library
def test_the_self_test_runs_outside_transforms(fresh):
    """The first call may be one for the gradients of each sample."""
    found = torch.func.vmap(torch.func.grad(lambda x: x * (selftest.failure() is None)))(
        torch.ones(3)
    )
    assert found.tolist() == [1.0, 1.0, 1.0]
    assert torch.func.vmap(lambda x: x * selftest.draws_noise())(torch.ones(3)).shape == (3,)


@needs_library
def test_aot_autograd_records_linear_attention():
    """It first runs the function on tensors without data, while no graph is recorded."""
    given = [torch.randn(1, 2, 60, 4) for _ in range(3)]
    recorded = aot_function(linear_attention, nop)
    results = []
    for attend in (recorded, linear_attention):
        inputs = [x.clone().requires_grad_() for x in given]
        out = attend(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@needs_library
@pytest.mark.parametrize("attend", [softmax_attention, linear_attention])
def test_several_gradients_at_once_are_those_of_the_reference(attend):
    given = [torch.randn(1, 2, 60, 4, requires_grad=True) for _ in range(3)]
    grads = torch.randn(2, *given[0].shape)
    found, expected = (
        torch.autograd.grad(attend(*given, backend=name), given, grads, is_grads_batched=True)
        for name in ("native", "reference")
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@needs_library
def test_a_negation_that_is_pending_is_computed():
    """The imaginary part of a conjugate has the memory of its negative (`Tensor.is_neg`)."""
    layer = SoftmaxAttention(8, 2, dropout=0.0, backend="native")
    x, bias = torch.randn(1, 60, 8), torch.randn(1, 2, 60, 60, dtype=torch.complex64).conj().imag
    assert bias.is_neg()
    found, expected = (
        [y := layer(x, bias=b), *torch.autograd.grad(y.square().sum(), layer.parameters())]
        for b in (bias, bias.resolve_neg())
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Wrapper(torch.Tensor):
    """A tensor whose data are in another, like those of DTensor."""

    def __new__(cls, inner):
        return cls._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride()
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        given = torch.utils._pytree.tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, operator(*given[0], **given[1]))


@needs_library
@pytest.mark.parametrize("attend", [softmax_attention, linear_attention])
def test_tensors_without_memory_are_refused_in_one_line(attend):
    query, key, value = (Wrapper(torch.randn(1, 2, 60, 4)) for _ in range(3))
    with pytest.raises(NotImplementedError, match=r"Wrapper.*to_local.*backend='reference'"):
        attend(query, key, value, backend="native")


FUNCTIONS = [
    f"{kind}_{name}_{real}"
    for kind, name, real in product(
        ("tiles", "linear"), ("forward", "backward"), ("float", "double")
    )
]


@needs_library
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, "") for name in FUNCTIONS] + [(name, "shifted keys") for name in FUNCTIONS[:4]],
)
def test_a_library_that_is_wrong_in_one_function_is_refused(name, form, fresh, monkeypatch):
    """Its products, or those of shifted keys only, have a scale of 1.001."""
    real = library.load()
    functions = {each: getattr(real, each) for each in (*FUNCTIONS, "low_products")}

    def scaled(reference, *job):
        call, factor = reference._obj, "scale" if name.startswith("tiles") else "factor"
        if not form or call.row:
            setattr(call, factor, 1.001 * getattr(call, factor))
        return getattr(real, name)(reference, *job)

    wrong = SimpleNamespace(**functions | {name: scaled})
    for module in (tiles, linear):
        monkeypatch.setattr(module, "load", lambda: wrong)
    expected = "linear attention" if name.startswith("linear") else f"tiles, {form}"
    precision = {"float": "float32", "double": "float64"}[name.rpartition("_")[2]]
    reason = selftest.failure()
    assert reason is not None
    assert reason.startswith(f"cannot be trusted: its self-test of {expected}")
    assert precision in reason


def test_a_gradient_that_is_nan_fails_the_self_test():
    right = torch.ones(3)
    for wrong in (right * math.nan, right * math.inf):
        for pairs in ([(right, right), (wrong, right)], [(wrong, right), (right, right)]):
            assert not selftest._largest_error(pairs) < 1.0


def test_bfloat16_needs_a_library_that_works_and_multiplies_it(monkeypatch):
    found = {}
    for reason, products in product((None, "does not compile"), (2, 1, 0)):
        monkeypatch.setattr(selftest, "failure", lambda reason=reason: reason)
        library_of = SimpleNamespace(low_products=products)
        monkeypatch.setattr(selftest, "load", lambda library_of=library_of: library_of)
        found[reason, products] = selftest.multiplies_low()
    assert [case for case, multiplies in found.items() if multiplies] == [(None, 2), (None, 1)]


@pytest.mark.parametrize(
    ("name", "flags", "multiplies"),
    [
        ("AMD EPYC 9654", "avx512f avx512_bf16", True),
        ("Intel(R) Xeon(R) Platinum 8380H", "avx512f avx512_bf16", False),
        ("Intel(R) Xeon(R) Platinum 8481C", "avx512f avx512_bf16 amx_bf16", True),
        ("AMD EPYC 7763", "avx2", False),
    ],
)
def test_a_prediction_knows_which_processors_multiply_bfloat16(
    name, flags, multiplies, monkeypatch
):
    monkeypatch.setattr(selftest, "is_predicting", lambda: True)
    monkeypatch.setattr(selftest, "processor", lambda: f"model name : {name}\nflags : {flags}")
    assert selftest.multiplies_low() == multiplies


def test_the_library_is_for_the_cpu():
    layer = SoftmaxAttention(12, 2, backend="native").to("meta")
    with pytest.raises(NotImplementedError, match="cannot run on meta"):
        layer(torch.empty(2, 7, 12, device="meta"))


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("name", ["polynomial", "gfish", "mgk_hard_e", "smgk"])
def test_compiled_layers_equal_eager_ones(name):
    """Powers, noise before two layers, mixtures: draws, output and every gradient."""
    layer = lit_probattn.create(name, 32, 8, head_dim=4, dropout=0.2, backend="native").train()
    x = torch.randn(2, 130, 32)
    found = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        torch.manual_seed(4)
        out = call(x, is_causal=True)
        out.sin().sum().backward()
        grads = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
        found.append({"out": out.detach(), **grads})
    assert len(found[0]) > 4
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-7)
