"""Packed documents: groups, bounds, rows, cross-attention, nested tensors, refusals."""

from __future__ import annotations

import itertools

import pytest
import torch

from lit_probattn import functional as LF
from lit_probattn.attention import (
    FiSHAttention,
    LinearAttention,
    MGKAttention,
    MLKAttention,
    SoftmaxAttention,
)
from lit_probattn.attention.packing import Packing
from lit_probattn.randomness import RandomKey
from tests.support.helpers import double

C, H, E = 22, 2, 10
LENGTHS = [5, 1, 17, 0, 9, 16, 5, 11]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
IDS = torch.tensor([3, 31, 7, 1, 0, 12, 5, 40])
LAYERS = {
    "softmax": lambda: SoftmaxAttention(C, H, head_dim=E),
    "mgk": lambda: MGKAttention(C, H, head_dim=E),
    "smgk, rotary": lambda: MGKAttention(
        C, H, head_dim=E, shifted_keys=True, rotary_dim=4, rotary_shift="before"
    ),
    "prior per position": lambda: MGKAttention(
        C, H, head_dim=E, prior_share="head_position", max_positions=70
    ),
    "fish": lambda: FiSHAttention(C, 4, head_dim=E, num_global_heads=2),
    "linear": lambda: LinearAttention(C, H, head_dim=E),
}
EVERY = pytest.mark.parametrize("name", LAYERS)


def documents(x, bounds=BOUNDS):
    """Yield number and tokens (1, n, C) of every document that is not empty."""
    tokens = x.flatten(0, 1)
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start < stop:
            yield number, tokens[None, start:stop]


def key(ids=IDS):
    return RandomKey(5, step=2, sample_ids=ids)


@pytest.mark.parametrize("name", sorted({*LAYERS} - {"linear"}))
def test_equal_bounds_of_keys_are_grouped_as_in_self_attention(name, monkeypatch):
    """Callers of `varlen_attn` pass both bounds in self-attention, too."""
    layer, x = LAYERS[name]().double(), double(1, sum(LENGTHS), C)
    asked = []

    def groups(self, device, *, exact=False):
        asked.append(exact)
        return true(self, device, exact=exact)

    true = Packing.groups
    monkeypatch.setattr(Packing, "groups", groups)
    outs = [
        layer(x, x.clone(), cu_seqlens=BOUNDS, cu_seqlens_k=bounds, is_causal=True, rng=key())
        for bounds in (BOUNDS, None)
    ]
    assert asked == [False, False]
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", ["smgk, rotary", "prior per position", "fish"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rotary_priors_and_noise_begin_anew_in_every_document(name, is_causal):
    layer, x = LAYERS[name]().double(), double(1, sum(LENGTHS), C)
    packed = layer(x, cu_seqlens=BOUNDS, is_causal=is_causal, rng=key())
    alone = [
        layer(part, is_causal=is_causal, rng=key(IDS[number : number + 1]))
        for number, part in documents(x)
    ]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-12)
    together = layer(x, is_causal=is_causal, rng=key(IDS[:1]))
    assert (packed - together).abs().max() > 1e-3  # they would see one another


@pytest.mark.parametrize("exact", [False, True])
def test_groups_hold_every_token_once_and_lengths_that_are_alike(exact):
    packing = Packing(BOUNDS)
    groups = packing.groups(torch.device("cpu"), exact=exact)
    seen = []
    for group in groups:
        lengths = [LENGTHS[d] for d in group.documents]
        assert group.queries.shape == (len(lengths), max(lengths))
        assert max(lengths) <= max(1.25 * min(lengths), min(lengths) + 8)
        assert not exact or min(lengths) == max(lengths)
        real = group.real_queries
        seen += (group.queries if real is None else group.queries[real]).flatten().tolist()
    assert sorted(seen) == list(range(sum(LENGTHS)))
    assert len(groups) == (6 if exact else 2)
    assert packing.groups(torch.device("cpu"), exact=exact) is groups  # made once


def test_documents_of_several_rows_are_those_of_one():
    layer, x = LAYERS["mgk"]().double(), double(3, 10, C)
    bounds = torch.tensor([0, 4, 10, 20, 27, 30])
    rows = layer(x, cu_seqlens=bounds, is_causal=True)
    one = layer(x.view(1, 30, C), cu_seqlens=bounds, is_causal=True)
    torch.testing.assert_close(rows.view(1, 30, C), one, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"no bound at 10.*row"):
        layer(x, cu_seqlens=torch.tensor([0, 4, 30]))


@EVERY
@pytest.mark.parametrize("is_causal", [False, True])
def test_cross_attention_has_bounds_of_its_keys(name, is_causal):
    if "rotary" in name and is_causal:
        pytest.skip("a document alone is not rotated as one of a batch of two sequences")
    layer = LAYERS[name]().double()
    lengths = [6, 2, 17, 0, 13, 16, 5, 19]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    x, memory = double(1, sum(LENGTHS), C), double(1, sum(lengths), C)
    named = {"is_causal": is_causal}
    packed = layer(x, memory, cu_seqlens=BOUNDS, cu_seqlens_k=bounds, rng=key(), **named)
    keys = dict(documents(memory, bounds))
    alone = [
        layer(part, keys[number], rng=key(IDS[number : number + 1]), **named)
        for number, part in documents(x)
    ]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-12)


def test_a_document_without_keys_gives_zeros():
    layer = SoftmaxAttention(C, H, head_dim=E, bias=False).double()
    x, memory = double(1, 5, C), double(1, 4, C)
    bounds = {"cu_seqlens": torch.tensor([0, 2, 5]), "cu_seqlens_k": torch.tensor([0, 4, 4])}
    out = layer(x, memory, **bounds)
    assert not out[:, 2:].any()
    assert out[:, :2].abs().amin() > 0


@pytest.mark.parametrize("name", LAYERS)
def test_documents_of_no_tokens_have_no_outputs(name):
    x, bounds = double(1, 0, C), torch.tensor([0, 0, 0])
    assert LAYERS[name]().double()(x, cu_seqlens=bounds, is_causal=True).shape == (1, 0, C)


def test_keys_that_are_not_real_are_hidden_in_their_document():
    layer, x = LAYERS["softmax"]().double(), double(1, sum(LENGTHS), C)
    real = torch.rand(1, sum(LENGTHS)) < 0.7
    packed = layer(x, cu_seqlens=BOUNDS, key_mask=real)
    start, stop = int(BOUNDS[2]), int(BOUNDS[3])
    alone = layer(x[:, start:stop], key_mask=real[:, start:stop])
    torch.testing.assert_close(packed[:, start:stop], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["softmax", "mgk", "fish"])
def test_weights_are_blocks_on_the_diagonal(name):
    layer, x = LAYERS[name]().double().eval(), double(2, 8, C)
    bounds = torch.tensor([0, 5, 8, 8, 16])
    maps = layer.weights(x, cu_seqlens=bounds, is_causal=True)
    assert maps.shape == (2, layer.num_heads, 8, 8)
    torch.testing.assert_close(maps[0, :, 5:, 5:], layer.weights(x[:1, 5:], is_causal=True)[0])
    assert not maps[0, :, 5:, :5].any()
    torch.testing.assert_close(maps[1], layer.weights(x[1:], is_causal=True)[0])


def test_an_m_step_counts_the_tokens_that_padded_documents_have():
    packed, padded = (MGKAttention(C, H, head_dim=E, e_step="soft").double() for _ in range(2))
    padded.load_state_dict(packed.state_dict())
    x = double(1, sum(LENGTHS), C)
    packed(x, cu_seqlens=BOUNDS)
    rows, mask = x.new_zeros(len(LENGTHS), max(LENGTHS), C), torch.zeros(8, 17, dtype=torch.bool)
    for number, part in documents(x):
        rows[number, : part.shape[1]], mask[number, : part.shape[1]] = part[0], True
    padded(rows, key_mask=mask)
    for mine, other in zip(
        packed.core.prior_statistics(), padded.core.prior_statistics(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_jagged_tensors_are_packed_documents():
    layer = LAYERS["mgk"]().double()
    parts, memories = ([double(n, C) for n in lengths] for lengths in ([4, 9, 2], [3, 5, 8]))
    x, memory = (torch.nested.nested_tensor(p, layout=torch.jagged) for p in (parts, memories))
    for given, keys in (((x,), parts), ((x, memory), memories)):
        out = layer(*given)
        assert out.is_nested
        for found, own, other in zip(out.unbind(), parts, keys, strict=True):
            alone = layer(own[None]) if len(given) == 1 else layer(own[None], other[None])
            torch.testing.assert_close(found, alone[0], rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="key is not a jagged"):
        layer(x, double(3, 4, C))
    strided = torch.nested.nested_tensor(parts, layout=torch.strided)
    with pytest.raises(ValueError, match="query is not a jagged"):
        layer(strided)


FORMS = {
    "softmax": (LF.softmax_attention, {}),
    "mgk": (LF.mgk_attention, {"log_prior": torch.randn(2, 17), "key_shift": torch.randn(2, E)}),
    "fish": (LF.fish_attention, {"head_mix": torch.rand(3, 2), "noise_scale": torch.ones(2)}),
    "linear": (LF.linear_attention, {}),
    "mlk": (LF.mlk_attention, {"prior": torch.rand(2, 17), "key_shift": torch.randn(2, E)}),
    "polynomial": (LF.polynomial_attention, {}),
    "ast": (LF.ast_attention, {}),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_functional_forms_take_documents(name, is_causal):
    form, options = FORMS[name]
    options = {n: o.double() for n, o in options.items()}
    for option in ("log_prior", "prior"):  # one for every position
        if option in options:
            options[option] = options[option].expand(2, -1, -1)
    total = sum(LENGTHS)
    q, k = double(1, 2, total, E), double(1, 2, total, E)
    v = double(1, 3 if name == "fish" else 2, total, 7)
    named = {"is_causal": is_causal, "dropout_p": 0.2}
    packed = form(q, k, v, cu_seqlens=BOUNDS, rng=key(), **options, **named)
    alone = []
    for number, (start, stop) in enumerate(itertools.pairwise(BOUNDS)):
        if start < stop:
            own = (t[:, :, start:stop] for t in (q, k, v))
            cut = {n: o[..., : stop - start] if o.dim() == 3 else o for n, o in options.items()}
            rng = key(IDS[number : number + 1])
            alone.append(form(*own, rng=rng, **cut, **named))
    torch.testing.assert_close(packed, torch.cat(alone, 2), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="attn_mask"):
        form(q, k, v, attn_mask=torch.ones(total, total).bool(), cu_seqlens=BOUNDS, **options)


def test_what_packed_documents_have_no_place_for_is_refused():
    layer, x = LAYERS["softmax"](), torch.randn(1, 9, C)
    bounds = torch.tensor([0, 4, 9])
    pairs = torch.ones(9, 9)
    for name, given in (
        ("attn_mask", pairs.bool()),
        ("bias", pairs),
        ("cache", layer.new_cache()),
        ("memory", layer.remember(x)),
    ):
        with pytest.raises(ValueError, match=name):
            layer(x, cu_seqlens=bounds, **{name: given})
    for wrong, message in (
        (torch.tensor([0.0, 9.0]), "integers"),
        (torch.tensor([1, 9]), "start with 0"),
        (torch.tensor([0, 5, 4, 9]), "never fall"),
        (torch.tensor([0, 4]), "ends at 4"),
        (torch.tensor([[0, 9]]), "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, cu_seqlens=wrong)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        layer(x, cu_seqlens_k=bounds)
    with pytest.raises(ValueError, match="2 documents and cu_seqlens_k 1"):
        layer(x, x, cu_seqlens=bounds, cu_seqlens_k=bounds[[0, 2]])
    with pytest.raises(ValueError, match="keys"):
        layer(x, cu_seqlens=bounds, cu_seqlens_k=bounds)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k ends at 9, expected 1 x 8 tokens"):
        layer(x, x[:, :8], cu_seqlens=bounds, cu_seqlens_k=bounds)
    with pytest.raises(ValueError, match="sample_ids"):
        FiSHAttention(C, 4, head_dim=E, num_global_heads=2, dropout=0.1)(
            x, cu_seqlens=bounds, rng=RandomKey(0, sample_ids=torch.tensor([1]))
        )
    mgk, mlk = LAYERS["mgk"](), MLKAttention(C, H, head_dim=E)
    gaussian = SoftmaxAttention(C, H, head_dim=E, score="gaussian")
    for asked, ask in (
        *((layer, "scores"), (gaussian, "gaussians"), (mgk, "gaussians")),
        *((mgk, "posterior"), (mlk, "posterior")),
    ):
        with pytest.raises(NotImplementedError, match="packed documents"):
            getattr(asked.core, ask)(asked.call(x, packing=Packing(bounds)))


def test_bounds_are_no_constants_of_a_program():
    layer, x, bounds = LAYERS["softmax"]().eval(), torch.randn(1, 9, C), torch.tensor([0, 4, 9])
    with pytest.raises(Exception, match="cannot be exported"):
        torch.export.export(layer, (x,), {"cu_seqlens": bounds})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "mgk"])
def test_a_compiled_layer_takes_documents(name):
    layer, x = LAYERS[name]().eval(), torch.randn(1, 9, C)
    compiled = torch.compile(layer, backend="eager")
    for bounds in ([0, 4, 9], [0, 2, 9]):
        found = compiled(x, cu_seqlens=torch.tensor(bounds))
        torch.testing.assert_close(found, layer(x, cu_seqlens=torch.tensor(bounds)))
