"""Attention by tiles: every form, mask and edge of a tile against its equation in float64."""

import ctypes
import itertools
import math
import os
import platform
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_probattn.attention import MGKAttention
from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.draws import normal_noise, philox_words
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.numerics import first_maximum
from lit_probattn.kernels.cpu import library, selftest
from lit_probattn.kernels.cpu.structure import TALL
from lit_probattn.kernels.cpu.tiles import KINDS, MOST, Inputs, attend, job_bounds
from lit_probattn.randomness import STREAM_DROPOUT, STREAM_NOISE, AttentionDropout, RandomKey
from tests.support.slow import mostly_slow

CPU = torch.device("cpu")
KEY = RandomKey(5, 3, torch.tensor([5, 2**40 + 9])).fold(1)
BATCH = 2
pytestmark = pytest.mark.skipif(
    library.obstacle() is not None, reason=f"the C library {library.obstacle()}"
)


def equation(call, masks, dropout, key):
    """Return what `attend` does by its equation, differentiable, of all maps at once."""
    heads, (rows, cols) = call.heads, (masks.num_queries, masks.num_keys)

    def every(x, count):
        return x.repeat_interleave(count // x.shape[1], 1)

    if call.common:
        maps = call.scale * (call.query @ call.key[:, 0].mT)  # (B, R, N, L)
        noise = 0.0
        if call.noise is not None:
            count = call.noise_scale.numel()
            positions = range(call.first_row, call.first_row + rows)
            drawn = normal_noise(key, BATCH, count, positions, range(cols), CPU)
            noise = call.noise_scale[:, None, None] * drawn.to(call.noise_scale.dtype)
        if not call.unit_noise:
            maps = maps + noise
        if KINDS[call.kind] == "sum":
            scores = torch.einsum("hr,brnl->bhnl", call.coef, maps)
        else:
            units = torch.einsum("ur,brnl->bunl", call.first, maps)
            bias = 0.0 if call.first_bias is None else call.first_bias[:, None, None]
            scores = units + bias + (noise if call.unit_noise else 0.0)
            if call.second is not None:
                scores = torch.einsum("hu,bunl->bhnl", call.second, scores.relu())
        parts = scores[:, :, None]
    else:
        parts = call.scale * (call.query[:, :, None] @ every(call.key, heads).mT)
        if KINDS[call.kind] == "power":
            parts = 0.5 * call.degree * torch.log(parts.square() + 1e-12)
        parts = parts.expand(-1, -1, call.components, -1, -1)
        if call.coef is not None:
            parts = parts * call.coef[:, :, None, None]
        if call.row is not None:
            parts = parts + call.row.mT[..., None]
        if call.col is not None:
            parts = parts + every(call.col, heads)[:, :, :, None]
    if call.bias is not None:
        parts = parts + call.bias[:, :, None]
    allowed = masks.allowed(range(rows), range(cols), CPU)
    if allowed is not None:
        parts = parts.masked_fill(~allowed[:, :, None], float("-inf"))
    none = (parts == float("-inf")).all(2)
    parts = parts.masked_fill(none[:, :, None], 0.0)
    hard = KINDS[call.kind] == "hard"
    scores = first_maximum(parts.unbind(2)) if hard else parts.logsumexp(2)
    scores = scores.masked_fill(none, float("-inf"))
    top = scores.detach().amax(-1, keepdim=True)
    mass = (scores - top.masked_fill(top == float("-inf"), 0.0)).exp()
    weights = mass / mass.sum(-1, keepdim=True).clamp_min(1e-30)
    if dropout is not None:
        weights = weights * dropout.keep(BATCH, heads, range(rows), range(cols), CPU)
        weights = weights * dropout.scale
    out = weights @ every(call.value, heads)
    return out if call.query_mask is None else out * call.query_mask[:, None, :, None]


SIZES = {"heads": 2, "groups": 1, "size": 5, "wide": 7, "many": 2, "units": 5, "first_row": 0}
SWITCHES = ("shared", "coef", "terms", "noise", "pairs", "dropped", "causal", "unneeded")


def made(form, rows, cols, seed, dtype, **given):
    """Return inputs of a form, its masks, and dropout; `padded` is None, "some" or "all"."""
    options = {**SIZES, **dict.fromkeys(SWITCHES, False), "padded": None, **given}
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    heads, groups = options["heads"], options["groups"]
    size, wide, many = options["size"], options["wide"], options["many"]
    common, none = form == "sum" or "layer" in form, None
    fields = dict.fromkeys(Inputs._fields)
    many = 1 if form == "power" else many
    shared = options["shared"] and not common
    fields["query"] = draw(BATCH, many if common else heads, rows, size)
    fields["key"] = draw(BATCH, 1 if common else groups, 1 if shared else many, cols, size)
    fields["value"] = draw(BATCH, groups, cols, wide)
    fields |= {"kind": KINDS.index("layers" if "layer" in form else form), "heads": heads}
    fields["components"] = 1 if "layer" in form else many
    if form == "sum":
        fields["coef"] = draw(heads, many)
    elif form == "power":
        fields["col"] = draw(BATCH, groups, 1, cols) if options["terms"] else none
    elif not common:
        fields["coef"] = draw(heads, many) if options["coef"] else none
        fields["row"] = draw(BATCH, heads, rows, many) if options["terms"] else none
        fields["col"] = draw(BATCH, groups, many, cols) if options["terms"] else none
    elif "layers" in form:
        fields["first"], fields["first_bias"] = draw(options["units"], many), draw(options["units"])
        fields["second"] = draw(heads, options["units"])
    else:
        fields["first"] = draw(heads, many)
    if options["noise"] and common and dtype == torch.float32:
        fields["unit_noise"] = form in ("layers", "one layer")
        count = fields["first"].shape[0] if fields["unit_noise"] else many
        fields["noise"] = philox_words(KEY, STREAM_NOISE, BATCH, CPU)
        fields["noise_scale"] = draw(count)
    if options["pairs"]:
        fields["bias"] = draw(1, heads, rows, cols)
        fields["pair_mask"] = torch.rand(BATCH, 1, rows, cols, generator=generator) < 0.8
    if options["padded"]:
        fields["key_mask"] = torch.rand(BATCH, cols, generator=generator) < 0.7
        fields["key_mask"][1, cols // 3 :] = False
        if options["padded"] == "all":
            fields["key_mask"][0] = False
    if options["unneeded"]:
        fields["query_mask"] = torch.rand(BATCH, rows, generator=generator) < 0.7
        fields["query_mask"][1, rows // 4 :] = False
    dropout = AttentionDropout(0.3, KEY) if options["dropped"] else none
    if dropout is not None:
        fields["draw"] = philox_words(KEY, STREAM_DROPOUT, BATCH, CPU)
        fields["threshold"] = dropout.threshold
    fields |= {"is_causal": options["causal"], "scale": 0.7}
    fields["first_row"] = options["first_row"]
    fields |= {"degree": 2 + 2 * (seed % 3), "unit_noise": bool(fields["unit_noise"])}
    fields["threshold"] = fields["threshold"] or 0
    call = Inputs(**fields)
    masks = Masks(rows, cols, call.key_mask, call.pair_mask, call.is_causal)
    return call, masks, dropout


def compared(call, masks, dropout, eager=None):
    """Return (error, that of eager code, size) of the output and of every gradient."""
    eager = eager or call
    double = call._replace(
        **{
            name: x.detach().double().requires_grad_()
            for name, x in call._asdict().items()
            if torch.is_tensor(x) and x.requires_grad
        }
    )
    found = []
    for one, run in (
        (double, lambda c: equation(c, masks, dropout, KEY)),
        (call, attend),
        (eager, lambda c: equation(c, masks, dropout, KEY)),
    ):
        leaves = [x for x in one if torch.is_tensor(x) and x.requires_grad]
        out = run(one)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).cos()
        weight[:, :, out.shape[2] // 2 :: 3] = 0.0  # queries without a gradient
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)])
    return [
        (float((b.double() - a).norm()), float((c.double() - a).norm()), float(a.norm()))
        for a, b, c in zip(*found, strict=True)
    ]


def test_the_self_test_passes():
    """Apart from the other tests, which a library that is refused would skip."""
    selftest.failure.cache_clear()
    assert selftest.failure() is None


EDGES = [1, 2, 12, 13, 47, 48, 49, 100]
KEYS = [1, 3, 16, 17, 127, 128, 129, 140, 260]
FORMS = ["soft", "hard", "sum", "layers", "layers of noisy maps", "one layer", "power"]
OPTIONS = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([2, 4]),
        "groups": st.sampled_from([1, 2]),
        "size": st.sampled_from([1, 5, 16, 33, 130]),
        "wide": st.sampled_from([1, 7, 16, 48, 129]),
        "many": st.sampled_from([1, 2, 3]),
        "padded": st.sampled_from([None, "some", "all"]),
        **{name: st.booleans() for name in SWITCHES},
    }
)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.sampled_from(EDGES),
    cols=st.sampled_from(KEYS),
    seed=st.integers(0, 99),
    options=OPTIONS,
)
def test_double_precision_is_exact(form, rows, cols, seed, options):
    call, masks, dropout = made(form, rows, cols, seed, torch.float64, **options)
    found = compared(call, masks, dropout)
    largest = max(size for *_, size in found)  # a gradient of zero is a sum of others' size
    if form == "power":  # the slope of log |q·k| multiplies the rounding errors of one visible key
        groups = call.query.unflatten(1, (call.key.shape[1], -1))
        largest /= min(1.0, float((groups @ call.key.mT).detach().abs().min()))
    for error, *_ in found:
        assert error <= 1e-13 * (1.0 + largest)
    if call.key_mask is not None:
        (grad,) = torch.autograd.grad(attend(call).sum(), call.value)
        assert not grad.transpose(1, 2)[~call.key_mask].any()  # exactly zero


WIDTHS = [5, 32, 130]


@pytest.mark.parametrize(
    ("form", "size"),
    mostly_slow(
        itertools.product(FORMS, WIDTHS), [(form, WIDTHS[i % 3]) for i, form in enumerate(FORMS)]
    ),
)
def test_single_precision_error_is_within_twice_eager(form, size):
    """Root mean square error to float64, of the output and of all gradients together.

    Over several inputs: of one, errors of both are single draws. The rule is that of the other
    backends (`tests/attention/test_parity.py`).
    """
    options = {"size": size, "wide": 16, "padded": "some"}
    options |= dict.fromkeys(("coef", "terms", "dropped"), True)
    check_beside_eager(
        made(form, 49 + seed % 3 * 25, 140, seed, torch.float32, **options, **kind)
        for seed in range(6)
        for kind in [{"many": 1 + seed % 3, "causal": seed % 2 == 0}]
    )


def check_beside_eager(calls):
    """Hold errors over several calls, of outputs and of all gradients, to twice those of eager."""
    squares = torch.zeros(2, 2, dtype=torch.float64)
    for call, masks, dropout in calls:
        found = torch.tensor(compared(call, masks, dropout), dtype=torch.float64)
        assert (found[:, 0] <= 1e-4 * (1.0 + found[:, 2])).all()
        parts = found[:, :2].square()
        squares += torch.stack([parts[0], parts[1:].sum(0)])
    assert (squares[:, 0].sqrt() <= 2.0 * squares[:, 1].sqrt()).all()


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_papers_are_within_twice_eager(form):
    """Those that are compiled by themselves: two components or maps, eight units and heads."""
    options = {"heads": 8, "groups": 2, "size": 32, "wide": 32, "units": 8, "padded": "some"}
    calls = []
    for seed in range(6):
        kind = {"terms": seed % 2 == 0, "shared": seed % 2 == 0, "dropped": seed % 3 == 0}
        calls.append(made(form, 61, 140, seed, torch.float32, noise=True, **options, **kind))
    check_beside_eager(calls)


@pytest.mark.parametrize("first_row", [0, 19, 2**31 + 5])
@pytest.mark.parametrize("form", ["sum", "layers", "layers of noisy maps", "one layer"])
def test_noise_of_a_continued_sequence_is_that_of_its_positions(form, first_row):
    """Of queries that follow `first_row` others, in the output and in every gradient."""
    options = {"heads": 4, "groups": 2, "noise": True, "causal": True, "first_row": first_row}
    call, masks, dropout = made(form, 61, 140, 0, torch.float32, **options)
    assert call.noise is not None
    for error, _, size in compared(call, masks, dropout):
        assert error <= 1e-5 * (1.0 + size)


def choose_products(monkeypatch, products):
    """Let tiles multiply bfloat16 in pairs (1) or in matrix registers (2), if they can."""
    if library.load().low_products < products:
        pytest.skip("tiles do not multiply bfloat16 in this way here")
    monkeypatch.setattr(library.load(), "low_products", products)


@pytest.fixture(params=[1, 2], ids=["pairs", "matrix registers"])
def low_products(request, monkeypatch):
    choose_products(monkeypatch, request.param)


@pytest.mark.usefixtures("low_products")
@pytest.mark.parametrize("form", FORMS)
def test_heads_in_bfloat16_are_at_most_as_wrong_as_plain_code(form):
    """Beside the equation with everything in bfloat16: sizes of odd numbers, edges, every mask."""
    low, squares = torch.bfloat16, torch.zeros(2, 2, dtype=torch.float64)
    for seed in range(12):
        choose = random.Random(seed).choice
        options = {"heads": 4, "groups": choose([1, 2, 4]), "many": choose([1, 2, 3])}
        options |= {"size": choose([5, 32, 33, 130, 259]), "wide": choose([7, 32, 49, 129])}
        options["padded"] = choose([None, "some", "all"])
        options |= {name: choose([True, False]) for name in SWITCHES[:-1]}
        rows, cols = choose([49, 61, 97]), choose([127, 129, 140, 260])
        call, masks, dropout = made(form, rows, cols, seed, torch.float32, **options)
        call = call._replace(scale=options["size"] ** -0.5)
        given = {n: x for n, x in call._asdict().items() if torch.is_tensor(x) and x.requires_grad}
        rounded = {n: x.detach().to(low).requires_grad_() for n, x in given.items()}
        heads = ("query", "key", "value")
        ours = {
            n: x if n in heads else x.detach().float().requires_grad_() for n, x in rounded.items()
        }
        found = compared(call._replace(**ours), masks, dropout, call._replace(**rounded))
        for error, plain, size in found:
            assert error <= max(2.0 * plain, 2.0**-7 * size)  # single draws
        parts = torch.tensor(found, dtype=torch.float64)[:, :2].square()
        squares += torch.stack([parts[0], parts[1:].sum(0)])
    assert (squares[:, 0] <= squares[:, 1]).all()


@pytest.mark.usefixtures("low_products")
def test_results_in_bfloat16_are_rounded_to_the_nearest_even_number():
    """As in PyTorch: with one key, gradients of values are sums of two, many of them ties."""
    call, *_ = made("soft", 2, 1, 0, torch.float32, groups=2, many=1, wide=128)
    heads = {n: getattr(call, n).detach().bfloat16() for n in ("query", "key", "value")}
    call = call._replace(**heads | {"value": heads["value"].requires_grad_()})
    grad_out = torch.randn(BATCH, 2, 2, 128).bfloat16()
    (found,) = torch.autograd.grad(attend(call), call.value, grad_out)
    exact = grad_out.float().sum(2, keepdim=True)
    assert torch.equal(found, exact.bfloat16())
    assert (exact.view(torch.int32) & 0xFFFF == 0x8000).any()  # ties


def test_dtypes_that_do_not_go_together_are_refused():
    call, *_ = made("soft", 3, 4, 0, torch.float32, coef=True, terms=True)
    with pytest.raises(TypeError, match=r"expected coef in torch\.float32, received"):
        attend(call._replace(coef=call.coef.to(torch.bfloat16)))


def results(call):
    """Return the output and every gradient."""
    out = attend(call)
    leaves = [x for x in call if torch.is_tensor(x) and x.requires_grad]
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


@pytest.mark.parametrize("many", [2, 3])  # the first with unrolled loops
@pytest.mark.parametrize("terms", [False, True])
def test_nan_of_any_component_stays_nan_in_a_maximum(many, terms):
    for component in range(many):
        call, *_ = made("hard", 49, 140, 0, torch.float32, groups=2, many=many, terms=terms)
        with torch.no_grad():
            call.key[:, :, component, 50, 0] = float("nan")
        out, *grads = results(call)
        assert out.isnan().all()
        assert all(grad.isnan().any() for grad in grads)


# The first with unrolled loops.
SIZES_OF_LAYERS = [{"units": 8, "heads": 8}, {"many": 3, "heads": 4}]


@pytest.mark.parametrize("sizes", SIZES_OF_LAYERS)
def test_nan_of_a_map_stays_nan_after_the_first_layer(sizes):
    call, *_ = made("layers", 49, 140, 0, torch.float32, **sizes)
    with torch.no_grad():
        call.key[:, :, 0, 50, 0] = float("nan")
    out, *grads = results(call)
    assert out.isnan().all()
    assert all(grad.isnan().any() for grad in grads)


@pytest.mark.parametrize("sizes", SIZES_OF_LAYERS)
def test_a_unit_that_is_exactly_zero_has_no_gradient(sizes):
    """Like torch's ReLU: units of zero weights."""
    call, *_ = made("layers", 5, 9, 3, torch.float32, **sizes)
    with torch.no_grad():
        call.first[0], call.first_bias[0] = 0.0, 0.0
    out = attend(call)
    grads = torch.autograd.grad(out.square().sum(), [call.first, call.first_bias])
    for grad in grads:
        assert not grad[0].any()
        assert grad[1:].any()


@pytest.mark.parametrize("form", FORMS)
def test_queries_that_are_not_needed_have_no_effect(form):
    """They are NaN. Tiles of them are skipped: a product would spread NaN to keys and values."""
    call, *_ = made(form, 3 * TALL, 140, 0, torch.float32, terms=True, dropped=True)
    needed = torch.arange(3 * TALL).expand(BATCH, -1) // TALL == torch.tensor([[0], [2]])

    def hiding(needed):
        query = torch.where(needed[:, None, :, None], call.query.detach(), math.nan)
        return call._replace(query=query.requires_grad_(), query_mask=needed)

    tiled = hiding(needed)
    grads = torch.autograd.grad(attend(tiled).sum(), (tiled.query, tiled.key, tiled.value))
    assert all(grad.isfinite().all() for grad in grads)
    _, sums = torch.ops.lit_probattn.tiles(*call._replace(query_mask=needed))
    assert ((sums[0] != 0) == needed[:, None]).all()  # the largest scores of computed tiles
    needed = needed & (torch.arange(3 * TALL) % 3 > 0)
    out = attend(hiding(needed))
    assert (out.isfinite() & ((out != 0) == needed[:, None, :, None])).all()


@pytest.fixture
def new_memory():
    """A function that sets the byte of which the C library's new buffers consist."""
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    if change is None or platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc fills new memory")
    yield lambda byte: change(-6, 256 | byte ^ 255)  # M_PERTURB, which inverts the byte
    change(-6, 0)


def surrounded(x):
    """Return a copy of a tensor as a part of a larger one whose other numbers are NaN."""
    out = torch.full([size + 2 for size in x.shape], math.nan, dtype=x.dtype)
    for dim, size in enumerate(x.shape):
        out = out.narrow(dim, 1, size)
    return out.copy_(x.detach())


@pytest.mark.parametrize("products", [0, 1, 2], ids=["float32", "pairs", "matrix registers"])
@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_are_not_the_inputs_have_no_effect(form, products, new_memory, monkeypatch):
    """Neither NaN beside rows and after the last, nor NaN in buffers: results have equal bits."""
    if products:
        choose_products(monkeypatch, products)
    dtype = torch.bfloat16 if products else torch.float32
    for seed, (rows, cols, size, wide) in enumerate([(1, 1, 1, 1), (49, 129, 33, 19)]):
        options = {"size": size, "wide": wide, "padded": ("some", None)[seed]}
        options |= dict.fromkeys(("coef", "terms", "noise", "pairs", "dropped"), True)
        call, *_ = made(form, rows, cols, seed, torch.float32, **options)
        given = {n: x for n, x in call._asdict().items() if torch.is_tensor(x) and x.requires_grad}
        given |= {n: given[n].to(dtype) for n in ("query", "key", "value")}
        found = []
        for byte, place in ((0, torch.clone), (255, surrounded)):
            new_memory(byte)
            placed = {n: place(x).detach().requires_grad_() for n, x in given.items()}
            found.append(results(call._replace(**placed)))
        for plain, other in zip(*found, strict=True):
            assert plain.isfinite().all()
            assert torch.equal(plain, other)


@pytest.mark.parametrize("products", [0, 1, 2], ids=["float32", "pairs", "matrix registers"])
@pytest.mark.parametrize("form", ["soft", "hard", "sum", "power"])
def test_values_after_the_last_key_have_no_effect_on_queries(form, products, monkeypatch):
    """They are NaN, at lengths that end within every kind of block."""
    if products:
        choose_products(monkeypatch, products)
    call, *_ = made(form, 49, 140, 0, torch.float32, many=1, coef=True)
    heads = {n: getattr(call, n).detach() for n in ("query", "key", "value")}
    heads = {n: x.to(torch.bfloat16 if products else x.dtype) for n, x in heads.items()}
    for lengths in ([1, 130], [33, 127], [112, 139]):
        mask, found = torch.arange(140) < torch.tensor(lengths)[:, None], []
        for number in (0.0, math.nan):
            value = heads["value"].masked_fill(~mask[:, None, :, None], number)
            query = heads["query"].clone().requires_grad_()
            out = attend(call._replace(**heads | {"query": query, "value": value}, key_mask=mask))
            found.append((out, *torch.autograd.grad(out.sum(), query)))
        for plain, other in zip(*found, strict=True):
            assert plain.isfinite().all()
            assert torch.equal(plain, other)


@pytest.fixture
def threads():
    """A function that sets their number for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# Few keys; keys that threads share, of one owner; more.
LENGTHS = [*((count, 37, 41) for count in (1, 2, 3, 7)), (4, 37, 150)]
LONG = [(count, 100, 1100) for count in (2, 3, 5)]


@pytest.mark.parametrize(
    ("count", "rows", "cols"), mostly_slow([*LENGTHS, *LONG], [*LENGTHS, LONG[1]])
)
def test_any_number_of_threads_agrees_with_the_equation(
    count, rows, cols, threads, nan_filled_empties
):
    """Where every kind of term and mask is; with 150 keys, threads share gradients of queries."""
    options = dict.fromkeys(("shared", "terms", "dropped", "causal"), True)
    options |= (
        {"heads": 3, "groups": 3, "many": 3, "coef": True, "pairs": True} if rows < 100 else {}
    )
    call, masks, dropout = made("soft", rows, cols, 0, torch.float64, padded="some", **options)
    threads(count)
    for error, _, size in compared(call, masks, dropout):
        assert error <= 1e-13 * (1.0 + size)


@pytest.mark.usefixtures("low_products")
def test_threads_that_share_keys_agree_in_bfloat16(threads):
    """Each has other tiles of keys of the same head; they add to gradients of queries."""
    call, *_ = made("soft", 100, 300, 0, torch.float32, heads=2, groups=1, size=33)
    heads = ("query", "key", "value")
    call = call._replace(**{n: getattr(call, n).detach().bfloat16() for n in heads})
    for name in heads:
        getattr(call, name).requires_grad_()
    found = []
    for count in (1, 3):
        threads(count)
        found.append(results(call))
    (out, query, *others), (out_3, query_3, *others_3) = found
    torch.testing.assert_close(query_3, query, rtol=2.0**-7, atol=1e-6)  # one rounding
    for one, other in zip((out, *others), (out_3, *others_3), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("count", "items", "jobs"),
    [(1, 704, 1), (2, 704, 32), (16, 704, 88), (64, 704, 256), (2, 3, 3)],
)
def test_jobs_of_many_threads_pack_no_head_for_every_tile(count, items, jobs, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    bounds = job_bounds(items)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, items, jobs + 1)


@pytest.mark.parametrize("count", [1, 3])
def test_key_heads_and_value_heads_that_do_not_nest(count, threads):
    """Of six heads, each key head has three and each value head has two."""
    call, masks, dropout = made("soft", 20, 140, 0, torch.float64, heads=6, groups=2, terms=True)
    value = torch.randn(BATCH, 3, 140, 7, dtype=torch.float64, requires_grad=True)
    threads(count)
    for error, _, size in compared(call._replace(value=value), masks, dropout):
        assert error <= 1e-13 * (1.0 + size)


@pytest.mark.parametrize("count", [1, 4])
def test_what_rounding_leaves_over_is_taken_out_of_the_gradients_of_row_terms(count, threads):
    """All components of a row sum to zero: norms of queries multiply what is left."""
    options = {"heads": 3, "groups": 3, "many": 3, "padded": "some"}
    options |= dict.fromkeys(("shared", "coef", "terms", "pairs", "dropped", "causal"), True)
    call, *_ = made("soft", 37, 150, 1, torch.float32, **options)
    threads(count)
    row = torch.autograd.grad(attend(call).sin().sum(), call.row)[0].double()
    assert row.abs().mean() > 0.01
    assert row.sum(-1).abs().mean() < 2e-8


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(("row_spread", "col_spread"), [(1, 1), (1, 60), (60, 1), (9, 9), (60, 60)])
def test_components_that_share_a_map_may_be_far_apart(row_spread, col_spread, hidden):
    """Some keys lack a component, one has none; all keys of the second sample may have none."""
    options = {"heads": 3, "groups": 3, "many": 3, "shared": True, "terms": True, "causal": True}
    for dtype, largest in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        call, masks, _ = made("soft", 37, 70, 2, dtype, **options)
        with torch.no_grad():
            call.row.mul_(row_spread), call.col.mul_(col_spread)
            call.col[:, :, 1, ::3] = call.col[0, :, :, 5] = -math.inf
            call.col[1, :, :, : 70 * hidden] = -math.inf
        for error, _, size in compared(call, masks, None):
            assert error <= largest * max(1.0, size)


def test_more_components_than_tiles_hold_are_refused():
    call, *_ = made("soft", 3, 4, 0, torch.float64, terms=True, many=17)
    with pytest.raises(NotImplementedError, match=r"at most 16 components.*received 17"):
        attend(call)
    call, *_ = made("layers", 3, 4, 0, torch.float64, many=17)
    call = call._replace(heads=18, second=torch.zeros(18, 5, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="heads with layers, received 18"):
        attend(call)


# Narrower registers of the same source; without flags of its own, a compiler takes the widest.
NARROWER = {"AVX2": "-mno-avx512f", "SSE": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma"}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize("target", NARROWER)
def test_narrower_registers_pass_the_self_test(target, tmp_path):
    code = "from lit_probattn.kernels.cpu.selftest import failure; print(failure())"
    chosen = {"CC": f"cc {NARROWER[target]}", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | chosen, capture_output=True, text=True
    )
    assert done.stdout.strip() == "None", done.stdout + done.stderr


@pytest.mark.parametrize("shifted", [False, True])
def test_more_components_than_tiles_hold_go_block_by_block(shifted, monkeypatch):
    """Of 17 components `native` says so, and `auto` takes others, in a graph too."""
    layer = MGKAttention(8, 2, num_components=MOST + 1, shifted_keys=shifted).double()
    x, found = torch.randn(2, 60, 8, dtype=torch.float64), {}
    layer.backend = "native"
    with pytest.raises(NotImplementedError, match="supports at most 16 components, received 17"):
        layer(x)
    for layer.backend in ("reference", "auto"):
        found[layer.backend] = layer(x)
    torch.testing.assert_close(found["auto"], found["reference"], rtol=0, atol=1e-12)
    monkeypatch.setattr(HeadCall, "graph", "compiled")
    assert layer.core.pick(layer.call(x)) != "native"


@pytest.mark.slow
def test_a_graph_of_more_components_than_tiles_hold_computes_the_same():
    layer = MGKAttention(8, 2, num_components=MOST + 1, shifted_keys=True).double()
    x = torch.randn(2, 60, 8, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-12)
