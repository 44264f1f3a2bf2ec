"""What masks, dropout, tiles, extreme scores and terms of points do to the dense kernels."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lit_probattn.kernels.dense import lowering, selftest
from lit_probattn.kernels.dense.operators import MixtureInputs, mixture_attention
from lit_probattn.kernels.dense.selftest import (
    FORMS,
    _Form,
    compare,
    compare_points,
    plain_attention,
)
from lit_probattn.kernels.runtime import NO_PAIRS, Launch, draw_tensor, forced, recording
from lit_probattn.kernels.selftest import BOUND
from lit_probattn.randomness import STREAM_DROPOUT, AttentionDropout, RandomKey
from tests.kernels.queries import check_that_others_change_no_bit
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
B, H, N, L, E = 2, 2, 37, 43, 11
TILES = [((16, 32), "causal"), ((32, 16), "all"), ((64, 64), "causal"), ((16, 16), "masked")]


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def attend(query, key, value, **options):
    """Softmax attention by the kernel, with options by name."""
    absent = {"scales": None, "row_bias": None, "key_bias": None, "hard": False, **NO_PAIRS}
    given = {**absent, "scale": query.shape[-1] ** -0.5, **options}
    return mixture_attention(*MixtureInputs(query, key, value, **given))[0]


@pytest.mark.parametrize(
    ("family", "blocks", "selection"),
    mostly_slow(
        [(family, *tile) for family in FORMS for tile in TILES],
        [("softmax", (64, 64), "causal"), ("mgk", (16, 16), "masked"), ("smgk", (32, 16), "all")],
    ),
)
@pytest.mark.usefixtures("one_sample")
def test_tile_sizes_change_nothing_but_rounding(family, blocks, selection):
    form = FORMS[family][0]
    with forced(Launch(*blocks)):
        pairs = compare(form, selection, 5, DEVICE, torch.float32, (E, 7), (19, 29))
    for found, exact in pairs:
        torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("nan_filled_empties", "one_sample")
@pytest.mark.parametrize("form", FORMS["mgk"], ids=["soft", "hard"])
def test_wide_components_have_a_pass_for_keys_and_one_for_values(form):
    """Their sums do not fit into one program's registers together."""
    with recording() as launches:
        compare(form, "causal", 5, DEVICE, torch.float16, (72, 72), (29, 37))
    made = [(x.options["KEYS"], x.options["VALUES"]) for x in launches if "KEYS" in x.options]
    assert made == [(True, False), (False, True)]
    for found, exact in compare(form, "causal", 5, DEVICE, torch.float16, (72, 72), (29, 37)):
        error = (found.double() - exact).abs().max() / exact.abs().max()
        assert error < BOUND[torch.float16]


@pytest.mark.usefixtures("nan_filled_empties")
def test_rows_that_see_nothing_give_zeros_and_zero_gradients():
    query, key, value = (draw(B, H, n, E).requires_grad_() for n in (N, L, L))
    key_mask = torch.ones(B, L, dtype=torch.bool, device=DEVICE)
    key_mask[1] = False
    out = attend(query, key[:, :, None], value, key_mask=key_mask)
    out.backward(draw(B, H, N, E))
    assert (out[1] == 0).all()
    for tensor in (query, key, value):
        assert (tensor.grad[1] == 0).all()
        assert tensor.grad[0].abs().sum() > 0
    # Causal with fewer keys than queries: the first rows see nothing.
    out = attend(value, query[:, :, None, :5], query[:, :, :5], is_causal=True)
    assert (out[:, :, : L - 5] == 0).all()
    assert out.isfinite().all()
    assert out[:, :, L - 5 :].abs().amin(-1).min() > 0


PADDED = ("end", "both", "holes")


def padded_mask(kind, length):
    """Real keys of four samples: all, none, some; tiles of 16 begin or end with one of them."""
    mask = torch.zeros(4, length, dtype=torch.bool, device=DEVICE)
    mask[0] = True
    mask[2, 0 if kind == "end" else 31 : 33] = True
    mask[3, 2 if kind == "both" else 0 : 3] = True
    if kind == "holes":
        mask[2, ::2], mask[3, 48] = False, True
    return mask


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("family", "kind", "is_causal"),
    mostly_slow(
        itertools.product(FORMS, PADDED, [False, True]),
        [("softmax", "both", True)],
    ),
)
def test_loops_that_end_with_the_real_keys_change_no_bit(family, kind, is_causal):
    """Beside the same mask given for pairs, of which every tile is looked at."""
    form, rows, length = FORMS[family][0], 13, 53
    key_mask = padded_mask(kind, length)
    pair_mask = key_mask[:, None, None].expand(4, 1, rows, length)
    leaves = [draw(4, 1, rows, E), draw(4, 1, form.products, length, E), draw(4, 1, length, E)]
    if form.terms:
        leaves += [draw(4, 1, form.components, n) for n in (rows, length)]
    leaves = [x.requires_grad_() for x in leaves]
    terms = dict(zip(("row_bias", "key_bias"), leaves[3:], strict=False))
    cotangent, made = draw(4, 1, rows, E), []
    for masks in ({"key_mask": key_mask}, {"pair_mask": pair_mask}):
        with forced(Launch(16, 16)):
            out = attend(*leaves[:3], is_causal=is_causal, **terms, **masks)
            made.append((out, *torch.autograd.grad(out, leaves, cotangent)))
    assert (made[0][0][1] == 0).all()
    for found, expected in zip(*made, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("family", "is_causal", "blocks"),
    mostly_slow(
        itertools.product(FORMS, [False, True], [(16, 16), (16, 32), (32, 16)]),
        [("softmax", True, (16, 32)), ("smgk", False, (32, 16))],
    ),
)
def test_queries_that_are_not_needed_change_no_bit_of_the_others(family, is_causal, blocks):
    form, rows, length = FORMS[family][0], 100, 101
    leaves = [draw(4, 1, rows, E), draw(4, 1, form.products, length, E), draw(4, 1, length, E)]
    if form.terms:
        leaves += [draw(4, 1, form.components, n) for n in (rows, length)]

    def masked(query, key, value, *given, **options):
        terms = dict(zip(("row_bias", "key_bias"), given, strict=False))
        return attend(query, key, value, is_causal=is_causal, **terms, **options)

    check_that_others_change_no_bit(masked, leaves, draw(4, 1, rows, E), blocks)


def test_the_first_key_may_be_the_only_one():
    query, key, value = (draw(2, 1, n, E) for n in (5, 19, 19))
    key_mask = torch.zeros(2, 19, dtype=torch.bool, device=DEVICE)
    key_mask[0, 0], key_mask[1, 1] = True, True
    out = attend(query, key[:, :, None], value, key_mask=key_mask)
    expected = torch.stack([value[0, :, :1], value[1, :, 1:2]]).expand_as(out)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


def test_large_scores_have_the_weights_of_their_differences():
    """Of which a maximum before the scale would leave nothing."""
    query, value = draw(1, 1, 5, E), draw(1, 1, 19, E)
    key = draw(1, 1, 19, E) * 0.01 + 400.0 * query[:, :, :1] / query[:, :, :1].square().sum()
    query = query[:, :, :1].expand(1, 1, 5, E) * torch.linspace(1.0, 1.5, 5)[:, None].to(DEVICE)
    out = attend(query, key[:, :, None], value)
    scores = query.double() @ key.double().mT * E**-0.5
    assert scores.min() > 100
    expected = scores.softmax(-1) @ value.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("nan_filled_empties")
def test_tiles_of_padding_are_not_looked_at():
    """Not a number in whole tiles before the first real key and after the last one."""
    leaves = [draw(2, 1, n, E) for n in (13, 80, 80)]
    key_mask = torch.zeros(2, 80, dtype=torch.bool, device=DEVICE)
    key_mask[0, 35:43], key_mask[1, :18] = True, True
    for x in leaves[1:]:
        x[0, :, :32], x[0, :, 48:], x[1, :, 32:] = (float("nan"),) * 3
    query, key, value = leaves = [x.requires_grad_() for x in leaves]
    with forced(Launch(16, 16)):
        out = attend(query, key[:, :, None], value, key_mask=key_mask)
        grads = torch.autograd.grad(out, leaves, draw(2, 1, 13, E))
    assert out.isfinite().all()
    assert out.abs().amin() > 0
    for grad in grads:
        assert grad.isfinite().all()
    hidden = ~key_mask[:, None, :, None].expand_as(key)
    assert (grads[1][hidden] == 0).all()
    assert (grads[2][hidden] == 0).all()
    assert grads[2][~hidden].abs().amin() > 0


def test_bias_of_minus_infinity_hides_like_a_mask():
    query, key, value = (draw(1, H, n, E).requires_grad_() for n in (N, L, L))
    hidden = torch.rand(1, H, N, L).to(DEVICE) < 0.5
    bias = torch.zeros(1, H, N, L, device=DEVICE).masked_fill(hidden, float("-inf"))
    bias[:, :, 3] = float("-inf")
    found = attend(query, key[:, :, None], value, bias=bias)
    masked = attend(query, key[:, :, None], value, pair_mask=~hidden & (bias > float("-inf")))
    torch.testing.assert_close(found, masked)
    assert (found[:, :, 3] == 0).all()
    grads = torch.autograd.grad(found.sum(), (query, key, value))
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("family", mostly_slow(FORMS, ["mgk"]))
def test_keys_whose_prior_is_zero_have_no_weight(family):
    """Of all components: as if the keys were not there, even where a whole tile of them begins."""
    form, first = FORMS[family][0], 35
    query, key = draw(1, H, N, E), draw(1, H, form.products, L, E)
    leaves = [x.requires_grad_() for x in (query, key, draw(1, H, L, E))]
    terms = draw(1, H, form.components, L)
    row = draw(1, H, form.components, N) if form.terms else None
    terms[..., :first] = float("-inf")
    found = attend(*leaves, key_bias=terms, row_bias=row)
    query, key, value = leaves
    part = (key[..., first:, :], value[..., first:, :])
    expected = attend(query, *part, key_bias=terms[..., first:], row_bias=row)
    torch.testing.assert_close(found, expected)
    cotangent = draw(1, H, N, E)
    pairs = zip(
        *(torch.autograd.grad(x, leaves, cotangent) for x in (found, expected)), strict=True
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize("broadcast", mostly_slow(["HN", "B", "L", "BHNL"], ["HN"]))
def test_bias_gets_the_gradient_of_what_it_is_broadcast_to(broadcast):
    for rows, keys in ((N, 31), (2, 2)):
        sizes = {"B": B, "H": H, "N": rows, "L": keys}
        query, key, value = (draw(B, H, n, E) for n in (rows, keys, keys))
        bias = draw(*(1 if name in broadcast else size for name, size in sizes.items()))
        bias.requires_grad_()
        cotangent = draw(B, H, rows, E)
        out = attend(query, key[:, :, None], value, bias=bias, is_causal=True)
        (found,) = torch.autograd.grad(out, bias, cotangent)
        seen = torch.ones(rows, keys, dtype=torch.bool, device=DEVICE).tril(keys - rows)
        exact = bias.detach().double().requires_grad_()
        scores = query.double() @ key.double().mT * E**-0.5 + exact
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        (expected,) = torch.autograd.grad(weights @ value.double(), exact, cotangent.double())
        torch.testing.assert_close(found.double(), expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("family", mostly_slow(FORMS, ["mgk"]))
def test_dropped_pairs_are_those_of_the_reference(family):
    """One sample per basis vector as values: the output is the dropped weights themselves."""
    form = FORMS[family][0]
    samples = torch.tensor([41, 2**33 + 7], device=DEVICE)
    dropout = AttentionDropout(0.3, RandomKey(3, step=5, sample_ids=samples, layer=2))
    rows, keys = 37, 45
    query, key = draw(B, H, rows, E), draw(B, H, form.products, keys, E)
    value = torch.eye(keys, device=DEVICE).expand(B, H, keys, keys).contiguous()
    words = draw_tensor(dropout.key.philox_key(STREAM_DROPOUT), dropout.key.samples(B, DEVICE))
    terms = {}
    if form.terms:
        terms = {
            "row_bias": draw(B, H, form.components, rows),
            "key_bias": draw(B, H, form.components, keys),
        }
    plain = attend(query, key, value, **terms)
    dropped = attend(query, key, value, draw=words, threshold=dropout.threshold, **terms)
    keep = dropout.keep(B, H, range(rows), range(keys), DEVICE)
    assert 0.6 < keep.float().mean() < 0.8
    torch.testing.assert_close(dropped, plain * keep * dropout.scale)


@pytest.mark.parametrize(
    ("far", "dtype"),
    mostly_slow(
        itertools.product([3.0, 300.0], [torch.float32, torch.float16]),
        [(300.0, torch.float16)],
    ),
)
def test_one_exponential_stays_right_when_components_are_far_apart(far, dtype):
    """Row and key terms of opposite sign: F would underflow; such heads take the general sum."""
    heads = 3  # of which one stays narrow
    query, key, value = draw(1, heads, N, E), draw(1, heads, 1, L, E), draw(1, heads, L, E)
    query, key, value = (x.to(dtype).requires_grad_() for x in (query, key, value))
    row, col = draw(1, heads, 2, N), draw(1, heads, 2, L)
    row[:, :, 0] += far
    col[:, :, 1, ::2] += far  # half of the keys favour the component that queries do not
    row[:, 0], col[:, 0] = row[:, 0] / far, col[:, 0] / far
    row, col = row.requires_grad_(), col.requires_grad_()
    cotangent = draw(1, heads, N, E)
    found = attend(query, key, value, row_bias=row, key_bias=col)
    leaves = (query, key, value, row, col)
    grads = torch.autograd.grad(found, leaves, cotangent.to(dtype))

    def plain(precision):
        """Output and gradients by the equation."""
        inputs = [x.detach().to(precision).requires_grad_() for x in leaves]
        scales = torch.full((heads, 2), E**-0.5, dtype=precision, device=DEVICE)
        out = plain_attention(*inputs[:3], scales, *inputs[3:], False)
        return out, *torch.autograd.grad(out, inputs, cotangent.to(precision))

    for a, eager, exact in zip(
        (found, *grads), plain(torch.float32), plain(torch.float64), strict=True
    ):
        ours, theirs = ((x.double() - exact).square().mean().sqrt() for x in (a, eager))
        rounding = torch.finfo(dtype).eps * exact.abs().max()
        assert ours <= (2 * theirs if dtype == torch.float32 else 2 * theirs + 4 * rounding)


def test_weights_of_float16_stay_above_its_smallest_number():
    """Components far apart: the shared exponential is divided by up to 2^16, of a range of 2^24."""
    far, keys = 10.0, 97
    query, key = torch.ones(1, 1, N, E), torch.zeros(1, 1, 1, keys, E)
    key[..., 0, :] = 7.0 * E**-0.5  # one key outweighs each of the others by e^7
    value = torch.ones(1, 1, keys, E)
    value[..., 0, :] = 0.0
    row, col = torch.zeros(1, 1, 2, N), torch.zeros(1, 1, 2, keys)
    row[:, :, 1], col[:, :, 0] = -far, -far
    half = [x.to(DEVICE, torch.float16) for x in (query, key, value)]
    found = attend(*half, row_bias=row.to(DEVICE), key_bias=col.to(DEVICE))
    share = torch.full_like(found, (keys - 1) / (keys - 1 + math.exp(7.0)))
    torch.testing.assert_close(found, share, rtol=4e-3, atol=0)


def test_strides_of_any_kind_are_read_right():
    base = draw(N, H, 2, E, B).permute(4, 1, 0, 2, 3)  # last dimension not contiguous
    query, key, value = base[..., 0, :], base[..., 1, :], draw(B, N, 2 * H, E).transpose(1, 2)
    value = value[:, ::2]
    found = attend(query, key[:, :, None], value)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found, expected)
    one_key = draw(B, H, 1, 1, E).expand(B, H, 1, L, E)
    wide = attend(query, one_key, draw(B, H, L, 1).expand(B, H, L, E))
    assert wide.isfinite().all()


@pytest.mark.usefixtures("nan_filled_empties")
def test_gradients_of_inputs_with_strided_columns():
    """Kernels store rows of numbers: room with the input's strides is too small."""
    inputs = [draw(1, 2, n, E) for n in (9, 13, 13)]
    cotangent, grads = draw(1, 2, 9, E), []
    for transposed in (None, 0, 1, 2):
        strided = [x.mT.contiguous().mT if i == transposed else x for i, x in enumerate(inputs)]
        query, key, value = leaves = [x.detach().requires_grad_() for x in strided]
        grads.append(torch.autograd.grad(attend(query, key[:, :, None], value), leaves, cotangent))
    for found in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, grads[0], strict=True))


def test_what_rounding_leaves_over_is_taken_out_of_the_gradients_of_row_terms():
    """All components of a row sum to zero, though δ comes from an output of 11 bits."""
    query, key, value = (draw(1, 1, n, E, dtype=torch.float16) for n in (5, 7, 7))
    row = draw(1, 1, 2, 5).requires_grad_()
    terms = {"scales": draw(1, 2).abs(), "row_bias": row, "key_bias": draw(1, 1, 2, 7)}
    out = attend(query, key[:, :, None], value, **terms)
    (found,) = torch.autograd.grad(out, row, draw(1, 1, 5, E, dtype=torch.float16))
    assert found.abs().mean() > 0.01
    assert found.sum(2).abs().max() < 1e-5


@pytest.mark.usefixtures("nan_filled_empties")
def test_no_queries_and_no_keys():
    empty = draw(B, H, 0, E)
    assert attend(empty, draw(B, H, 1, L, E), draw(B, H, L, E)).shape == (B, H, 0, E)
    query = draw(B, H, N, E).requires_grad_()
    out = attend(query, empty[:, :, None], empty)
    assert (out == 0).all()
    out.sum().backward()
    assert (query.grad == 0).all()


@pytest.mark.slow
def test_backward_gives_the_same_bits_every_time():
    query, key, value = (draw(B, 4, n, E).requires_grad_() for n in (N, L, L))
    cotangent = draw(B, 4, N, E)
    runs = [
        torch.autograd.grad(
            attend(query, key[:, :2, None], value[:, :1], is_causal=True),
            (query, key, value),
            cotangent,
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# ---- with terms of points from the operator that lowers them, against distances in float64 ------

POINT_FORMS = {
    "mgk, equal": _Form(2, 2, False, True),
    "mgk, three": _Form(3, 3, False, False),
    "hard": _Form(2, 2, True, False),
    "smgk": _Form(2, 1, False, True),
    "smgk, own variances": _Form(3, 1, False, False),
    "smgk, hard": _Form(2, 1, True, True),
    "one": _Form(1, 1, False, False),
}


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("name", "gaussian"),
    mostly_slow(
        itertools.product(POINT_FORMS, [True, False]),
        [("hard", True), ("smgk", False)],
    ),
)
def test_output_and_all_gradients_are_those_of_the_equation(name, gaussian, monkeypatch):
    """Queries and keys in several tiles of terms and of pairs; heads that share keys."""
    monkeypatch.setattr(lowering, "_BLOCK", 32)
    monkeypatch.setattr(selftest, "_BATCH", 1)
    with forced(Launch(32, 32)):
        pairs = compare_points(
            POINT_FORMS[name],
            "causal",
            5,
            DEVICE,
            torch.float32,
            (11, 7),
            (35, 39),
            gaussian,
        )
    for found, exact in pairs:
        torch.testing.assert_close(found.double(), exact, atol=4e-5, rtol=4e-5)
