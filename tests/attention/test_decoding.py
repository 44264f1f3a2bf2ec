"""Decoding: caches and their bytes, split and merge, steps against full passes, generation."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lit_probattn.attention import (
    KVCache,
    LinearAttention,
    LinearState,
    MGKAttention,
    MLKAttention,
    SoftmaxAttention,
)
from lit_probattn.attention.decode import merge_partials, partial_attention
from lit_probattn.decoding import (
    Sampling,
    cache_bytes_per_token,
    generate,
    next_tokens,
)
from lit_probattn.embeddings import TokenEmbedding
from lit_probattn.transformer import Transformer

B, N, C, E = 2, 13, 11, 6
POSITIONS = {"prior_share": "head_position", "max_positions": 31}
LAYERS = {
    "softmax": (SoftmaxAttention, {"num_heads": 3}),
    "softmax, grouped, rotary": (
        SoftmaxAttention,
        {"num_heads": 6, "num_kv_heads": 3, "rotary_dim": 4},
    ),
    "gaussian, grouped": (
        SoftmaxAttention,
        {"num_heads": 6, "num_kv_heads": 2, "score": "gaussian"},
    ),
    "mgk": (MGKAttention, {"num_heads": 3}),
    "mgk, K=3, unequal, grouped": (
        MGKAttention,
        {"num_heads": 6, "num_kv_heads": 3, "num_components": 3, "variance": "paper_main"},
    ),
    "mgk, hard, rotary": (
        MGKAttention,
        {"num_heads": 3, "e_step": "hard", "variance": "code_lm", "rotary_dim": 6},
    ),
    "mgk, dot, log det": (
        MGKAttention,
        {"num_heads": 3, "score": "dot", "variance": "paper_main", "include_log_det": True},
    ),
    "mgk, per position, row eps": (
        MGKAttention,
        {"num_heads": 3, "row_eps": 0.01, "variance": "code_lm", **POSITIONS},
    ),
    "smgk": (MGKAttention, {"num_heads": 3, "shifted_keys": True}),
    "smgk, unequal, mixtures per query": (
        MGKAttention,
        {
            "num_heads": 6,
            "num_kv_heads": 3,
            "mixture_heads": "query",
            "shifted_keys": True,
            "variance": "paper_main",
        },
    ),
    "smgk, hard": (
        MGKAttention,
        {"num_heads": 3, "shifted_keys": True, "e_step": "hard", "variance": "code_lm"},
    ),
    **{
        f"smgk, rotary, shift {shift}": (
            MGKAttention,
            {"num_heads": 3, "shifted_keys": True, "rotary_dim": 4, "rotary_shift": shift},
        )
        for shift in ("before", "after", "unrotated")
    },
    "linear": (LinearAttention, {"num_heads": 3}),
    "linear, favor, grouped": (
        LinearAttention,
        {"num_heads": 6, "num_kv_heads": 3, "feature_map": "favor"},
    ),
    "mlk": (MLKAttention, {"num_heads": 3}),
    "mlk, per position": (MLKAttention, {"num_heads": 3, **POSITIONS}),
    "smlk": (MLKAttention, {"num_heads": 3, "shifted_keys": True}),
}
CACHED = [name for name, (cls, _) in LAYERS.items() if cls in (SoftmaxAttention, MGKAttention)]


def make(name, **options):
    cls, kind = LAYERS[name]
    layer = cls(C, E, **{**kind, **options}).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.rand_like(parameter)
    return layer


def left_padded_mask(pads=(0, 3)):
    mask = torch.ones(B, N, dtype=torch.bool)
    for row, count in enumerate(pads):
        mask[row, :count] = False
    return mask


def decode(layer, x, mask, cache, first, step):
    """Read `first` tokens at once, then `step` at a time."""
    stops = [0, first, *range(first + step, N, step), N]
    with torch.no_grad():
        return torch.cat(
            [
                layer(x[:, a:b], key_mask=mask[:, a:b], is_causal=True, cache=cache)
                for a, b in itertools.pairwise(stops)
            ],
            1,
        )


# ---------------------------------------------------------------------- a step equals the full pass
@pytest.mark.parametrize(("first", "step"), [(1, 1), (5, 1), (4, 3)])
@pytest.mark.parametrize("name", LAYERS)
def test_step_equals_the_full_causal_pass(name, first, step):
    layer, x, mask = make(name), torch.randn(B, N, C, dtype=torch.float64), left_padded_mask()
    layer.backend = "reference"
    full = layer(x, key_mask=mask, is_causal=True)
    layer.backend = "auto"
    out = decode(layer, x, mask, layer.new_cache(capacity=7), first, step)
    torch.testing.assert_close(out, full, atol=1e-13, rtol=0)


@pytest.mark.parametrize("part_len", [1, 4, 13])
@pytest.mark.parametrize("store_offsets", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_reading_the_cache_in_parts_changes_nothing(name, store_offsets, part_len):
    layer, x, mask = make(name), torch.randn(B, N, C, dtype=torch.float64), left_padded_mask()
    layer.backend = "reference"
    full = layer(x, key_mask=mask, is_causal=True)
    layer.backend = "auto"
    cache = KVCache(store_offsets=store_offsets, part_len=part_len)
    out = decode(layer, x, mask, cache, 3, 1)
    torch.testing.assert_close(out, full, atol=1e-13, rtol=0)
    assert len(cache.parts()) == -(-N // part_len)


@pytest.mark.parametrize("name", CACHED)
def test_named_backends_decode_too(name):
    layer, x, mask = make(name), torch.randn(B, N, C, dtype=torch.float64), left_padded_mask()
    layer.backend = "reference"
    full = layer(x, key_mask=mask, is_causal=True)
    for backend in layer.backends:
        layer.backend = backend
        if (layer.row_eps and backend != "reference") or ("hard" in name and backend == "sdpa"):
            continue
        out = decode(layer, x, mask, layer.new_cache(), 4, 1)
        torch.testing.assert_close(out, full, atol=1e-13, rtol=0)


def test_masks_and_bias_reach_the_cached_keys():
    layer, x = make("mgk"), torch.randn(B, N, C, dtype=torch.float64)
    bias = torch.randn(N, N, dtype=torch.float64)
    pairs = torch.rand(N, N) < 0.8
    full = layer(x, is_causal=True, bias=bias, attn_mask=pairs)
    cache = KVCache(part_len=4)
    parts = []
    for i in range(N):
        row = {"bias": bias[i : i + 1, : i + 1], "attn_mask": pairs[i : i + 1, : i + 1]}
        parts.append(layer(x[:, i : i + 1], is_causal=True, cache=cache, **row))
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-13, rtol=0)


# ---------------------------------------------------------------------- split and merge
def test_merge_of_parts_is_softmax_over_all():
    scores = 30 * torch.randn(B, 3, 5, N, dtype=torch.float64)
    value = torch.randn(B, 3, N, 7, dtype=torch.float64)
    allowed = torch.rand(B, 1, 5, N) < 0.5
    allowed[:, :, 1] = False  # sees nothing at all
    allowed[:, :, 2, :4] = False  # sees nothing of the first part
    hidden = scores.masked_fill(~allowed, float("-inf"))
    expected = hidden.softmax(-1).nan_to_num() @ value
    for cuts in ([0, N], [0, 4, N], [0, 1, 4, 9, N]):
        parts = [
            partial_attention(scores[..., a:b], value[:, :, a:b], allowed[..., a:b])
            for a, b in itertools.pairwise(cuts)
        ]
        out, total = merge_partials([p[0] for p in parts], [p[1] for p in parts])
        torch.testing.assert_close(out, expected, atol=1e-14, rtol=0)
        torch.testing.assert_close(total[..., 0], hidden.logsumexp(-1), atol=1e-13, rtol=0)
        assert (out[:, :, 1] == 0).all()


def test_merge_holds_for_scores_that_overflow_exponentials():
    scores = torch.tensor([[[[900.0, -900.0, 899.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[1.0], [2.0], [3.0]]]], dtype=torch.float64)
    parts = [
        partial_attention(scores[..., i : i + 1], value[:, :, i : i + 1], None) for i in range(3)
    ]
    out, _ = merge_partials([p[0] for p in parts], [p[1] for p in parts])
    share = torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(out.squeeze(), share * 1.0 + (1 - share) * 3.0)


# ---------------------------------------------------------------------- bytes
H = 3
TABLE = [  # name, numbers per token, constant numbers; extensions.md, section 3, D = D_v = E
    ("softmax", {}, H * (E + E), 0),
    ("softmax", {"num_kv_heads": 1}, E + E, 0),
    ("softmax", {"value_head_dim": 7}, H * (E + 7), 0),
    ("mgk", {}, H * (2 * E + E + 2), 0),
    ("mgk", {"num_components": 4}, H * (4 * E + E + 4), 0),
    ("mgk", {"num_kv_heads": 1}, 2 * E + E + 2, 0),
    ("smgk", {}, H * (E + E + 2), 0),
    ("smgk", {"num_components": 4}, H * (E + E + 4), 0),
    ("linear", {}, 0, H * E * (E + 1)),
    ("mlk", {}, 0, H * E * (E + 1)),
    ("mlk", {"num_components": 4, "value_head_dim": 7}, 0, H * E * (7 + 1)),
    ("smlk", {}, 0, H * E * (E + 1)),
]


@pytest.mark.parametrize(("name", "options", "per_token", "constant"), TABLE)
def test_bytes_of_the_decoding_table(name, options, per_token, constant):
    layer = make(name, **options).float()
    assert cache_bytes_per_token(layer) == (4 * per_token, 4 * constant)


@pytest.mark.parametrize(
    ("name", "numbers"), [("mgk", H * (2 * E + E)), ("smgk", H * (E + E)), ("softmax", H * 2 * E)]
)
def test_bytes_without_offsets(name, numbers):
    layer = make(name).float()
    cache = KVCache()
    layer(torch.randn(B, N, C), is_causal=True, cache=cache)
    assert cache.num_bytes == 4 * B * N * numbers


def test_half_precision_halves_keys_and_keeps_offsets():
    layer = make("mgk").to(torch.bfloat16)
    assert cache_bytes_per_token(layer, torch.bfloat16) == (2 * H * 3 * E + 4 * H * 2, 0)


def test_ratios_to_plain_attention_of_twice_the_heads():
    """MGK with H/K heads holds (K + 1) / (2K) of plain attention, shifted keys 1/K."""
    plain = make("softmax", num_heads=6).float()
    caches = {}
    for name, layer in {"plain": plain, **{n: make(n).float() for n in ("mgk", "smgk")}}.items():
        caches[name] = KVCache()
        layer(torch.randn(1, N, C), is_causal=True, cache=caches[name])
    assert caches["mgk"].num_bytes / caches["plain"].num_bytes == 3 / 4
    assert caches["smgk"].num_bytes / caches["plain"].num_bytes == 1 / 2


def test_cache_grows_by_doubling_and_reads_back():
    cache = KVCache(capacity=3)
    key, value = torch.randn(B, 2, 4, 20, E), torch.randn(B, 2, 20, 7)
    for i in range(20):
        cache.append(key[..., i : i + 1, :], value[..., i : i + 1, :])
    assert cache.allocated_bytes == (24 * cache.num_bytes) // 20  # 3, 6, 12, 24
    keys, values, offset = cache.part(range(4, 9))
    assert torch.equal(keys, key[..., 4:9, :])
    assert torch.equal(values, value[..., 4:9, :])
    assert offset is None
    with pytest.raises(ValueError, match="the cache is empty"):
        KVCache().part(range(1))
    with pytest.raises(ValueError, match="part_len must be at least 1, received 0"):
        KVCache(part_len=0)


# ---------------------------------------------------------------------- generation
class TinyDecoder(nn.Module):
    """A causal language model with what `generate` needs."""

    def __init__(self, name, max_seq_len=31, vocab=19):
        super().__init__()
        cls, kind = LAYERS[name]
        self.max_seq_len = max_seq_len
        self.embedding = TokenEmbedding(vocab, max_seq_len, C, init_std=1.0)
        self.encoder = Transformer(lambda c, e: cls(c, e, **kind), C, E, 2, 17)
        self.head = nn.Linear(C, vocab)

    def new_caches(self, capacity=0):
        return self.encoder.new_caches(capacity)

    def next_logits(self, inputs, *, key_mask, positions, caches):
        x = self.embedding(inputs, positions)
        x = self.encoder(x, key_mask=key_mask, is_causal=True, caches=caches)
        return self.head(x[:, -1])

    def full_logits(self, inputs):
        return self.head(self.encoder(self.embedding(inputs), is_causal=True))


def tiny(name="mgk", **options):
    return TinyDecoder(name, **options).double().eval()


@pytest.mark.parametrize("name", LAYERS)
def test_greedy_generation_equals_full_passes(name):
    model = tiny(name)
    prompt = torch.randint(19, (B, 5))
    found = generate(model, prompt, max_new_tokens=7)
    tokens = prompt
    with torch.no_grad():
        for _ in range(7):
            tokens = torch.cat([tokens, model.full_logits(tokens)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found.tokens, tokens[:, 5:])
    assert found.lengths.tolist() == [7, 7]
    assert found.tokens_per_second > 0
    caches = model.new_caches()
    linear = isinstance(caches[0], LinearState)
    layer = model.encoder.blocks[0].attention
    per_token, constant = cache_bytes_per_token(layer, torch.float64)
    assert (per_token == 0) == linear
    assert found.cache_bytes == 2 * B * (constant + per_token * (5 + 7 - 1))


@pytest.mark.parametrize("name", ["softmax", "smgk", "mlk", "smgk, rotary, shift before"])
def test_prompts_of_unequal_length_are_padded_on_the_left(name):
    model = tiny(name)
    prompt = torch.randint(1, 19, (2, 5))
    mask = torch.tensor([[True] * 5, [False] * 3 + [True] * 2])
    together = generate(model, prompt, prompt_mask=mask, max_new_tokens=6)
    alone = generate(model, prompt[1:, 3:], max_new_tokens=6)
    first = generate(model, prompt[:1], max_new_tokens=6)
    assert torch.equal(together.tokens, torch.cat([first.tokens, alone.tokens]))


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
    message = "5 new ones need 9 positions, but max_seq_len is 8: ask for at most 4"
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
        ({"temperature": -1.0}, "temperature must be finite"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be in"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampling(**rule)
    with pytest.raises(ValueError, match="logits are NaN"):
        next_tokens(torch.full((1, 3), float("nan")), Sampling())


def test_number_of_caches_must_fit():
    model = tiny()
    with pytest.raises(ValueError, match="received 1 caches for 2 blocks"):
        model.encoder(torch.zeros(1, 3, C).double(), caches=model.new_caches()[:1])


# ---------------------------------------------------------------------- grouped queries
def test_grouped_mixtures_equal_repeated_heads():
    """extensions.md 7: sharing keys, priors and variances equals repeating them over the group."""
    options = {"num_components": 2, "variance": "paper_main", "learn_variance": True}
    grouped = MGKAttention(C, E, 6, num_kv_heads=3, **options).double().eval()
    with torch.no_grad():
        grouped.prior.value += 0.3 * torch.rand_like(grouped.prior.value)
        grouped.variance.log_variance += 0.3 * torch.rand(3, 2)
    full = MGKAttention(C, E, 6, **options).double().eval()
    with torch.no_grad():
        full.query_proj.load_state_dict(grouped.query_proj.state_dict())
        full.out_proj.load_state_dict(grouped.out_proj.state_dict())
        for name, target in full.named_parameters():
            if name.startswith(("key_proj", "value_proj")):
                source = dict(grouped.named_parameters())[name].unflatten(0, (3, -1))
                target.copy_(source.repeat_interleave(2, 0).flatten(0, 1))
        full.prior.value.copy_(grouped.prior.value.repeat_interleave(2, 0))
        full.variance.log_variance.copy_(grouped.variance.log_variance.repeat_interleave(2, 0))
    x = torch.randn(B, N, C, dtype=torch.float64)
    out = []
    for layer in (grouped, full):
        layer.zero_grad()
        out.append(layer(x, is_causal=True))
        out[-1].square().sum().backward()
    torch.testing.assert_close(*out, atol=1e-13, rtol=0)
    for name in ("prior.value", "variance.log_variance"):
        mine, theirs = (dict(layer.named_parameters())[name].grad for layer in (grouped, full))
        torch.testing.assert_close(mine, theirs.unflatten(0, (3, 2)).sum(1), atol=1e-12, rtol=0)


def test_one_component_without_norms_is_grouped_query_attention():
    mixture = MGKAttention(C, E, 6, num_kv_heads=2, num_components=1, score="dot").double().eval()
    plain = SoftmaxAttention(C, E, 6, num_kv_heads=2).double().eval()
    plain.load_state_dict({k: v for k, v in mixture.state_dict().items() if "prior" not in k})
    x = torch.randn(B, N, C, dtype=torch.float64)
    torch.testing.assert_close(mixture(x), plain(x), atol=1e-13, rtol=0)
