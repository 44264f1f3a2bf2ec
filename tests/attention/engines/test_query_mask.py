"""Queries whose outputs are not needed have no effect on the others, on every backend."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import lit_probattn
from lit_probattn.attention import SoftmaxAttention
from lit_probattn.attention import layer as layer_module
from lit_probattn.kernels.cpu import library
from lit_probattn.models.classifiers import Classifier
from lit_probattn.models.encoder_decoder import EncoderDecoder
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.models.masked_language_model import MaskedLanguageModel
from lit_probattn.randomness import RandomKey
from tests.attention.variants import EMBED, HEAD, backends_for, layers

BATCH, TOKENS = 2, 60
LAYERS = layers()
RNG = RandomKey(5, step=2, sample_ids=torch.tensor([3, 8]))


def needed():
    """Return a mask with the whole first tile of a sample hidden, and single queries."""
    mask = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) % 7 > 1
    mask[1, :50] = False
    return mask


@pytest.mark.parametrize("name", LAYERS)
def test_needed_outputs_and_their_gradients_are_unchanged(name):
    layer = LAYERS[name]().double().eval()
    x = torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64, requires_grad=True)
    mask, weight = needed(), torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)
    weight = weight * mask[..., None]
    inputs = [x, *layer.parameters()]
    for backend in backends_for(layer, x, key_mask=mask, rng=RNG):
        layer.core.backend = backend
        found = []
        for given in ({}, {"query_mask": mask}):
            out = layer(x, key_mask=mask, rng=RNG, **given)
            grads = torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)
            found.append([out[mask], *(g for g in grads if g is not None)])
        for whole, part in zip(*found, strict=True):
            assert (whole - part).norm() <= 1e-12 * (1 + whole.norm())
        assert out.isfinite().all()


@pytest.mark.skipif(library.obstacle() is not None, reason="needs the C library")
@pytest.mark.parametrize("variant", ["softmax", "mgk", "smgk_hard_e", "fish", "gfish"])
def test_the_c_library_skips_them(variant):
    layer = lit_probattn.create(variant, embed_dim=EMBED, num_heads=8, head_dim=HEAD)
    layer.core.backend = "native"
    mask = needed()
    out = layer(torch.randn(BATCH, TOKENS, EMBED), query_mask=mask, rng=RNG)
    assert (out[~mask] == layer.out_proj.bias).all()
    assert (out[mask] != layer.out_proj.bias).all()


@pytest.mark.parametrize("variant", ["smgk", "fish", "linear"])
def test_packed_documents_have_needed_queries_too(variant):
    layer = lit_probattn.create(
        variant, embed_dim=EMBED, num_heads=4, head_dim=HEAD, dropout=0.0
    ).double()
    x = torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)
    given = {"cu_seqlens": torch.tensor([0, 7, 60, 90, BATCH * TOKENS])}
    given["rng"] = RandomKey(5, step=2, sample_ids=torch.arange(4))
    whole, part = layer(x, **given), layer(x, **given, query_mask=needed())
    assert (whole - part)[needed()].abs().max() <= 1e-12


def test_a_cache_and_cross_attention_have_needed_queries():
    layer = SoftmaxAttention(EMBED, 4, head_dim=HEAD).double().eval()
    x = torch.randn(BATCH, TOKENS, EMBED, dtype=torch.float64)
    few = needed()[:, -4:]
    for given in ({"cache": layer.new_cache(8)}, {"key": x}, {"memory": layer.remember(x)}):
        out = layer(x[:, -4:], **given, query_mask=few)
        given = {**given, "cache": layer.new_cache(8)} if "cache" in given else given
        assert (out - layer(x[:, -4:], **given))[few].abs().max() <= 1e-12


@pytest.mark.parametrize(
    "mask", [torch.ones(BATCH, 4), torch.ones(BATCH, 5, dtype=torch.bool)], ids=["dtype", "shape"]
)
def test_other_masks_are_refused(mask):
    layer = SoftmaxAttention(EMBED, 4, head_dim=HEAD)
    cache = layer.new_cache(8)
    with pytest.raises(ValueError, match="query_mask"):
        layer(torch.randn(BATCH, 4, EMBED), query_mask=mask, cache=cache)
    assert cache.next_position == 0


def models():
    """Yield a call of each kind of model with padding, and its mask of queries."""
    sizes = {"embed_dim": 8, "head_dim": 4, "num_layers": 2, "mlp_dim": 8}
    attention = partial(SoftmaxAttention, num_heads=2)
    ids = torch.randint(5, 9, (BATCH, TOKENS))
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [9]])
    data = {"vocab_size": 9, "max_seq_len": TOKENS}
    yield "classifier", Classifier(attention, num_classes=3, **data, **sizes), [ids], mask
    yield "masked", MaskedLanguageModel(attention=attention, **data, **sizes), [ids], mask
    yield "causal", LanguageModel(attention=attention, **data, **sizes), [ids], mask
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1} | sizes
    del layers["num_layers"]
    both = EncoderDecoder(attention, source_vocab_size=9, **data, **layers)
    yield "encoder-decoder", partial(both, source_mask=mask), [ids, ids], mask


@pytest.mark.parametrize(
    ("model", "inputs", "mask"), [pytest.param(*case, id=name) for name, *case in models()]
)
def test_models_do_not_compute_padding(model, inputs, mask, monkeypatch):
    asked = []
    monkeypatch.setattr(layer_module, "with_dropout", lambda call, rate: asked.append(call) or call)
    model(*inputs, key_mask=mask)
    assert asked
    assert all(call.output_mask is mask for call in asked)
