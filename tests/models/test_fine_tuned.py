"""Heads on the encoder of text: what they read and predict, and that padding changes nothing."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lit_probattn.attention import SoftmaxAttention
from lit_probattn.models.fine_tuned import SpanModel, TextClassifier
from lit_probattn.models.language_model import IGNORE
from lit_probattn.models.masked_language_model import MaskedLanguageModel

softmax = partial(SoftmaxAttention, num_heads=2)
SIZES = {"vocab_size": 19, "max_seq_len": 12, "embed_dim": 8, "head_dim": 4, "num_layers": 1}
INPUTS = torch.randint(19, (3, 7), generator=torch.Generator().manual_seed(5))
MASK = torch.arange(7) < torch.tensor([7, 4, 1])[:, None]


def made(cls, **more):
    torch.manual_seed(1)
    model = cls(softmax, **SIZES, mlp_dim=8, num_token_types=2, **more)
    return model.eval().double()


def test_default_sizes_are_those_of_bert_base():
    """109,482,240 parameters, the pooler among them."""
    with torch.device("meta"):
        attention = partial(SoftmaxAttention, num_heads=12)
        sizes = {"vocab_size": 30522, "max_seq_len": 512, "num_token_types": 2}
        model = TextClassifier(attention, num_classes=5, **sizes)
    classifier = sum(p.numel() for p in model.classifier.parameters())
    assert sum(p.numel() for p in model.parameters()) - classifier == 109_482_240


def test_weights_start_with_the_spread_of_bert():
    """0.02, within five standard errors."""
    model = SpanModel(softmax, **{**SIZES, "vocab_size": 997}, mlp_dim=99)
    for weight in (model.tokens.weight, model.encoder.blocks[0].mlp.fc1.weight):
        far = 5 / (2 * weight.numel()) ** 0.5
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=far)


def test_spans_are_two_numbers_of_every_token():
    model = made(SpanModel)
    start, end = model(INPUTS, key_mask=MASK)
    hidden = model.encode(INPUTS, key_mask=MASK)
    for place, logits in enumerate((start, end)):
        expected = hidden @ model.spans.weight[place] + model.spans.bias[place]
        torch.testing.assert_close(logits, expected, rtol=1e-13, atol=1e-15)


def test_classes_are_read_from_the_first_token():
    model = made(TextClassifier, num_classes=3)
    hidden = model.encode(INPUTS, key_mask=MASK)[:, 0]
    pooled = torch.tanh(hidden @ model.pooler.weight.T + model.pooler.bias)
    expected = pooled @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model(INPUTS, key_mask=MASK), expected, rtol=1e-13, atol=1e-15)


def test_the_head_is_dropped_in_training():
    model = made(TextClassifier, num_classes=3, head_dropout=0.9).train()
    assert not torch.equal(model(INPUTS), model(INPUTS))
    model.head_dropout.p = 0.0
    assert torch.equal(model(INPUTS), model(INPUTS))


@pytest.mark.parametrize(("cls", "more"), [(SpanModel, {}), (TextClassifier, {"num_classes": 2})])
def test_padding_and_types_of_padding_change_nothing(cls, more):
    model = made(cls, **more)
    types = (torch.arange(7) > 2).long().expand(3, 7)
    padded = torch.nn.functional.pad(INPUTS, (0, 3), value=4)
    masks = torch.nn.functional.pad(MASK, (0, 3))
    found = model(
        padded, key_mask=masks, token_types=torch.nn.functional.pad(types, (0, 3), value=1)
    )
    expected = model(INPUTS, key_mask=MASK, token_types=types)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for there, here in pairs:
        if isinstance(found, tuple):
            there, here = there[:, :7][MASK], here[MASK]
        torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-14)


def test_token_types_are_seen():
    model = made(SpanModel)
    types = (torch.arange(7) > 2).long().expand(3, 7)
    assert not torch.allclose(model(INPUTS)[0], model(INPUTS, token_types=types)[0])


@pytest.mark.parametrize("period", [None, 5])
def test_positions_begin_as_sines(period):
    model = made(SpanModel, position_init="sinusoidal", position_period=period, init_std=0.05)
    steps = torch.arange(period or 12, dtype=torch.float64)
    table = model.positions.offsets.weight
    assert table.requires_grad
    for channel, wave in ((0, steps.sin()), (1, steps.cos()), (4, (steps / 100).sin())):
        expected = 0.05 * math.sqrt(2) * wave
        torch.testing.assert_close(table[:, channel], expected, rtol=1e-6, atol=1e-8)
    if period:
        third = model.positions.blocks.weight[2, :2]
        torch.testing.assert_close(third[0] / third[1], torch.tensor(2.0).double().tan())
    plain = made(SpanModel, position_period=period, init_std=0.05).state_dict()
    others = {name for name, value in model.state_dict().items() if not value.equal(plain[name])}
    assert others == {name for name in plain if name.startswith("positions.")}


@pytest.mark.parametrize("cls", [SpanModel, partial(TextClassifier, num_classes=3)])
def test_matrices_and_tables_begin_with_the_deviation_that_is_asked_for(cls):
    narrow, wide = (made(cls, init_std=std).state_dict() for std in (0.02, 0.5))
    for name, value in wide.items():
        factor = 25.0 if narrow[name].dim() > 1 else 1.0  # biases and norms are not drawn
        torch.testing.assert_close(value, factor * narrow[name], rtol=1e-5, atol=1e-8)
    with pytest.raises(ValueError, match="init_std must be positive, received 0"):
        made(SpanModel, init_std=0.0)


def test_sines_need_an_even_width():
    with pytest.raises(
        ValueError, match="position_init sinusoidal requires an even embed_dim, received 7"
    ):
        SpanModel(softmax, **SIZES | {"embed_dim": 7}, mlp_dim=8, position_init="sinusoidal")


@pytest.mark.parametrize("max_logits", [1, 57, 10_000])
def test_predictions_are_the_likeliest_words_of_the_scored_tokens(max_logits):
    sizes = {"vocab_size": 19, "embed_dim": 10, "head_dim": 7, "num_layers": 1, "mlp_dim": 11}
    model = MaskedLanguageModel(partial(SoftmaxAttention, num_heads=3), **sizes, max_seq_len=13)
    with torch.no_grad():
        model.output.bias.normal_()
    model.output.max_logits = max_logits
    hidden, target = torch.randn(2, 13, 10), torch.randint(19, (2, 13))
    scored = torch.rand(2, 13) < 0.6
    target[~scored] = IGNORE
    logits = F.linear(hidden, model.tokens.weight, model.output.bias)
    assert torch.equal(model.predictions(hidden, target), logits.argmax(-1)[scored])
    none = model.predictions(hidden, torch.full_like(target, IGNORE))
    assert (none.shape, none.dtype) == ((0,), torch.int64)
