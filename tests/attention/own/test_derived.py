"""What follows from `reference_scores` alone, against the same variant written out in full."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch

from lit_probattn.attention import (
    Attention,
    Core,
    HeadLayout,
    KVCache,
    SoftmaxAttention,
    Variant,
)
from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.engines.blocks import BLOCK_SCORES
from lit_probattn.attention.masks import make_masks
from lit_probattn.attention.own.contract import CHECKS, EMBED, HEAD, small_blocks
from lit_probattn.attention.own.derived import OwnVariant, in_blocks, stored
from lit_probattn.randomness import RandomKey
from tests.attention.variants import keep_in_blocks
from tests.support.cosine import CosineAttention

KEY = RandomKey(5, step=3, sample_ids=torch.tensor([19, 4]))


class Derived(Attention):
    """`CosineAttention` of tests/support by its scores alone."""

    def __init__(self, embed_dim: int, num_heads: int, *, sharpness: float = 10.0, **common):
        super().__init__(embed_dim, num_heads, **common)
        self.log_sharpness = torch.nn.Parameter(torch.full((num_heads,), sharpness).log())

    def reference_scores(self, query, key):
        unit = [x / x.norm(dim=-1, keepdim=True) for x in (query, key)]
        return self.log_sharpness.exp().to(query.dtype)[:, None, None] * (unit[0] @ unit[1].mT)


class Dots(Attention):
    """Softmax attention by its scores alone."""

    def reference_scores(self, query, key):
        return query @ key.mT * query.shape[-1] ** -0.5


class Distances(Dots):
    """ALiBi (Press et al., 2022) by scores that know positions."""

    def reference_scores(self, query, key, query_positions, key_positions):
        slopes = 2.0 ** -torch.arange(1, query.shape[1] + 1).to(query)
        apart = (query_positions[:, None] - key_positions).abs()
        return super().reference_scores(query, key) - slopes[:, None, None] * apart


class Counted(Dots):
    """A layer whose scores assign a buffer."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("num_calls", torch.zeros(()))

    def reference_scores(self, query, key):
        self.num_calls = self.num_calls + 1
        return query @ key.mT


class OverKeys(Dots):
    """Scores that are divided by their spread over the keys: a pair depends on the others."""

    def reference_scores(self, query, key):
        scores = super().reference_scores(query, key)
        return scores / (scores.std(-1, keepdim=True, correction=0) + 0.1)


class WrongShape(Dots):
    def reference_scores(self, query, key):
        return super().reference_scores(query, key).mean(1)


class Nothing(Attention):
    pass


class HalfACore(Core):
    def variant(self, call):
        return Variant()


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"dropout": 0.5}])
def test_outputs_and_gradients_are_those_of_the_variant_in_full(backend, options):
    full = CosineAttention(EMBED, 4, head_dim=HEAD, **options).double()
    mine = Derived(EMBED, 4, head_dim=HEAD, backend=backend, **options).double()
    weights = {k.removeprefix("core."): v for k, v in full.state_dict().items()}
    mine.load_state_dict(weights)
    full.backend = "reference"
    x = torch.randn(2, 13, EMBED, dtype=torch.float64)
    mask = torch.rand(2, 13) < 0.8
    found = []
    for layer in (full, mine):
        leaf = x.clone().requires_grad_()
        with small_blocks():
            out = layer(leaf, is_causal=True, key_mask=mask, rng=KEY)
            out.square().sum().backward()
        grads = {k.removeprefix("core."): p.grad for k, p in layer.named_parameters()}
        found.append([out, leaf.grad, *(grads[name] for name in sorted(grads))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-11)


def test_blocks_take_less_memory_than_the_scores():
    """No tensor of all scores is kept for backward."""
    layer, kept = Dots(EMBED, 4, head_dim=HEAD, backend="blockwise"), []
    with (
        small_blocks(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x
        ),
    ):
        layer(torch.randn(2, 97, EMBED)).sum().backward()
    assert max(kept) < 4 * 97 * 97


def test_buffers_that_scores_assign_remain_assigned():
    layer = Counted(8, 2, backend="blockwise")
    out = layer(torch.randn(1, 9, 8))
    assert layer.num_calls == 1
    out.sum().backward()  # computes the block again
    assert layer.num_calls == 1


def test_cost_is_softmax_attentions_where_the_scores_are():
    plain, mine = (cls(EMBED, 4, head_dim=HEAD) for cls in (SoftmaxAttention, Dots))
    assert mine.cost(101) == plain.cost(101)
    more = Derived(EMBED, 4, head_dim=HEAD).cost(7).num_parameters
    assert more == plain.cost(7).num_parameters + 4


def test_copies_have_scores_of_their_own():
    layer = Derived(EMBED, 4, head_dim=HEAD)
    x = torch.randn(2, 7, EMBED)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        with torch.no_grad():
            other.log_sharpness.zero_()
        assert not torch.equal(other(x), layer(x))


@pytest.mark.parametrize("check", CHECKS)
def test_scores_that_know_positions_keep_every_promise(check):
    keep_in_blocks(check, partial(Distances, EMBED, 4, head_dim=HEAD))


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_positions_are_those_of_queries_and_keys(backend):
    layer = Distances(EMBED, 4, head_dim=HEAD, backend=backend).double()
    plain = Dots(EMBED, 4, head_dim=HEAD).double()
    plain.load_state_dict(layer.state_dict())
    x, at = torch.randn(2, 13, EMBED, dtype=torch.float64), torch.arange(13)
    slopes = 2.0 ** -torch.arange(1, 5, dtype=torch.float64)
    bias = -slopes[:, None, None] * (at[:, None] - at).abs()
    with small_blocks():
        found = layer(x, is_causal=True)
    torch.testing.assert_close(found, plain(x, is_causal=True, bias=bias), rtol=0, atol=1e-12)
    assert not torch.allclose(found, plain(x, is_causal=True))


def test_scores_over_keys_break_named_promises_and_are_not_cut():
    make = partial(OverKeys, EMBED, 4, head_dim=HEAD)
    broken = []
    for name, check in CHECKS.items():
        torch.manual_seed(0)
        try:
            check.run(make)
        except AssertionError:
            broken.append(name)
    masks = ["causality", "padding", "masks of pairs"]
    assert broken == [*masks, "backends", "cross-attention", "cache", "documents"]
    OverKeys.pairwise = False
    try:
        with pytest.raises(NotImplementedError, match="cannot split the scores of OverKeys"):
            make(backend="blockwise")(torch.randn(2, 7, EMBED))
    finally:
        OverKeys.pairwise = True


def test_documents_are_checked_with_a_causal_mask_and_without():
    asked = set()

    class Recorded(Dots):
        def forward(self, *inputs, **options):
            asked.add(options["is_causal"])
            return super().forward(*inputs, **options)

    CHECKS["documents"].run(partial(Recorded, EMBED, 4, head_dim=HEAD))
    assert asked == {False, True}


def test_a_cache_that_does_not_count_its_bytes_breaks_its_promise(monkeypatch):
    make = partial(Dots, EMBED, 4, head_dim=HEAD)
    monkeypatch.setattr(KVCache, "num_bytes", property(lambda cache: cache.allocated_bytes + 1))
    with pytest.raises(AssertionError, match="byte counts are wrong"):
        CHECKS["cache"].run(make)


def test_what_is_missing_is_named_in_one_line():
    with pytest.raises(AttributeError, match="Nothing has neither reference_scores nor"):
        Nothing(EMBED, 4, head_dim=HEAD)(torch.randn(2, 7, EMBED))
    with pytest.raises(NotImplementedError, match="Nothing has neither reference_scores nor"):
        Nothing(EMBED, 4, head_dim=HEAD).cost(7)
    with pytest.raises(TypeError, match="HalfACore lacks makes, which a core must define"):
        HalfACore(HeadLayout(4, 4, 4, 4, HEAD, HEAD))
    shape = r"returned shape \(2, 7, 7\), expected .* = \(2, 4, 7, 7\)"
    with pytest.raises(ValueError, match=shape):
        WrongShape(EMBED, 4, head_dim=HEAD)(torch.randn(2, 7, EMBED))


def test_weights_of_fewer_heads_than_queries_are_computed_in_blocks(monkeypatch):
    """The number of heads of an output is that of the weights, which hooks may reduce."""
    monkeypatch.setitem(BLOCK_SCORES, "cpu", 2 * 4 * 7 * 2)  # blocks of two queries
    query, key, value = (torch.randn(2, h, n, 3).double() for h, n in ((4, 5), (4, 7), (2, 7)))
    call = HeadCall(query, key, value, make_masks(2, 4, 5, 7))

    def joined(weights):
        return weights.unflatten(1, (2, 2)).mean(2)

    variant = OwnVariant(lambda q, k: q @ k.mT, mixer=joined, num_heads=2)
    torch.testing.assert_close(in_blocks(call, variant), stored(call, variant))
