"""Setting B counts pairs of real queries and real keys only, in every model."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lit_probattn.attention import MGKAttention
from lit_probattn.models.classifiers import Classifier, PairClassifier
from lit_probattn.models.decision_transformer import TOKENS_PER_STEP, DecisionTransformer
from lit_probattn.models.encoder_decoder import EncoderDecoder
from lit_probattn.models.fine_tuned import SpanModel, TextClassifier
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.models.masked_language_model import MaskedLanguageModel
from lit_probattn.models.released.language_model import ReleasedLanguageModel
from lit_probattn.models.series.encoder import SeriesTransformer

LENGTHS, TARGETS = (20, 5, 11), (3, 17, 9)
ATTENTION = partial(MGKAttention, num_heads=2, e_step="soft")
SIZES = {"embed_dim": 16, "head_dim": 8, "mlp_dim": 16, "dropout": 0.0}
TEXT = {**SIZES, "num_layers": 1, "vocab_size": 50, "max_seq_len": 24}


def masks(lengths):
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def tokens(lengths):
    return torch.randint(5, 50, (len(lengths), max(lengths)))


def causal(lengths):
    return sum(n * (n + 1) // 2 for n in lengths)


def every(lengths):
    return sum(n * n for n in lengths)


def decoder(cls, **options):
    model = cls(ATTENTION, output="full", **TEXT, **options)
    return model, lambda: model(tokens(LENGTHS), key_mask=masks(LENGTHS)), [causal(LENGTHS)]


def encoder(cls, **options):
    model = cls(ATTENTION, **TEXT, **options)
    return model, lambda: model(tokens(LENGTHS), key_mask=masks(LENGTHS)), [every(LENGTHS)]


def masked():
    model = MaskedLanguageModel(ATTENTION, **TEXT)
    return model, lambda: model.encode(tokens(LENGTHS), key_mask=masks(LENGTHS)), [every(LENGTHS)]


def with_class_token():
    model, run, _ = encoder(Classifier, num_classes=3, pooling="cls")
    return model, run, [every([n + 1 for n in LENGTHS])]


def pairs():
    model = PairClassifier(ATTENTION, num_classes=2, **TEXT)
    inputs = torch.stack([tokens(LENGTHS)] * 2, 1)
    both = torch.stack([masks(LENGTHS), masks((max(LENGTHS), *LENGTHS[1:]))], 1)
    return model, lambda: model(inputs, key_mask=both), [2 * every(LENGTHS)]


def series():
    sizes = {**SIZES, "num_layers": 1, "max_seq_len": 24, "num_features": 3, "num_classes": 2}
    model = SeriesTransformer(ATTENTION, **sizes)
    x = torch.randn(3, max(LENGTHS), 3)
    return model, lambda: model(x, key_mask=masks(LENGTHS)), [every(LENGTHS)]


def translation():
    sizes = {**SIZES, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_seq_len": 24}
    model = EncoderDecoder(ATTENTION, source_vocab_size=50, vocab_size=50, **sizes)

    def run():
        seen = {"memory": model.encode(tokens(LENGTHS), masks(LENGTHS))}
        model.decode(tokens(TARGETS), **seen, memory_mask=masks(LENGTHS), key_mask=masks(TARGETS))

    across = sum(n * m for n, m in zip(LENGTHS, TARGETS, strict=True))
    return model, run, [every(LENGTHS), causal(TARGETS), across]


def decisions():
    sizes = {"obs_dim": 3, "act_dim": 2, "max_timestep": 41, **SIZES, "num_layers": 1}
    model = DecisionTransformer(ATTENTION, **sizes)
    steps = max(LENGTHS)
    times = torch.arange(steps).expand(3, -1)
    x = [torch.randn(3, steps, size) for size in (3, 2, 1)]
    run = partial(model, *x, times, mask=masks(LENGTHS))
    return model, run, [causal([TOKENS_PER_STEP * n for n in LENGTHS])]


MODELS = {
    "language model": partial(decoder, LanguageModel),
    "language model, pre-norm": partial(decoder, LanguageModel, norm_first=True),
    "released language model, keys": partial(decoder, ReleasedLanguageModel, pre_norm="keys"),
    "released language model, residual": partial(
        decoder, ReleasedLanguageModel, pre_norm="residual"
    ),
    "checkpointed": partial(decoder, LanguageModel, activation_checkpointing=True),
    "masked language model": masked,
    "span model": partial(encoder, SpanModel),
    "text classifier": partial(encoder, TextClassifier, num_classes=2),
    "classifier": partial(encoder, Classifier, num_classes=3),
    "classifier with a class token": with_class_token,
    "pair classifier": pairs,
    "series": series,
    "encoder-decoder": translation,
    "decision transformer": decisions,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_sums_are_over_pairs_of_real_tokens(name):
    """One prior per head, so each denominator is the number of pairs that the masks leave."""
    model, run, expected = MODELS[name]()
    model.train()
    run()
    layers = [m for m in model.modules() if isinstance(m, MGKAttention)]
    for layer, count in zip(layers, expected, strict=True):
        shares, pairs = layer.core.prior_statistics()
        assert pairs.unique().tolist() == [count]
        torch.testing.assert_close(shares.sum(1), pairs[:, 0])  # of all components of a pair
