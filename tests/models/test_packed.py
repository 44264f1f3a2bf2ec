"""Packed documents in language models: losses and gradients of padded and of separate documents."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from lit_probattn.attention import FiSHAttention, LinearAttention, MGKAttention, SoftmaxAttention
from lit_probattn.attention.packing import Packing
from lit_probattn.models.language_model import IGNORE, LanguageModel
from lit_probattn.models.masked_language_model import MaskedLanguageModel, mask_tokens
from lit_probattn.randomness import RandomKey
from tests.models.test_language_model import VOCAB, small
from tests.support.slow import mostly_slow

LENGTHS = [4, 11, 1, 7, 11, 3]
REAL = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
IDS = torch.tensor([31, 4, 17, 0, 8, 23])
POSITIONS = ("reversed", "rotary", "forward")
VARIANTS = {
    "softmax": (SoftmaxAttention, 3, {}),
    "mgk": (MGKAttention, 2, {"num_components": 2}),
    "smgk": (MGKAttention, 2, {"shifted_keys": True}),
    "fish": (FiSHAttention, 4, {"num_global_heads": 2}),
    "linear": (LinearAttention, 2, {}),
}


def factory(name, **more):
    kind, heads, options = VARIANTS[name]
    return partial(kind, num_heads=heads, **options, **more)


def made(name, **options) -> LanguageModel:
    more = {"rotary_dim": 4} if options.get("positions") == "rotary" else {}
    return small(factory(name, **more), attention_dropout=0.3, **options).double().train()


def key(ids=IDS):
    return RandomKey(7, step=3, sample_ids=ids)


def words():
    tokens = torch.randint(VOCAB, REAL.shape, generator=torch.Generator().manual_seed(1))
    target = tokens.roll(-1, 1).masked_fill(~REAL, IGNORE)
    return tokens.masked_fill(~REAL, 0), target


def results(model, losses):
    """Return the losses and the gradient of their sum, by name."""
    model.zero_grad()
    losses.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"losses": losses.detach(), **gradients}


def close(found, expected, atol=1e-12):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(found[name] / scale, value / scale, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize(
    ("name", "positions"),
    # Linear attention has no rotary positions.
    mostly_slow(
        [pair for pair in product(VARIANTS, POSITIONS) if pair != ("linear", "rotary")],
        [*zip(VARIANTS, (*POSITIONS, "rotary", "forward"), strict=True)],
    ),
)
def test_causal_models_see_documents_as_padded_and_alone(name, positions):
    """With attention dropout and noise."""
    model = made(name, positions=positions)
    inputs, target = words()
    one, target_of_one = inputs[REAL][None], target[REAL][None]
    packed = results(
        model,
        model.token_losses(model(one, cu_seqlens=BOUNDS, rng=key()), target_of_one),
    )
    padded = model.token_losses(model(inputs, key_mask=REAL, rng=key()), target)
    close(packed, results(model, padded))
    alone = [
        model.token_losses(
            model(inputs[row : row + 1, :length], rng=key(IDS[row : row + 1])),
            target[row : row + 1, :length],
        )
        for row, length in enumerate(LENGTHS)
    ]
    close(packed, results(model, torch.cat(alone)))
    mixed = model(one[:, :11], rng=key(IDS[:1]))  # a control: documents that see one another
    apart = model(one[:, :11], cu_seqlens=torch.tensor([0, 4, 11]), rng=key(IDS[:2]))
    assert (mixed - apart).abs().max() > 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_masked_models_see_sequences_as_padded_and_alone(name):
    options = {"vocab_size": VOCAB, "max_seq_len": 11, "embed_dim": 14, "head_dim": 5}
    model = MaskedLanguageModel(
        factory(name),
        **{**options, "num_layers": 2, "mlp_dim": 17, "dropout": 0.0, "num_token_types": 2},
        attention_dropout=0.3,
        activation_checkpointing=name == "mgk",
    )
    model.double().train()
    inputs, _ = words()
    types = (torch.arange(11) > 3).long().expand_as(inputs)

    def losses(tokens, real, types, rng, packing=None):
        target = tokens if real is None else tokens.masked_fill(~real, IGNORE)
        settings = {"vocab_size": VOCAB, "probability": 0.6, "packing": packing}
        hidden, chosen = mask_tokens(tokens, target, rng, **settings)
        given = {"key_mask": real} if packing is None else {"cu_seqlens": packing}
        return model.token_losses(model(hidden, token_types=types, rng=rng, **given), chosen)

    flat = inputs[REAL][None], None, types[REAL][None], key(), Packing(BOUNDS)
    packed = results(model, losses(*flat))
    assert len(packed["losses"]) > 10
    close(packed, results(model, losses(inputs, REAL, types, key())))
    alone = [
        losses(inputs[row : row + 1, :n], None, types[:1, :n], key(IDS[row : row + 1]))
        for row, n in enumerate(LENGTHS)
    ]
    close(packed, results(model, torch.cat(alone)))


def test_the_longest_document_counts_and_bounds_are_checked():
    model = made("softmax")
    tokens = torch.randint(VOCAB, (1, 24))
    model(tokens, cu_seqlens=torch.tensor([0, 11, 13, 24]))
    with pytest.raises(ValueError, match="12 tokens: max_seq_len is 11"):
        model(tokens, cu_seqlens=torch.tensor([0, 12, 24]))
    with pytest.raises(ValueError, match=r"cu_seqlens ends at 11, expected 1 x 24"):
        model(tokens, cu_seqlens=torch.tensor([0, 11]))


def test_what_packed_documents_exclude_is_refused():
    model, bounds = made("softmax"), torch.tensor([0, 4, 11])
    tokens = torch.randint(VOCAB, (1, 11))
    with pytest.raises(ValueError, match="caches"):
        model(tokens, cu_seqlens=bounds, caches=model.new_caches())
    with pytest.raises(ValueError, match="positions"):
        model(tokens, cu_seqlens=bounds, positions=torch.arange(11)[None])
    pairs = MaskedLanguageModel(
        factory("softmax"), vocab_size=VOCAB, max_seq_len=11, next_sentence=True, num_layers=1
    )
    with pytest.raises(ValueError, match="next_sentence does not support packed"):
        pairs(tokens, cu_seqlens=bounds, with_pairs=True)
