"""The masked language model: predictions of the scored tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from lit_probattn.attention import SoftmaxAttention
from lit_probattn.models.language_model import IGNORE
from lit_probattn.models.masked_language_model import MaskedLanguageModel

SIZES = {"vocab_size": 19, "embed_dim": 10, "head_dim": 7, "num_layers": 1, "mlp_dim": 11}


@pytest.mark.parametrize("max_logits", [1, 57, 10_000])
def test_predictions_are_the_likeliest_words_of_the_scored_tokens(max_logits):
    torch.manual_seed(0)
    model = MaskedLanguageModel(partial(SoftmaxAttention, num_heads=3), **SIZES, max_seq_len=13)
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
