"""No NaN, ever: far keys, equal keys, dead priors, tiny and huge variances, one position."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.attention.backends import GPU_BACKENDS
from lit_probattn.randomness import RandomKey
from tests.attention.mgk.oracles import visible_pairs
from tests.attention.variants import EMBED as VARIANT_EMBED
from tests.attention.variants import examples, in_turn, layers
from tests.support.helpers import cpu_backends, use_oracle
from tests.support.slow import every_nth, mostly_slow

EMBED, HEAD, HEADS = 7, 5, 2
VARIANTS = {
    "softmax": (SoftmaxAttention, {}),
    "gaussian": (SoftmaxAttention, {"score": "gaussian"}),
    "mgk": (MGKAttention, {}),
    "smgk": (MGKAttention, {"shifted_keys": True}),
    "mgk, hard": (MGKAttention, {"e_step": "hard"}),
}
CASES = [
    pytest.param(name, backend, id=f"{name}-{backend}")
    for name, (cls, options) in VARIANTS.items()
    for backend in cpu_backends(cls(EMBED, HEADS, head_dim=HEAD, **options))
    if not (backend == "sdpa" and options.get("e_step") == "hard")
]
SIZES = st.sampled_from([0.0, 1e-4, 1.0, 30.0, 1e4])
VARIANCES = st.sampled_from([1e-3, 0.1, 1.0, 1e3])
PRIORS = st.sampled_from([0.0, 1e-30, 1e-8, 0.5])


def make(name, variances, prior):
    cls, options = VARIANTS[name]
    if cls is MGKAttention:
        options = {**options, "variance": list(variances)}
    torch.manual_seed(0)
    layer = cls(EMBED, HEADS, head_dim=HEAD, **options)
    if cls is MGKAttention and "e_step" not in options:
        with torch.no_grad():
            layer.core.prior.value[:, 0] = prior
    return layer


def log_sums(largest):
    """Return an oracle of either layer that sums in log space; notes the largest score term."""

    def oracle(query, key, value, *, masks, dropout, score, hard=False, log_prior=None,
               variance=None, equal_variance=None, include_log_det=False):  # fmt: skip
        keys = key if key.dim() == 5 else key[:, :, None]
        if variance is None:
            variance = torch.full((1, 1), math.sqrt(query.shape[-1]), dtype=torch.float64)
        per_component = variance[:, :, None, None]
        gap = (query[:, :, None, :, None] - keys[:, :, :, None]).square().sum(-1)
        terms = -gap / (2 * per_component)
        if score == "dot":
            terms = (query[:, :, None, :, None] * keys[:, :, :, None]).sum(-1) / per_component
        norms = query.square().sum(-1).max() + keys.square().sum(-1).max()
        largest.append((norms / variance.min()).item())
        if log_prior is not None:
            terms = terms + log_prior[:, :, None]  # (H, K, 1, 1 or L)
        scores = terms.max(2).values if hard else terms.logsumexp(2)
        allowed = visible_pairs(masks, *scores.shape).bool()
        scores = scores.masked_fill(~allowed, -math.inf)
        seen = allowed.any(-1, keepdim=True)
        return (torch.where(seen, scores, 0.0).softmax(-1) * seen) @ value

    return oracle


def run(layer, x, key_mask, is_causal):
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    out = layer(leaf, key_mask=key_mask, is_causal=is_causal)
    out.float().sum().backward()
    gradients = [leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    return out.detach(), gradients


@pytest.mark.parametrize(("name", "backend"), every_nth(4, CASES))
@settings(derandomize=True, max_examples=12, deadline=None, database=None)
@given(
    size=SIZES,
    variances=st.tuples(VARIANCES, VARIANCES),
    prior=PRIORS,
    length=st.sampled_from([1, 2, 11]),
    equal=st.booleans(),
    hidden=st.sampled_from([None, "some", "all"]),
    is_causal=st.booleans(),
)
def test_nothing_is_nan_and_outputs_are_right(
    name, backend, size, variances, prior, length, equal, hidden, is_causal
):
    """Finite in every precision; in float64 as exact as the size of the score terms allows.

    A score is a difference of terms as large as (‖q‖² + ‖k‖²)/σ², so its error, and with it the
    relative error of a weight, is some units of the last place of that.
    """
    layer = make(name, variances, prior)
    layer.backend = backend
    generator = torch.Generator().manual_seed(length)
    x = size * torch.randn(3, 1 if equal else length, EMBED, generator=generator)
    x = x.expand(3, length, EMBED)
    key_mask = None
    if hidden is not None:
        key_mask = torch.ones(3, length, dtype=torch.bool)
        key_mask[0, 0] = False
        key_mask[1] = hidden != "all"
    for precision in ("float32", "bfloat16"):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            out, gradients = run(layer, x, key_mask, is_causal)
        assert out.isfinite().all(), precision
        assert all(g.isfinite().all() for g in gradients), precision

    layer = layer.double()
    found, gradients = run(layer, x.double(), key_mask, is_causal)
    assert all(g.isfinite().all() for g in gradients)
    largest: list[float] = []
    use_oracle(layer, log_sums(largest))
    expected, _ = run(layer, x.double(), key_mask, is_causal)
    bound = 100 * torch.finfo(torch.float64).eps * (1 + max(largest)) * (1 + size)
    assert (found - expected).abs().max() <= bound


LAYERS = layers()
WALKED = {**LAYERS, **examples()}
DTYPES = [torch.float16, torch.float32, torch.bfloat16]
# Gradients of larger inputs may lie beyond the largest number of float16.
MOST_IN_FLOAT16 = 30
# The float64 results exceed 65504: outputs of DCMHA (3e6 at size 300), gradients of Parallax
# (1e5 at size 30).
OUTPUTS_IN_FLOAT16, GRADIENTS_IN_FLOAT16 = {"dcmha": 30}, {"parallax": 3}
# One sequence is whole, one padded, one nothing but padding.
REAL = torch.tensor([[1] * 9, [1] * 6 + [0] * 3, [0] * 9]).bool()


@pytest.mark.parametrize(
    ("name", "dtype"),
    mostly_slow(itertools.product(WALKED, DTYPES), in_turn(WALKED, DTYPES, nth=3)),
)
def test_no_variant_gives_nan(name, dtype):
    """Outputs and gradients of every variant and backend, from inputs of size 30 to 300.

    Causal and other calls take turns, in 16 bits the other way round; all have a row without keys.
    """
    layer = WALKED[name]().to(dtype).train()
    noise = torch.randn(3, 9, VARIANT_EMBED, generator=torch.Generator().manual_seed(1))
    half, most = dtype == torch.float16, GRADIENTS_IN_FLOAT16.get(name, MOST_IN_FLOAT16)
    turns = (False, True) if dtype == torch.float32 else (True, False)
    for size, is_causal in zip(sorted({most, 30, 300}), itertools.cycle(turns)):
        if half and size > OUTPUTS_IN_FLOAT16.get(name, size):
            continue
        for backend in layer.core.backends:
            if backend in GPU_BACKENDS:
                continue
            layer.backend = backend
            rng = RandomKey(1, 2)
            leaf = (size * noise).to(dtype).requires_grad_()
            layer.zero_grad()
            try:
                out = layer(leaf, key_mask=REAL, is_causal=is_causal, rng=rng)
            except NotImplementedError:
                continue
            where = (backend, size, is_causal)
            assert out.isfinite().all(), where
            if half and size > most:
                continue
            out.float().sum().backward()
            grads = [p.grad for p in (leaf, *layer.parameters()) if p.grad is not None]
            assert len(grads) > 4, where
            assert all(bool(g.isfinite().all()) for g in grads), where


# ------------------------------------------------------------------------------- sizes of zero
EMPTY = {"samples": (0, 5, 4), "queries": (2, 0, 4), "keys": (2, 5, 0), "both": (2, 0, 0)}


@pytest.mark.parametrize(
    ("name", "empty"),
    mostly_slow(itertools.product(LAYERS, EMPTY), in_turn(LAYERS, list(EMPTY))),
)
def test_zero_sizes_give_zeros_and_finite_gradients(name, empty):
    batch, num_queries, num_keys = EMPTY[empty]
    layer = LAYERS[name](bias=False).double()
    for backend, is_causal in itertools.product(cpu_backends(layer), (False, True)):
        layer.backend = backend
        layer.zero_grad()
        x = torch.randn(batch, num_queries, VARIANT_EMBED, dtype=torch.float64, requires_grad=True)
        keys = torch.randn(batch, num_keys, VARIANT_EMBED, dtype=torch.float64, requires_grad=True)
        try:
            out = layer(x, keys, is_causal=is_causal, rng=RandomKey(3))
        except NotImplementedError:
            assert backend != "reference"
            continue
        assert out.shape == x.shape
        assert not out.any()
        out.sum().backward()
        named = {n: p.grad for n, p in layer.named_parameters()}
        assert all(grad is None or bool(grad.isfinite().all()) for grad in named.values())
        if num_keys:  # as in other batches, so that ranks agree on the parameters with gradients
            assert named["key_proj.weight"] is not None
            assert named["query_proj.weight"] is not None
            assert keys.grad is not None


@pytest.mark.parametrize("name", ["softmax", "mgk", "linear"])
def test_a_memory_of_no_keys_gives_zeros(name):
    layer = LAYERS[name](bias=False).double().eval()
    x = torch.randn(2, 5, VARIANT_EMBED, dtype=torch.float64)
    out = layer(x, memory=layer.remember(x[:, :0]))
    assert out.shape == x.shape
    assert not out.any()


@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_of_no_samples_decodes(name):
    layer = LAYERS[name]().double().eval()
    cache, x = layer.new_cache(), torch.randn(0, 5, VARIANT_EMBED, dtype=torch.float64)
    with torch.no_grad():
        parts = [layer(part, cache=cache, is_causal=True) for part in (x[:, :3], x[:, 3:])]
    assert [part.shape[:2] for part in parts] == [(0, 3), (0, 2)]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "blockwise", "native"])
def test_a_vector_common_to_queries_and_keys_costs_no_digits(shifted, backend):
    """Distances do not contain it; their expansion into norms and products does."""
    torch.manual_seed(0)
    layer = MGKAttention(EMBED, HEADS, head_dim=HEAD, shifted_keys=shifted, backend="reference")
    if backend not in cpu_backends(layer):
        pytest.skip(f"no {backend} here")
    x = torch.randn(1, 70, EMBED, dtype=torch.float64)
    with torch.no_grad():
        for projection in (layer.query_proj, layer.key_proj):
            projection.bias.fill_(100.0)
        expected = layer.double()(x)
        layer.float().backend = backend
        torch.testing.assert_close(layer(x.float()).double(), expected, rtol=0, atol=1e-5)
