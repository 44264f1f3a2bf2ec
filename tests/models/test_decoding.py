"""Generation: greedy and sampled tokens against full passes, padding, stops, bad input."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lit_probattn.attention import LinearState, SoftmaxAttention
from lit_probattn.models.decoding import Sampling, generate, next_tokens
from lit_probattn.models.language_model import LanguageModel
from lit_probattn.randomness import RandomKey
from tests.attention.decoding_layers import LAYERS, B, E
from tests.support.helpers import cache_bytes_per_token
from tests.support.slow import mostly_slow


def tiny(name="mgk", max_seq_len=31):
    """A model whose every parameter counts."""
    cls, kind = LAYERS[name]
    model = LanguageModel(
        partial(cls, **kind),
        **{"embed_dim": 12, "head_dim": E, "num_layers": 2, "mlp_dim": 17, "dropout": 0.0},
        **{"vocab_size": 19, "max_seq_len": max_seq_len, "positions": "forward"},
        **{"output": "full", "init": "xavier"},
    )
    nn.init.constant_(model.encoder.blocks[1].norm2.weight, -1.0)  # no word follows itself
    return model.double().eval()


# One of each class every time; every cache alone: tests/attention/test_decoding.py.
CLASSES = {cls: name for name, (cls, _) in reversed(LAYERS.items())}


@pytest.mark.parametrize("name", mostly_slow(LAYERS, [*CLASSES.values(), "smgk"]))
def test_greedy_generation_equals_full_passes(name):
    model = tiny(name)
    prompt = torch.randint(19, (B, 5))
    key = RandomKey(3, 0, torch.tensor([8, 5]))  # of noise at evaluation
    given = {"sampling": Sampling(seed=key.seed), "sample_ids": key.sample_ids}
    found = generate(model, prompt, max_new_tokens=7, **given)
    tokens = prompt
    with torch.no_grad():
        for _ in range(7):
            last = model.log_probs(model(tokens, rng=key)[:, -1:])
            tokens = torch.cat([tokens, last.argmax(-1)], 1)
    assert torch.equal(found.tokens, tokens[:, 5:])
    assert found.lengths.tolist() == [7, 7]
    assert found.tokens_per_second > 0
    caches = model.new_caches()
    linear = isinstance(caches[0], LinearState)
    layer = model.encoder.blocks[0].attention
    per_token, constant = cache_bytes_per_token(layer, torch.float64)
    assert (per_token == 0) == linear
    assert found.cache_bytes == 2 * B * (constant + per_token * (5 + 7 - 1))


PADDED = torch.tensor([[True] * 5, [False] * 3 + [True] * 2])
# Scores of these layers depend on positions in the cache, of which padding is a part.
BY_POSITION = {
    "mgk, prior per position": "prior_share=head_position",
    "mlk, per position": "prior_share=head_position",
    "smgk, rotary, shift after": "rotary_shift=after",
    "fish, noise at evaluation": "noise=global",
    "fish as written, noise per head at evaluation": "noise=local",
}


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [name for name in LAYERS if name not in BY_POSITION],
        ["softmax", "smgk", "mlk", "smgk, rotary, shift before"],
    ),
)
def test_prompts_of_unequal_length_are_padded_on_the_left(name):
    model, mask = tiny(name), PADDED
    prompt = torch.randint(1, 19, (2, 5))
    together = generate(model, prompt, prompt_mask=mask, max_new_tokens=6)
    alone = generate(model, prompt[1:, 3:], max_new_tokens=6)
    first = generate(model, prompt[:1], max_new_tokens=6)
    assert torch.equal(together.tokens, torch.cat([first.tokens, alone.tokens]))


@pytest.mark.parametrize(("name", "option"), BY_POSITION.items())
def test_layers_that_depend_on_cache_positions_refuse_padded_prompts(name, option):
    model, prompt = tiny(name), torch.randint(1, 19, (2, 5))
    with pytest.raises(ValueError, match=f"{option}.*prompts of equal length"):
        generate(model, prompt, prompt_mask=PADDED, max_new_tokens=2)
    whole = torch.ones_like(PADDED)
    assert generate(model, prompt, prompt_mask=whole, max_new_tokens=2).tokens.shape == (2, 2)


class Centred(SoftmaxAttention):
    """Scores depend on the mean of all keys, of which padding is a part."""

    pairwise = False

    def reference_scores(self, query, key):
        return query @ (key - key.mean(-2, keepdim=True)).mT


def test_layers_that_depend_on_padding_refuse_padded_prompts(monkeypatch):
    monkeypatch.setitem(LAYERS, "centred", (Centred, {"num_heads": 3}))
    model, prompt = tiny("centred"), torch.randint(1, 19, (2, 5))
    with pytest.raises(ValueError, match=r"Centred.* padding.*prompts of equal length"):
        generate(model, prompt, prompt_mask=PADDED, max_new_tokens=2)
    assert generate(model, prompt, max_new_tokens=2).tokens.shape == (2, 2)


def test_stop_token_ends_a_row():
    model = tiny()
    prompt = torch.randint(19, (B, 5))
    free = generate(model, prompt, max_new_tokens=9).tokens
    stop = int(free[0, 2])
    found = generate(model, prompt, max_new_tokens=9, stop_id=stop, pad_id=18)
    for row in range(B):
        hits = (free[row] == stop).nonzero()
        length = int(hits[0]) + 1 if len(hits) else 9
        assert int(found.lengths[row]) == length
        assert torch.equal(found.tokens[row, :length], free[row, :length])
        assert (found.tokens[row, length:] == 18).all()


def test_draw_of_a_row_depends_on_its_name_alone():
    model = tiny()
    prompt = torch.randint(19, (3, 5))
    hot = Sampling(temperature=3.0, seed=4)
    ids = torch.tensor([7, 8, 9])
    a = generate(model, prompt, max_new_tokens=8, sampling=hot, sample_ids=ids).tokens
    b = generate(model, prompt[1:2], max_new_tokens=8, sampling=hot, sample_ids=ids[1:2]).tokens
    assert torch.equal(a[1:2], b)
    cold = Sampling(temperature=3.0, seed=5)
    assert not torch.equal(a, generate(model, prompt, max_new_tokens=8, sampling=cold).tokens)


def test_sampled_frequencies_follow_the_probabilities():
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5])
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000

    def frequencies(**rule):
        tokens = next_tokens(logits.expand(10_000, -1), Sampling(**rule), u)
        return torch.bincount(tokens, minlength=5) / 10_000

    tolerance = {"atol": 2e-4, "rtol": 0}
    torch.testing.assert_close(frequencies(temperature=1.0), logits.softmax(-1), **tolerance)
    torch.testing.assert_close(frequencies(temperature=2.0), (logits / 2).softmax(-1), **tolerance)
    two = torch.tensor([2.0, float("-inf"), 1.0, float("-inf"), float("-inf")]).softmax(-1)
    torch.testing.assert_close(frequencies(temperature=1.0, top_k=2), two, **tolerance)
    # The two largest have 0.56 and 0.21: 0.7 needs both, 0.5 only the first.
    torch.testing.assert_close(frequencies(temperature=1.0, top_p=0.7), two, **tolerance)
    assert frequencies(temperature=1.0, top_p=0.5)[0] == 1
    assert next_tokens(logits[None], Sampling()).item() == 0


def test_generation_beyond_the_longest_sequence_is_refused():
    model = tiny(max_seq_len=8)
    prompt = torch.randint(19, (B, 5))
    assert generate(model, prompt, max_new_tokens=4).tokens.shape == (B, 4)
    message = (
        "5 new ones need 9 positions, but max_seq_len is 8: set max_new_tokens to at most 4 "
        r"\(--model.init_args.max_new_tokens of `predict`\)"
    )
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, max_new_tokens=5)


def test_bad_prompts_and_rules_are_refused():
    model, prompt = tiny(), torch.randint(19, (1, 4))
    right = torch.tensor([[True, True, False, False]])
    with pytest.raises(ValueError, match="must be padded on the left"):
        generate(model, prompt, prompt_mask=right, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"expected \(1, 4\) and torch.bool"):
        generate(model, prompt, prompt_mask=right.long(), max_new_tokens=1)
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, prompt[:, :0], max_new_tokens=1)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, received 0"):
        generate(model, prompt, max_new_tokens=0)
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        generate(model.train(), prompt, max_new_tokens=1)
    for rule, message in (
        ({"temperature": -1.0}, "temperature must be "),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampling(**rule)
    with pytest.raises(ValueError, match="logits are NaN"):
        next_tokens(torch.full((1, 3), float("nan")), Sampling())


def test_caches_of_an_earlier_generation_are_refused():
    model, prompt = tiny(), torch.randint(19, (B, 5))
    caches = model.new_caches()
    generate(model, prompt, max_new_tokens=2, caches=caches)
    with pytest.raises(ValueError, match="expected empty caches, received caches of 6 tokens"):
        generate(model, prompt, max_new_tokens=2, caches=caches)


def test_caches_reserve_the_positions_that_are_asked_for_and_none_by_default():
    encoder = tiny("softmax").encoder
    assert [cache.capacity for cache in encoder.new_caches()] == [0, 0]
    assert [cache.capacity for cache in encoder.new_caches(7)] == [7, 7]


def test_generation_reserves_the_prompt_and_what_follows(monkeypatch):
    model, asked = tiny("softmax"), []
    new_caches = model.new_caches
    monkeypatch.setattr(model, "new_caches", lambda n: asked.append(n) or new_caches(n))
    generate(model, torch.randint(19, (B, 5)), max_new_tokens=7)
    assert asked == [5 + 7]


def test_number_of_caches_must_fit():
    model = tiny()
    with pytest.raises(ValueError, match="received 1 caches for 2 layers"):
        model.encoder(torch.zeros(1, 3, 12).double(), caches=model.new_caches()[:1])


def test_caches_of_a_call_that_failed_in_the_middle_are_refused():
    model, x = tiny(), torch.zeros(1, 3, 12).double()
    caches = model.new_caches()
    model.encoder.layers[0].attention(x, is_causal=True, cache=caches[0])
    with pytest.raises(ValueError, match="end at different positions"):
        model.encoder(x, is_causal=True, caches=caches)
