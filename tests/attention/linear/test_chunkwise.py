"""The causal product over chunks against direct sums: sizes that do not divide, states, memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lit_probattn.attention import KVCache, LinearAttention, MLKAttention, ReleasedLinearAttention
from lit_probattn.attention.linear.chunkwise import _spans, causal_product, chunk_length
from lit_probattn.base.memory import outlined_bytes

B, F, E = 2, 5, 7


def draw(num_queries, num_keys, heads, kv_heads):
    shapes = [(heads, num_queries, F), (kv_heads, num_keys, F), (kv_heads, num_keys, E)]
    tensors = [torch.randn(B, *shape, dtype=torch.float64) for shape in shapes]
    return [t.requires_grad_() for t in [*tensors, torch.randn(B, kv_heads, F, E).double()]]


def direct(query, key, value, state):
    """Sum over keys one by one."""
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    offset = key.shape[2] - query.shape[2]
    rows = []
    for h in range(heads):
        for i in range(query.shape[2]):
            total = state[:, h // groups]
            for j in range(max(0, i + offset + 1)):
                outer = key[:, h // groups, j, :, None] * value[:, h // groups, j, None]
                total = total + outer
            rows.append((query[:, h, i, :, None] * total).sum(1))
    after = state + torch.einsum("bhjf,bhje->bhfe", key, value)
    return torch.stack(rows, 1).view(B, heads, query.shape[2], E), after


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 3), (2, 1)])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "chunk", "span"),
    [
        *((13, 13, 4, 8), (13, 13, 5, 5), (13, 13, 64, None), (12, 12, 3, 6)),
        *((7, 17, 3, 6), (17, 7, 4, 4), (1, 11, None, None), (1, 1, None, None)),
    ],
)
def test_product_and_gradients_equal_direct_sums(
    num_queries, num_keys, chunk, span, heads, kv_heads
):
    inputs = draw(num_queries, num_keys, heads, kv_heads)
    query, key, value, state = inputs
    found = causal_product(query, key, value, state=state, chunk=chunk, span=span)
    expected = direct(*inputs)
    cotangents = [torch.randn_like(t) for t in expected]
    grads = [
        torch.autograd.grad([(o * c).sum() for o, c in zip(outs, cotangents, strict=True)], inputs)
        for outs in (found, expected)
    ]
    for a, b in [*zip(found, expected, strict=True), *zip(*grads, strict=True)]:
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13)


def test_a_recorded_graph_computes_the_product():
    inputs = [t.detach() for t in draw(13, 13, 2, 1)]
    graph = make_fx(lambda *x: causal_product(*x[:3], state=x[3], chunk=4, span=8))(*inputs)
    for a, b in zip(graph(*inputs), direct(*inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("before", [0, 4])
def test_a_graph_of_unknown_sizes_computes_the_product_of_others(before):
    recorded = [t.detach() for t in draw(13, 13 + before, 2, 1)]
    graph = make_fx(lambda *x: causal_product(*x[:3], state=x[3]), tracing_mode="symbolic")(
        *recorded
    )
    inputs = [t.detach() for t in draw(7, 7 + before, 2, 1)]
    for a, b in zip(graph(*inputs), direct(*inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13)


def test_state_of_another_kind_or_batch_is_refused():
    layer = LinearAttention(11, 3, head_dim=5).eval()
    with pytest.raises(
        ValueError, match=r"LinearState, received KVCache: create it with layer.new"
    ):
        layer(torch.randn(2, 3, 11), cache=KVCache())
    state = layer.new_cache()
    layer(torch.randn(2, 3, 11), cache=state)
    assert not state.sums.requires_grad
    with pytest.raises(ValueError, match="contains a batch of 2, received 3"):
        layer(torch.randn(3, 1, 11), cache=state)
    code = ReleasedLinearAttention(11, 3, head_dim=5, denominator="sqrt_len").eval()
    with pytest.raises(ValueError, match="needs padded_len, received None"):
        code(torch.randn(2, 3, 11), cache=code.new_cache())
    code.core.form = ReleasedLinearAttention(
        11, 3, head_dim=5, denominator="sqrt_len", padded_len=3
    ).core.form
    assert code(torch.randn(2, 3, 11), is_causal=True, cache=code.new_cache()).shape == (2, 3, 11)


@pytest.mark.parametrize(
    ("length", "chunk", "span"), [(29, 4, 8), (24, 4, 12), (13, 5, 5), (3, 4, 4)]
)
def test_no_span_is_longer_than_given_and_together_they_are_the_sequence(length, chunk, span):
    """The states of one span are in memory at once."""
    spans = _spans(length, chunk, span)
    sizes = [part.num_chunks * part.chunk for part in spans]
    assert max(sizes) == min(span, length)
    assert [part.start for part in spans] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == length


def test_chunks_grow_with_the_features():
    assert [chunk_length(f) for f in (3, 32, 33, 128, 1000)] == [32, 32, 64, 128, 256]


def test_memory_grows_no_faster_than_length():
    """Peak of forward and backward, without data, doubling N: at most twice plus 5 %."""

    def build(length):
        layer = MLKAttention(16, 2, head_dim=8, backend="blockwise")
        x = torch.randn(1, length, 16)
        return lambda: layer(x, is_causal=True).sum().backward(), (layer, x)

    peaks = [sum(outlined_bytes(partial(build, length))) for length in (256, 512)]
    assert peaks[1] < 2.1 * peaks[0]
    assert peaks[1] < 512 * 512 * 4  # one map of one head
