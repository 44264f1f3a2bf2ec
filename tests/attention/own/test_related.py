"""Variants of other papers against loops over their sums, in float64."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from torch.func import functional_call

from lit_probattn.attention import (
    DCMHAttention,
    DifferentialAttention,
    EllipticalAttention,
    FiSHAttention,
    GatedAttention,
    ParallaxAttention,
    SoftmaxAttention,
    TalkingHeadsAttention,
)
from lit_probattn.attention.own.contract import CHECKS, small_blocks
from lit_probattn.randomness import RandomKey
from tests.attention.variants import keep_in_blocks

B, N, C, H, E = 3, 7, 11, 3, 5
CLASSES = [
    TalkingHeadsAttention,
    DCMHAttention,
    GatedAttention,
    DifferentialAttention,
    ParallaxAttention,
    EllipticalAttention,
]
EVERY = pytest.mark.parametrize("cls", CLASSES)
KEY = RandomKey(5, step=3, sample_ids=torch.tensor([19, 4, 7]))


def moved(cls, *args, **options):
    """Return a layer none of whose parameters is where it starts."""
    layer = cls(*args, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def heads_of(projection, x, count):
    """Return (count, N, size) of one sample."""
    return projection(x).unflatten(-1, (count, -1)).transpose(0, 1)


def softmax_of(scores, seen):
    """Return the softmax over the keys that are seen, a list with zeros elsewhere."""
    total = sum(scores[j].exp() for j in seen)
    return [scores[j].exp() / total if j in seen else 0.0 * s for j, s in enumerate(scores)]


def weights_of(layer, x, i, seen):
    """Return the weights of query i of a sample by the sums of the papers: [head][key]."""
    kind = type(layer)
    maps = 2 * H if kind is DifferentialAttention else H
    q, k = heads_of(layer.query_proj, x, maps), heads_of(layer.key_proj, x, H)
    group = maps // H

    def dots(h, metric=None):
        query = q[h, i] if metric is None else q[h, i] * metric
        return [(query * k[h // group, j]).sum() / E**0.5 for j in range(N)]

    if kind is EllipticalAttention:
        return [softmax_of(dots(h, layer.log_metric[h, 0].exp()), seen) for h in range(H)]
    scores = [dots(h) for h in range(maps)]
    if kind is TalkingHeadsAttention:
        return mixed(layer.after, each(mixed(layer.before, scores), seen))
    if kind is DCMHAttention:
        compose = partial(composed, layer, q, k, i)
        return compose(1, each(compose(0, scores), seen))
    weights = each(scores, seen)
    if kind is not ParallaxAttention:
        return weights
    probes, found = heads_of(layer.probe_proj, x, H), []
    for h, row in enumerate(weights):
        mean = sum(row[j] * k[h, j] for j in range(N))
        slopes = [(probes[h, i] * (k[h, j] - mean)).sum() for j in range(N)]
        found.append([w * (1 - slope) for w, slope in zip(row, slopes, strict=True)])
    return found


def each(scores, seen):
    return [softmax_of(row, seen) for row in scores]


def mixed(matrix, maps):
    return [
        [sum(m[o, h] * maps[h][j] for h in range(H)) for j in range(N)] for o, m in over(matrix)
    ]


def over(matrix):
    return [(o, matrix) for o in range(H)]


def composed(layer, q, k, i, step, maps):
    """DCMHA's composition of the maps of query i."""
    of_query, of_key = layer.maps[step]
    row = (q[:, i].flatten() @ of_query).view(3, H)
    found = mixed(layer.base[step], maps)
    for j in range(N):
        col = (k[:, j].flatten() @ of_key).view(3, H)
        for into, out, gate in (row, col):
            read = sum(into[h] * maps[h][j] for h in range(H))
            for o in range(H):
                found[o][j] = found[o][j] + out[o] * read + gate[o].tanh() * maps[o][j]
    return found


def by_loops(layer, x, key_mask):
    """Return the output of causal self-attention."""
    samples = []
    for b in range(B):
        v, rows = heads_of(layer.value_proj, x[b], H), []
        for i in range(N):
            seen = [j for j in range(i + 1) if key_mask[b, j]]
            if not seen:
                rows.append(x.new_zeros(H * E))
                continue
            weights = weights_of(layer, x[b], i, seen)
            group = len(weights) // H
            heads = [
                sum(row[j] * v[h // group, j] for j in range(N)) for h, row in enumerate(weights)
            ]
            if isinstance(layer, DifferentialAttention):
                share = layer.lambda_proj(x[b, i]).sigmoid()
                heads = [heads[2 * h] - share[h] * heads[2 * h + 1] for h in range(H)]
            joined = torch.cat(heads)
            if isinstance(layer, GatedAttention):
                joined = joined * layer.gate_proj(x[b, i]).sigmoid()
            rows.append(joined)
        samples.append(layer.out_proj(torch.stack(rows)))
    return torch.stack(samples)


@EVERY
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_output_and_gradients_are_those_of_the_sums(cls, backend):
    layer = moved(cls, C, H, head_dim=E, backend=backend).double()
    x = torch.randn(B, N, C, dtype=torch.float64)
    mask = torch.rand(B, N) < 0.7
    mask[1], mask[2, :3] = False, False
    cotangent, found = torch.randn_like(x), []
    for run in (
        partial(layer, is_causal=True, key_mask=mask),
        partial(by_loops, layer, key_mask=mask),
    ):
        leaf = x.clone().requires_grad_()
        with small_blocks():
            out = run(leaf)
            wanted = [leaf, *layer.parameters()]
            found.append([out, *torch.autograd.grad((out * cotangent).sum(), wanted)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@EVERY
def test_blocks_recompute_with_the_parameters_of_a_functional_call(cls):
    """A backward pass after `torch.func.functional_call` finds the module's own parameters back."""
    layer = moved(cls, C, H, head_dim=E).double()
    given = {name: p.detach() + 0.3 for name, p in layer.named_parameters()}
    x, found = torch.randn(B, N, C, dtype=torch.float64), []
    for layer.backend in ("reference", "blockwise"):
        leaves = {"x": x, **given}
        leaves = {name: p.clone().requires_grad_() for name, p in leaves.items()}
        leaf, *wanted = leaves.values()
        with small_blocks():
            out = functional_call(layer, dict(zip(given, wanted, strict=True)), leaf)
            grads = torch.autograd.grad(out.square().sum(), [leaf, *wanted])
        found.append([out, *grads])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-11)


# Checks of what depends on the values of parameters; `test_contract.py` has all of them at a start.
OF_VALUES = ["causality", "padding", "masks of pairs", "masks of heads", "gradients", "backends"]
OF_VALUES += ["cross-attention", "cache", "documents"]
# Each document is a separate call if hooks read the input or there are two softmaxes.
WITHOUT_DOCUMENTS = {cls for cls in CLASSES if cls not in (GatedAttention, DifferentialAttention)}


@pytest.mark.parametrize(
    ("cls", "check"),
    [
        pytest.param(cls, check, marks=[pytest.mark.slow] * is_slow)
        for cls, check in itertools.product(CLASSES, CHECKS)
        for is_slow in [
            check not in OF_VALUES or (check == "documents" and cls in WITHOUT_DOCUMENTS)
        ]
    ],
)
def test_moved_layers_keep_every_promise(cls, check):
    given = {"head_dim": E} if check != "arguments" else {}
    if check == "arguments":  # of the class itself
        CHECKS[check].run(partial(cls, C, 4, head_dim=E))
        return
    keep_in_blocks(check, partial(moved, cls, C, 4, **given))


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_finite_where_scores_are_large_and_rows_are_empty(cls, dtype):
    layer = cls(C, H, head_dim=E, dropout=0.3).to(dtype)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1] = False
    x = (20 * torch.randn(B, N, C)).to(dtype).requires_grad_()
    out = layer(x, key_mask=mask, rng=KEY)
    out.float().square().mean().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    assert not x.grad[1].any()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


@EVERY
def test_packed_documents_and_grouped_keys_and_rotary(cls):
    layer = moved(cls, C, 4, head_dim=6, num_kv_heads=2, rotary_dim=4).double()
    x = torch.randn(1, N, C, dtype=torch.float64)
    whole = layer(x, is_causal=True, cu_seqlens=torch.tensor([0, 3, 3, N]))
    alone = torch.cat([layer(x[:, :3], is_causal=True), layer(x[:, 3:], is_causal=True)], 1)
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-12)
    assert layer(x).shape == x.shape


@EVERY
def test_blocks_keep_no_map(cls):
    layer, kept = cls(C, 4, head_dim=E, backend="blockwise"), []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, id)
    with small_blocks(), keep:
        layer(torch.randn(2, 97, C))
    assert max(kept) < 97 * 97


# ---- limits -----------------------------------------------------------------------------------


def test_talking_before_the_softmax_is_fish_with_a_global_head_for_every_head():
    """Output and every gradient, on FiSH's engines."""
    talking = moved(TalkingHeadsAttention, C, H, head_dim=E, backend="reference").double()
    with torch.no_grad():
        talking.after.copy_(torch.eye(H))
    options = {"num_global_heads": H, "mixer": "linear", "noise": "none"}
    fish = FiSHAttention(C, H, head_dim=E, **options).double()
    names = {"core.mixing.weights.0": "before"}
    own, state = talking.state_dict(), {}
    for name, value in fish.state_dict().items():
        state[name] = own[names.get(name, name)].view_as(value)
    fish.load_state_dict(state)
    x, mask = torch.randn(B, N, C, dtype=torch.float64), torch.rand(B, N) < 0.7
    cotangent = torch.randn_like(x)

    def results(layer):
        leaf = x.clone().requires_grad_()
        out = layer(leaf, is_causal=True, key_mask=mask)
        named = dict(layer.named_parameters())
        named.pop("after", None)
        grads = torch.autograd.grad((out * cotangent).sum(), [leaf, *named.values()])
        renamed = [names.get(name, name) for name in named]
        return {"out": out, "x": grads[0], **dict(zip(renamed, grads[1:], strict=True))}

    expected = results(talking)
    for backend in fish.core.backends:
        if backend in ("triton", "flex"):
            continue
        fish.backend = backend
        found = results(fish)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(
                value.flatten(),
                expected[name].flatten(),
                rtol=0,
                atol=1e-12,
                msg=f"{backend}: {name}",
            )


def limit(layer):
    """Set a layer's own parameters so that it is softmax attention."""
    with torch.no_grad():
        if isinstance(layer, DCMHAttention):
            layer.maps.zero_()
        if isinstance(layer, ParallaxAttention):
            layer.probe_proj.weight.zero_()
        if isinstance(layer, GatedAttention):
            layer.gate_proj.weight.zero_()
            layer.gate_proj.bias.fill_(40.0)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not DifferentialAttention])
def test_each_is_softmax_attention_in_a_limit(cls):
    layer, plain = (kind(C, H, head_dim=E).double() for kind in (cls, SoftmaxAttention))
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = torch.randn(B, N, C, dtype=torch.float64)
    limit(layer)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=1e-12)


def test_the_difference_of_equal_maps_is_a_share_of_softmax_attention():
    layer, plain = (
        kind(C, H, head_dim=E, bias=False).double()
        for kind in (DifferentialAttention, SoftmaxAttention)
    )
    with torch.no_grad():
        twice = plain.query_proj.weight.unflatten(0, (H, E)).repeat_interleave(2, 0).flatten(0, 1)
        layer.query_proj.weight.copy_(twice)
        layer.lambda_proj.weight.zero_()
        for name in ("key_proj", "value_proj", "out_proj"):
            getattr(layer, name).load_state_dict(getattr(plain, name).state_dict())
    x = torch.randn(B, N, C, dtype=torch.float64)
    torch.testing.assert_close(layer(x), 0.5 * plain(x), rtol=0, atol=1e-12)
