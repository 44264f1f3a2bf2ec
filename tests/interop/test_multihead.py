"""Our layers in the form of `torch.nn.MultiheadAttention`, beside the original."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lit_probattn
from lit_probattn.attention import SoftmaxAttention
from lit_probattn.interop.multihead import as_multihead_attention

B, H, N, L, C = 3, 2, 5, 7, 8


def pair(batch_first: bool = True, **sizes) -> tuple[nn.MultiheadAttention, nn.Module]:
    """The original and our softmax attention with its weights, in float64."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(C, H, batch_first=batch_first, **sizes).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    wide = {"key_embed_dim": sizes["kdim"]} if "kdim" in sizes else {}
    ours = SoftmaxAttention(C, H, **wide).double()
    if wide:
        weights = [theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight]
    else:
        weights = list(theirs.in_proj_weight.chunk(3))
    biases = theirs.in_proj_bias.chunk(3)
    projections = (ours.query_proj, ours.key_proj, ours.value_proj)
    for projection, weight, bias in zip(projections, weights, biases, strict=True):
        projection.load_state_dict({"weight": weight, "bias": bias})
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    return theirs, as_multihead_attention(ours, batch_first=batch_first)


def inputs(batch_first: bool = True, keys: int = L, width: int = C) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    query, key, value = (
        torch.randn(B, n, c, dtype=torch.float64) for n, c in ((N, C), (keys, width), (keys, width))
    )
    tensors = (query, key, value)
    return tensors if batch_first else tuple(x.transpose(0, 1).contiguous() for x in tensors)


def padding(dtype: torch.dtype | str) -> torch.Tensor:
    """The last keys of each sequence are padding; one key stays, with "values" a changed one."""
    hidden = torch.arange(L)[None, :] >= torch.tensor([7, 4, 1])[:, None]
    if dtype == torch.bool:
        return hidden
    if dtype == "values":
        return torch.linspace(-1, 1, B * L).double().view(B, L).masked_fill(hidden, float("-inf"))
    return torch.zeros(B, L, dtype=dtype).masked_fill(hidden, float("-inf"))


def pairs(form: str) -> torch.Tensor | None:
    torch.manual_seed(2)
    heads = (B * H,) if "heads" in form else ()
    hidden = torch.rand(*heads, N, L) < 0.4
    hidden[..., 0] = False  # torch gives NaN for rows without a key
    if form.startswith("none"):
        return None
    if form.startswith("bool"):
        return hidden
    added = torch.randn(*heads, N, L, dtype=torch.float64) * ("values" in form)
    return added.masked_fill(hidden, float("-inf"))


def assert_same(theirs, ours, given, **options):
    """Output, maps and gradients of the inputs are those of the original."""
    results = []
    for module in (theirs, ours):
        tensors = [tensor.clone().requires_grad_() for tensor in given]
        output, weights = module(*tensors, **options)
        total = output.sin().sum() + (0.0 if weights is None else weights.cos().sum())
        results.append((output, weights, *torch.autograd.grad(total, tensors)))
    for expected, found in zip(*results, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


FORMS = ("none", "bool", "bool heads", "zeros", "values", "values heads")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padded", [None, torch.bool, torch.float64, "values"], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_masks_mean_what_they_mean_in_torch(form, padded, need_weights):
    given = {"attn_mask": pairs(form), "need_weights": need_weights}
    given["key_padding_mask"] = None if padded is None else padding(padded)
    assert_same(*pair(), inputs(), **given)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_forms_of_tensors_and_maps(batch_first, average):
    options = {"key_padding_mask": padding(torch.bool), "average_attn_weights": average}
    assert_same(*pair(batch_first), inputs(batch_first), **options)
    single = tuple(x[0] if batch_first else x[:, 0].contiguous() for x in inputs(batch_first))
    options["key_padding_mask"] = padding(torch.bool)[1]
    assert_same(*pair(batch_first), single, **options)


def test_keys_of_another_width():
    assert_same(*pair(kdim=11, vdim=11), inputs(width=11))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("keys", [N, L])
def test_the_causal_hint(need_weights, keys):
    mask = torch.triu(torch.ones(N, keys, dtype=torch.bool), diagonal=1)
    options = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
    if keys != N and not need_weights:  # torch aligns its own causal mask as this one
        assert torch.equal(mask, ~torch.ones(N, keys, dtype=torch.bool).tril())
    assert_same(*pair(), inputs(keys=keys), **options)
    theirs, ours = pair()
    for module, error in ((theirs, RuntimeError), (ours, ValueError)):
        with pytest.raises(error, match="attn_mask"):
            module(*inputs(), is_causal=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformer_of_torch_computes_the_same(training, batch_first):
    """Its encoder makes float masks of boolean ones, and has a fused path around the call."""
    theirs, ours = pair(batch_first)
    block = nn.TransformerEncoderLayer(C, H, 16, dropout=0.0, batch_first=batch_first).double()
    block.self_attn = theirs
    other = copy.deepcopy(block)
    other.self_attn = ours
    x = inputs(batch_first, keys=L)[1]
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    found = [
        nn.TransformerEncoder(each, 2, enable_nested_tensor=False).train(training)
        for each in (block, other)
    ]
    for masks in (
        {"src_key_padding_mask": padding(torch.bool)},
        {"mask": causal, "is_causal": True},
        {"mask": causal, "src_key_padding_mask": padding(torch.bool)},
    ):
        expected, ours_out = (encoder(x, **masks) for encoder in found)
        torch.testing.assert_close(ours_out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("grad", [True, False])
def test_layers_of_a_whole_encoder_are_replaced(grad):
    """At evaluation, an encoder with torch's layers converts padded batches to nested tensors."""
    theirs, ours = pair()
    block = nn.TransformerEncoderLayer(C, H, 16, dropout=0.0, batch_first=True).double()
    block.self_attn = theirs
    encoder = nn.TransformerEncoder(block, 2).eval()
    assert encoder.use_nested_tensor
    other = copy.deepcopy(encoder)
    for layer in other.layers:
        layer.self_attn = copy.deepcopy(ours)
    x, hidden = inputs(keys=L)[1], padding(torch.bool)
    with torch.set_grad_enabled(grad):
        expected, found = (each(x, src_key_padding_mask=hidden) for each in (encoder, other))
    torch.testing.assert_close(found[~hidden], expected[~hidden], rtol=1e-10, atol=1e-10)


def test_a_decoder_of_torch_computes_the_same():
    theirs, ours = pair()
    layer = nn.TransformerDecoderLayer(C, H, 16, dropout=0.0, batch_first=True).double()
    layer.self_attn, layer.multihead_attn = theirs, copy.deepcopy(theirs)
    other = copy.deepcopy(layer)
    other.self_attn, other.multihead_attn = ours, copy.deepcopy(ours)
    x, memory, _ = inputs()
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(N, dtype=torch.float64),
        "memory_key_padding_mask": padding(torch.bool),
    }
    expected, found = (each(x, memory, tgt_is_causal=True, **masks) for each in (layer, other))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_call_without_maps_draws_nothing_in_evaluation():
    module = as_multihead_attention(lit_probattn.create("gfish", C, H), batch_first=True).eval()
    x = torch.randn(B, N, C)
    before = torch.get_rng_state()
    assert module(x, x, x, need_weights=False)[1] is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["smgk", "mgk_soft_e", "hard_fish", "gfish", "gaussian"])
def test_maps_are_those_of_the_output(name):
    """The heads' maps make the output from the values, with the noise of the same call."""
    layer = lit_probattn.create(name, C, H, dropout=0.0).double().train()
    module = as_multihead_attention(layer, batch_first=True)
    query, key, value = inputs()
    masks = {"attn_mask": pairs("bool"), "key_padding_mask": padding(torch.bool)}
    output, weights = module(query, key, value, average_attn_weights=False, **masks)
    values = layer.value_proj(value).unflatten(-1, (H, -1)).transpose(1, 2)
    mixed = layer.out_proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, mixed, rtol=1e-8, atol=1e-8)
    assert (weights[padding(torch.bool)[:, None, None, :].expand_as(weights)] == 0).all()


def test_every_variant_hides_what_floats_hide():
    """Zeros, and -inf or the least float, are no bias, which linear attention does not have."""
    module = as_multihead_attention(lit_probattn.create("linear", C, H), batch_first=True).eval()
    query, key, value = (tensor.float() for tensor in inputs())
    floats = padding(torch.float32)
    expected, *results = (
        module(query, key, value, key_padding_mask=mask, need_weights=False)[0]
        for mask in (padding(torch.bool), floats, floats.clamp_min(torch.finfo(floats.dtype).min))
    )
    assert all(torch.equal(found, expected) for found in results)


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({"attn_mask": torch.zeros(N, L + 1, dtype=torch.bool)}, r"attn_mask has shape \(5, 8\)"),
        ({"attn_mask": torch.zeros(B, N, L)}, r"expected \(5, 7\) or \(6, 5, 7\)"),
        ({"key_padding_mask": torch.zeros(B, N)}, r"key_padding_mask has shape \(3, 5\)"),
        ({"attn_mask": torch.zeros(N, L, dtype=torch.int64)}, "attn_mask has dtype torch.int64"),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks, expected):
    with pytest.raises(ValueError, match=expected):
        pair()[1](*inputs(), **masks)


def test_the_parameters_are_the_layers():
    layer = lit_probattn.create("smgk", C, H)
    module = as_multihead_attention(layer)
    assert module.layer is layer
    assert {f"layer.{name}" for name in layer.state_dict()} == set(module.state_dict())
    assert (module.embed_dim, module.num_heads, module.batch_first) == (C, H, False)


def test_dropout_is_the_layers():
    """Code for torch's layer sets it on the module."""
    module = as_multihead_attention(lit_probattn.create("softmax", C, H, dropout=0.5))
    x = torch.randn(N, B, C)
    assert module.dropout == module.layer.dropout == 0.5
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.dropout = 0.0
    assert module.layer.dropout == 0.0
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])


def test_what_is_no_layer_of_ours_is_named():
    torchs, ours = nn.MultiheadAttention(8, 2), lit_probattn.create("softmax", 8, 2)
    for given, told in (
        (5, "int$"),
        (torchs, "MultiheadAttention; lit_probattn.swap"),
        (as_multihead_attention(ours), "MultiheadForm; it has this interface already"),
    ):
        with pytest.raises(TypeError, match=f"layer must be an Attention .*received {told}"):
            as_multihead_attention(given)
