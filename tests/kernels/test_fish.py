"""FiSH kernels against the float64 reference: output, every gradient, masks, noise, dropout."""

from __future__ import annotations

import itertools

import pytest
import torch

from lit_probattn.attention import FiSHAttention
from lit_probattn.kernels import selftest
from lit_probattn.kernels.fish import plan as fish_call
from lit_probattn.kernels.fish import selftest as fish_selftest
from lit_probattn.kernels.fish.operators import fish_attention
from lit_probattn.kernels.fish.selftest import _KEYS, _ROWS, compare, self_test
from lit_probattn.kernels.runtime import Launch, draw_tensor, forced
from lit_probattn.kernels.selftest import causal
from lit_probattn.randomness import STREAM_NOISE, RandomKey, normal_noise, philox4x32
from tests.attention.fish.oracle import fish_oracle
from tests.kernels.queries import check_that_others_change_no_bit
from tests.support.helpers import largest_difference, run_with_gradients, use_oracle
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"num_heads": 3, "num_global_heads": 2, "noise_scale": 0.3}


@pytest.mark.usefixtures("nan_filled_empties", "one_sample")
@pytest.mark.parametrize(
    ("family", "blocks", "heads"),
    mostly_slow(
        [
            (family, *tile)
            for family in ("fish", "gfish")
            for tile in (((16, 32), 1), ((32, 16), 2))
        ],
        [("fish", (32, 16), 2)],
    ),
)
def test_tiles_and_head_groups_change_nothing_but_rounding(family, blocks, heads, monkeypatch):
    """Of three heads: the last group of two has a single one."""
    monkeypatch.setattr(fish_call, "MOST_HEADS", heads)
    monkeypatch.setattr(fish_selftest, "_HEADS", 3)
    with forced(Launch(*blocks)):
        pairs = self_test(family, DEVICE, torch.float32, (11, 7), (21, 29))
    for found, exact in pairs:
        torch.testing.assert_close(found.double(), exact, atol=3e-5, rtol=3e-5)


def words(key: RandomKey, batch: int) -> torch.Tensor:
    return draw_tensor(key.philox_key(STREAM_NOISE), key.samples(batch, DEVICE))


@pytest.mark.parametrize(
    ("first", "count", "aligned"),
    [(0, 7, True), (4, 4, True), (0, 2, True), (2, 2, False), (4, 2, False), (5, 1, False)],
)
def test_noise_is_the_draw_of_the_reference(first, count, aligned):
    """Integer words bit for bit; normals to float32 rounding, of every map of a head group."""
    from tests.kernels.noise_kernel import write_noise

    key = RandomKey(3, 5, torch.tensor([4, 2**32 - 5]), 2)
    out = torch.empty(count, 32, 64, device=DEVICE)
    found_words = torch.empty(4, 32, 64, dtype=torch.int64, device=DEVICE)
    write_noise[(1,)](
        words(key, 2), out, found_words, first, COUNT=count, ALIGNED=aligned, ROWS=32, COLS=64
    )
    rows, cols = torch.arange(5, 37).view(-1, 1), torch.arange(3, 67).view(1, -1)
    counter = (rows, cols, torch.tensor(first // 4), torch.tensor(2**32 - 5))
    expected_words = torch.stack(philox4x32(counter, key.philox_key(STREAM_NOISE)))
    assert torch.equal(found_words.cpu(), expected_words)
    cpu = torch.device("cpu")
    maps = normal_noise(key, 2, first + count, range(5, 37), range(3, 67), cpu, torch.float64)
    # A normal from float32 arithmetic: relative error a few 2⁻²⁴, and |ε| ≤ 6.7.
    torch.testing.assert_close(out.cpu().double(), maps[1, first:], atol=1e-6, rtol=1e-6)


LAYERS = {
    "fish, simplex, scaled before": {"mixing": "simplex", "scale_position": "before"},
    "noise on scaled scores": {"scale_position": "before", "noise_position": "scaled"},
    "mish, noise per head": {"mixer": "shared", "noise": "local", "sigma_shape": "scalar"},
    "gfish, noise per unit": {"mixer": "mlp", "noise": "local_global", "mixing_bias": "all"},
    "more heads than a group": {"num_heads": 5, "noise": "local"},
}


def make_layer(options, dtype=torch.float32):
    torch.manual_seed(1)
    layer = FiSHAttention(11, head_dim=7, **{**SIZES, **options}).to(DEVICE, dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("core.mixing.weights"):
                parameter.copy_(torch.randn(parameter.shape))
    return layer


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize("name", mostly_slow(LAYERS, ["gfish, noise per unit"]))
def test_layer_equals_independent_sums(name):
    """The whole layer, with every mask, a sample that sees nothing and a bias with a gradient."""
    layer, exact = make_layer(LAYERS[name]), make_layer(LAYERS[name], torch.float64)
    rng = RandomKey(3, step=5, sample_ids=torch.tensor([41, 7])).fold(2)
    key_mask = torch.rand(2, 19) < 0.7
    key_mask[1] = False
    pairs = torch.rand(2, 1, 17, 19) < 0.7
    inputs = [
        torch.randn(2, 17, 11),
        torch.randn(2, 19, 11),
        torch.randn(1, layer.num_heads, 17, 19),
    ]

    def call(which):
        def run(leaves):
            return which(
                *(leaves[0], leaves[1]),
                **{"key_mask": key_mask.to(DEVICE), "attn_mask": pairs.to(DEVICE)},
                **{"is_causal": True, "bias": leaves[2], "rng": rng},
            )

        return run

    layer.backend = "triton"
    use_oracle(exact, fish_oracle)
    found = run_with_gradients(layer, [x.to(DEVICE) for x in inputs], call(layer))
    truth = run_with_gradients(exact, [x.to(DEVICE).double() for x in inputs], call(exact))
    out, grad = largest_difference(found, truth)
    assert out < 1e-5
    assert grad < 2e-4  # sums of up to 600 terms of order one, in float32
    assert (found[0][1] == layer.out_proj.bias).all()
    assert found[1]["input0"][1].abs().max() == 0


@pytest.mark.parametrize(
    "shape", mostly_slow([((2, 3),), ((1, 3),), ((2, 1),), ((1, 1),)], [((2, 1),), ((1, 1),)])
)
def test_bias_gradient_is_summed_over_what_the_bias_is_broadcast_over(shape):
    """In several tiles of queries and of keys."""
    rows, keys = 37, 70
    query, key, value = (torch.randn(2, *x, 5) for x in ((2, rows), (2, keys), (3, keys)))
    first, bias = torch.randn(3, 2), torch.randn(*shape, rows, keys)
    cotangent = torch.randn(2, 3, rows, 5)
    query, key, value, first, bias, cotangent = (
        x.to(DEVICE) for x in (query, key, value, first, bias, cotangent)
    )
    leaf, exact = bias.clone().requires_grad_(), bias.double().requires_grad_()
    fish_attention(query, key, value, first=first, bias=leaf).backward(cotangent)
    scores = torch.einsum("hg,bgij->bhij", first.double(), query.double() @ key.double().mT)
    ((scores + exact).softmax(-1) @ value.double()).backward(cotangent.double())
    torch.testing.assert_close(leaf.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


def test_every_pass_is_launched_by_its_own_plan(monkeypatch):
    """Another one computes the same, in tiles that may not fit."""
    asked, plain = [], fish_call.make_plan

    def make_plan(kernel, *given):
        asked.append(kernel)
        return plain(kernel, *given)

    monkeypatch.setattr(fish_call, "make_plan", make_plan)
    leaves = [torch.randn(1, *x, 5, device=DEVICE).requires_grad_() for x in ((2, 3), (2, 4))]
    bias = torch.randn(1, 3, 3, 4, device=DEVICE).requires_grad_()
    value, first = torch.randn(1, 3, 4, 5, device=DEVICE), torch.randn(3, 2, device=DEVICE)
    fish_attention(*leaves, value, first=first, bias=bias).sum().backward()
    assert {"forward", "grad_query", "grad_bias"} < set(asked)
    assert any("key" in name for name in asked)


def test_pairs_may_be_hidden_per_head():
    query, key, value = torch.randn(2, 2, 9, 5), torch.randn(2, 2, 11, 5), torch.randn(2, 3, 11, 5)
    first, pairs = torch.randn(3, 2), torch.rand(1, 3, 9, 11) < 0.6
    query, key, value, first, pairs = (x.to(DEVICE) for x in (query, key, value, first, pairs))
    found = fish_attention(query, key, value, first=first, pair_mask=pairs)
    scores = torch.einsum("hg,bgij->bhij", first, query @ key.mT)
    expected = scores.masked_fill(~pairs, float("-inf")).softmax(-1).nan_to_num() @ value
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("nan_filled_empties", "one_sample")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["fish", "gfish"])
def test_keys_and_values_may_have_a_pass_each(family, monkeypatch):
    monkeypatch.setattr(fish_call.FishCall, "key_passes", lambda call: ("grad_key", "grad_value"))
    for found, exact in self_test(family, DEVICE, torch.float32, (8, 8), (17, 35)):
        torch.testing.assert_close(found.double(), exact.double(), atol=2e-5, rtol=2e-5)


@pytest.mark.slow
def test_backward_gives_the_same_bits_twice():
    grads = []
    for _ in range(2):
        pairs = self_test("fish", DEVICE, torch.float32, (8, 8), (17, 18))
        grads.append([found for found, _ in pairs])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_plans_never_ask_for_more_heads_or_columns_than_they_may():
    for num_heads, head_dim, noise in itertools.product(
        (1, 3, 8, 12, 16), (16, 64, 128), (0, 1, 2)
    ):
        heads = fish_call.Heads(2, num_heads, head_dim, 0, noise, 2)
        for kernel in ("forward", "grad_query", "grad_key", "grad_value", "grad_bias"):
            plan = fish_call.make_plan(kernel, heads, torch.device("cpu"))
            assert plan.group * plan.num_groups >= num_heads
            assert plan.group * (plan.num_groups - 1) < num_heads
            assert plan.group <= 4
            assert plan.group * head_dim <= 256
            if noise == 2 and plan.num_groups > 1:  # maps of a group come from whole Philox calls
                assert plan.group in (1, 2, 4)


def test_passes_have_two_loops_where_both_compile_without_spills():
    """The rows of kernels/README.md; `python -m profiling kernels --compile-table` made them."""

    def passes(*sizes, **rest):
        heads = fish_call.Heads(*sizes, 2, **rest)
        names = ("forward", "grad_query", "grad_key", "grad_value")
        plans = {name: fish_call.make_plan(name, heads, torch.device("cpu")) for name in names}
        return {name for name, plan in plans.items() if plan.parts}

    for head_dim in (64, 128):
        assert passes(2, 8, head_dim, 0, 0, causal=True) == {"forward", "grad_key"}
        assert passes(2, 8, head_dim, 0, 1) == passes(2, 8, head_dim, 0, 0, dropout=True) == set()
        assert passes(2, 8, head_dim, 4, 0) == set()
    assert passes(4, 8, 64, 0, 0) == set()
    assert passes(4, 8, 128, 0, 0) == {"forward"}
    assert passes(2, 8, 64, 0, 0) == {"grad_key"}
    assert passes(2, 8, 64, 0, 0, causal=True, padding=True) == {"grad_key"}
    assert passes(2, 8, 128, 0, 0, padding=True) == {"forward", "grad_key"}


def test_keys_after_the_last_real_one_are_not_read():
    """Their tiles hold NaN, which even a weight of zero would spread; a sample may have no key."""
    lengths = torch.tensor([20, 0, 40], device=DEVICE)
    key_mask = torch.arange(70, device=DEVICE) < lengths[:, None]
    shapes = [(3, 1, 20, 5), (3, 1, 70, 5), (3, 2, 70, 5), (2, 1)]
    query, key, value, first = (torch.randn(*shape, device=DEVICE) for shape in shapes)
    found = []
    for first_hole, hole in ((lengths, 0.0), (-(-lengths // 32) * 32, float("nan"))):
        hidden = (torch.arange(70, device=DEVICE) >= first_hole[:, None])[:, None, :, None]
        tensors = (query, key.masked_fill(hidden, hole), value.masked_fill(hidden, hole), first)
        leaves = [x.detach().requires_grad_() for x in tensors]
        with forced(Launch(32, 32)):
            out = fish_attention(*leaves[:3], first=leaves[3], key_mask=key_mask)
            found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    out, grads = found[0][0], found[0][1:]
    assert out[1].eq(0).all()
    assert all(grad[1].eq(0).all() for grad in grads[:3])


# Real keys: padding in the second tile and after the keys, padding in front.
REAL = [[*range(18), *range(20, 31)], range(5, 37)]


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("is_causal", "padded", "units"),
    mostly_slow(
        itertools.product([True, False], [True, False], [0, 2]),
        [(True, True, 0)],
    ),
)
def test_whole_tiles_without_checks_change_no_bit(is_causal, padded, units, monkeypatch):
    """Beside one loop that compares positions everywhere, and float64 sums over pairs."""
    torch.manual_seed(2)
    shapes = [(2, 1, 21, 5), (2, 1, 37, 5), (2, 2, 37, 7), (units or 2, 1)]
    shapes += [(units,), (2, units)] if units else []
    inputs = [torch.randn(*shape, device=DEVICE) for shape in shapes]
    cotangent = torch.randn(2, 2, 21, 7, device=DEVICE)
    key_mask = torch.zeros(2, 37, dtype=torch.bool, device=DEVICE)
    for sample, real in enumerate(REAL):
        key_mask[sample, list(real)] = True

    def run(dtype, attend):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        query, key, value, first, *rest = leaves
        out = attend(query, key, value, first, *(rest or (None, None)))
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(dtype))]

    def ours(query, key, value, first, first_bias, second):
        options = {"is_causal": is_causal, "key_mask": key_mask if padded else None}
        layers = {"first": first, "first_bias": first_bias, "second": second}
        return fish_attention(query, key, value, **layers, **options)

    def plain(query, key, value, first, first_bias, second):
        seen = torch.ones(21, 37, dtype=torch.bool, device=DEVICE)
        seen = seen.tril(37 - 21) if is_causal else seen
        seen = seen & key_mask[:, None, None] if padded else seen
        local = torch.einsum("hg,bgij->bhij", first, query @ key.mT)
        if second is not None:
            local = torch.relu(local + first_bias[:, None, None])
            local = torch.einsum("hu,buij->bhij", second, local)
        return local.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num() @ value

    with forced(Launch(16, 16)):
        monkeypatch.setattr(fish_call, "has_parts", lambda *_: True)
        found = run(torch.float32, ours)
        monkeypatch.setattr(fish_call, "has_parts", lambda *_: False)
        monkeypatch.setattr(fish_call, "is_late", lambda *_: False)
        together = run(torch.float32, ours)
    for parts, one_loop, exact in zip(found, together, run(torch.float64, plain), strict=True):
        assert torch.equal(parts, one_loop)
        torch.testing.assert_close(parts.double(), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("is_causal", "units", "blocks"),
    mostly_slow(
        itertools.product([False, True], [0, 2], [(16, 16), (16, 32), (32, 16)]),
        [(True, 0, (16, 32)), (False, 2, (32, 16))],
    ),
)
def test_queries_that_are_not_needed_change_no_bit_of_the_others(is_causal, units, blocks):
    torch.manual_seed(3)
    shapes = [(4, 1, 100, 5), (4, 1, 101, 5), (4, 2, 101, 7), (units or 2, 1)]
    shapes += [(units,), (2, units)] if units else []
    leaves = [torch.randn(*shape, device=DEVICE) for shape in shapes]

    def masked(query, key, value, *given, **options):
        layers = dict(zip(("first", "first_bias", "second"), given, strict=False))
        return fish_attention(query, key, value, **layers, is_causal=is_causal, **options)

    cotangent = torch.randn(4, 2, 100, 7, device=DEVICE)
    check_that_others_change_no_bit(masked, leaves, cotangent, blocks)


inside_kernels = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="looks into kernels, which only the interpreter allows"
)


def watch_tiles(monkeypatch, fault=None, num_keys=_KEYS):
    """Collect (whole, edge) of every causal tile of each pass; spoil those of the loop `fault`.

    whole: whether all its rows see all of it. edge: whether its loop compares positions.
    """
    from lit_probattn.kernels.fish import backward, forward

    reached, running = {}, []

    def launched(kernel, num_programs, args, options):
        made = [name for name in ("KEYS", "VALUES") if options.get(name)]
        running[:] = ["_".join([kernel.__name__.removesuffix("_kernel"), *made])]
        real_launch(kernel, num_programs, args, options)

    def inputs(call, tiles, b, rows, cols, first, edge, late, form):
        if form.causal:
            first_row, last_col = rows.handle.data.min(), cols.handle.data.max()
            whole = last_col <= first_row + (_KEYS - _ROWS) and last_col < num_keys
            reached.setdefault((*running, bool(form.parts)), set()).add((bool(whole), bool(edge)))
            if (*running, bool(edge)) == fault:
                tiles = [tile * 1.5 for tile in tiles]
        return real_inputs(call, tiles, b, rows, cols, first, edge, late, form)

    real_launch, real_inputs = fish_call.launch, forward.local_inputs
    monkeypatch.setattr(fish_call, "launch", launched)
    for module in (forward, backward):
        monkeypatch.setattr(module, "local_inputs", inputs)
    return reached


# The self-test's causal call (its other one draws, and has one loop everywhere), and a part of it.
WHOLE, PART = (_ROWS, _KEYS), (_ROWS - 72, _KEYS - 72)


@pytest.mark.slow
@inside_kernels
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("sizes", [WHOLE, PART])
def test_the_self_test_reaches_whole_and_edge_tiles_of_every_pass(head_dim, sizes, monkeypatch):
    """Each in the loop made for it, where a pass has two: in 16 bits, with the tiles of a GPU.

    Keys and values have a pass each. More rows and as many more keys reach no fewer tiles.
    """
    monkeypatch.setattr(fish_selftest, "_BATCH", 1)
    reached = watch_tiles(monkeypatch, num_keys=sizes[1])
    given = causal(*sizes, DEVICE), False, False, DEVICE, torch.float16, (head_dim,) * 2, sizes
    for found, exact in compare(*given):
        error = (found.double() - exact).abs().max() / exact.abs().max()
        assert error < selftest.BOUND[torch.float16]
    two_loops = {(True, False), (False, True)}
    one_loop = {(True, True), (False, True)}
    assert reached == {
        ("fish_forward", True): two_loops,
        ("fish_query_gradient", False): one_loop,
        ("fish_key_gradient_KEYS", True): two_loops,
        ("fish_key_gradient_VALUES", False): one_loop,
    }


FAULTS = itertools.product(["fish_forward", "fish_key_gradient_KEYS"], [False, True])


@pytest.mark.slow
@inside_kernels
@pytest.mark.usefixtures("one_sample")
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_the_self_test_sees_a_fault_in_either_loop(fault, monkeypatch):
    """By its causal call alone, of one sample: its verdict is on the largest error of both.

    Keys and values have a pass each, as with more than two heads.
    """

    def causal_only(selected, noisy, *rest):
        return [] if noisy else compare(selected, noisy, *rest)

    monkeypatch.setattr(fish_selftest, "compare", causal_only)
    monkeypatch.setattr(fish_call.FishCall, "key_passes", lambda call: ("grad_key", "grad_value"))
    watch_tiles(monkeypatch, fault)
    verdict = selftest.run("fish/fish", DEVICE, torch.float16, (32, 32))
    assert (verdict is None) == (fault is None), verdict
    assert fault is None or "relative error" in verdict
