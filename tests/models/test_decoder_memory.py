"""Memory of a training step of the encoder-decoder, by every variant: O(N)."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lit_probattn.attention import MGKAttention
from lit_probattn.attention.engines import sdpa
from lit_probattn.attention.engines.blocks import BLOCK_SCORES
from lit_probattn.attention.masks import Masks
from lit_probattn.base.memory import predicted_bytes
from lit_probattn.models.encoder_decoder import EncoderDecoder
from lit_probattn.randomness import RandomKey
from tests.attention.variants import layers
from tests.models.test_encoder_decoder import MLP, WORDS, C, E, factory
from tests.support.slow import mostly_slow

VARIANTS = layers()
SHORT = ("softmax", "mgk", "linear", "mlk")


def training_step(attention, length):
    """One block a side, two sentences of `length` tokens a side."""
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "max_seq_len": length}
    sizes |= {"embed_dim": C, "head_dim": E, "mlp_dim": MLP}
    model = EncoderDecoder(attention, **sizes, source_vocab_size=WORDS, vocab_size=WORDS)
    tokens = torch.zeros(2, length, dtype=torch.int64)
    mask = torch.ones(2, length, dtype=torch.bool)

    def step():
        masks = {"source_mask": mask, "key_mask": mask}
        model(tokens, tokens, **masks, rng=RandomKey(0)).square().sum().backward()
        model.zero_grad(set_to_none=True)

    return step, (model, tokens, mask)


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, ["softmax"]))
def test_memory_of_a_training_step_is_linear_in_the_length(name, monkeypatch):
    """Twice the tokens take at most twice the memory; blocks are as large at both lengths.

    Score maps of several heads are a block each only at lengths of 1,024, which take longer.
    """
    first = 512 if name in SHORT else 1024
    monkeypatch.setitem(BLOCK_SCORES, "cpu", 4 * first**2)  # few blocks to follow
    step = partial(training_step, factory(VARIANTS[name]))
    short, long = (predicted_bytes(partial(step, length))[0] for length in (first, 2 * first))
    assert 1.0 < long / short < 2.05


@pytest.mark.slow
def test_stored_maps_would_be_seen():
    step = partial(training_step, partial(MGKAttention, num_heads=2, backend="reference"))
    short, long = (predicted_bytes(partial(step, length))[0] for length in (128, 256))
    assert long / short > 3.5


@pytest.mark.parametrize(
    ("queries", "keys", "per_key"), [(523, 523, 2), (300, 700, 3), (700, 300, 2), (5, 9, 1)]
)
def test_masks_of_causal_blocks_are_parts_of_one(queries, keys, per_key):
    """The same mask as block by block, for all blocks on one storage of O(N)."""
    masks = Masks(queries, keys, is_causal=True)
    like = torch.zeros(1, 1, queries, 1)
    shared = sdpa._causal_mask(masks, like, per_key)
    assert shared.numel() <= min(queries, 256) * keys * per_key
    for start in range(0, queries, 256):
        rows = range(start, min(start + 256, queries))
        cols = len(masks.visible_keys(rows))
        part = shared[-len(rows) :, (keys - cols) * per_key :]
        expected = sdpa._block_mask(masks, rows, like, per_key)[0, 0]
        assert torch.equal(part == 0, expected)
