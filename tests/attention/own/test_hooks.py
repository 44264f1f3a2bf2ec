"""Hooks beside `reference_scores`: what they receive, and what is refused in one line."""

from __future__ import annotations

import runpy
from functools import partial
from unittest import mock

import pytest
import torch

from lit_probattn import swap
from lit_probattn.attention import (
    Attention,
    GatedAttention,
    MGKAttention,
    SoftmaxAttention,
    backends,
)
from lit_probattn.attention.cost.own import with_gate
from lit_probattn.attention.own import contract
from lit_probattn.attention.own.contract import CHECKS, EMBED, HEAD
from lit_probattn.base.errors import ConfigError
from lit_probattn.convert.fish import convert_to_fish
from lit_probattn.convert.layer import Mixture, convert_layer
from lit_probattn.convert.layer_names import load_layer
from lit_probattn.convert.wider_heads import embed_into_head_size
from tests.attention.variants import keep_in_blocks
from tests.support.paths import ROOT
from tests.support.slow import taking_turns

B, N, H = 2, 13, 4


class Dots(Attention):
    def reference_scores(self, query, key):
        return query @ key.mT * query.shape[-1] ** -0.5


class Tempered(Dots):
    """Weights to a power that the query's token gives, and their mean over heads added."""

    mixes_heads = True

    def __init__(self, embed_dim, num_heads, **common):
        super().__init__(embed_dim, num_heads, **common)
        self.power = torch.nn.Linear(embed_dim, num_heads)

    def query_side(self, x):
        return self.power(x).exp().mT[..., None]

    def normalise(self, scores, query, key, side):
        return super().normalise(scores * side)

    def mix_weights(self, weights):
        return 0.5 * weights + 0.5 * weights.mean(1, keepdim=True)


class GatedMGK(MGKAttention):
    """Any variant takes a gate."""

    def build(self, options):
        super().build(options)
        self.gate_proj = torch.nn.Linear(self.embed_dim, self.num_heads)

    def gate(self, out, x):
        return out * self.gate_proj(x).sigmoid().mT[..., None]

    def cost(self, seq_len):
        return with_gate(super().cost(seq_len), self, seq_len)


class UncountedGate(GatedMGK):
    cost = MGKAttention.cost


class MixesInSecret(Dots):
    """Heads are mixed in a hook that says nothing of it."""

    def normalise(self, scores):
        return 0.5 * scores.softmax(-1) + 0.5 * scores.softmax(-1).mean(1, keepdim=True)


class OverQueries(Dots):
    """Weights depend on other queries: future ones, and those of other blocks."""

    def normalise(self, scores):
        weights = scores.softmax(-1)
        return 0.5 * weights + 0.5 * weights.mean(-2, keepdim=True)


class LowPrecision(Dots):
    """Its parameter is not cast to the dtype of the scores."""

    def __init__(self, embed_dim, num_heads, **common):
        super().__init__(embed_dim, num_heads, **common)
        self.after = torch.nn.Parameter(torch.eye(num_heads))

    def mix_weights(self, weights):
        return torch.einsum("oh,bhnl->bonl", self.after, weights)


def broken(cls, checks=CHECKS):
    """Return those of the checks that fail, of short sequences in training."""
    names = []
    for name in checks:
        torch.manual_seed(0)
        try:
            with mock.patch.object(contract, "WAYS", contract.WAYS[:1]), contract.small_blocks():
                CHECKS[name].run(partial(cls, EMBED, H, head_dim=HEAD))
        except (AssertionError, RuntimeError, ValueError):
            names.append(name)
    return names


@pytest.mark.parametrize(("cls", "check"), taking_turns([Tempered, GatedMGK], CHECKS))
def test_layers_with_hooks_keep_every_promise(cls, check):
    keep_in_blocks(check, partial(cls, EMBED, H, head_dim=HEAD))


@pytest.mark.parametrize(
    ("cls", "name"),
    [(UncountedGate, "cost"), (MixesInSecret, "masks of heads"), (LowPrecision, "precision")],
)
@pytest.mark.parametrize("checks", ["its own", pytest.param("all", marks=pytest.mark.slow)])
def test_the_contract_names_what_a_hook_breaks(cls, name, checks):
    assert broken(cls, CHECKS if checks == "all" else [name]) == [name]


class Blind(SoftmaxAttention):
    """With a mask of pairs, the key that the check changes is always the same."""

    def forward(self, query, key=None, *values, attn_mask=None, **options):
        if key is not None and attn_mask is not None:
            key = key.index_fill(1, torch.tensor([5]), 0.0)
        return super().forward(query, key, *values, attn_mask=attn_mask, **options)


def test_keys_that_a_mask_of_pairs_hides_too_much_are_found():
    with pytest.raises(AssertionError, match="a key that is not masked has no effect"):
        contract.hidden_pairs_change_nothing(partial(Blind, EMBED, H, head_dim=HEAD))


class Refuses(SoftmaxAttention):
    """No backend applies a mask of pairs; a named one has another error."""

    def forward(self, *args, **options):
        every = self.backend == "auto"
        raise NotImplementedError("cannot apply attn_mask" if every else "is not there")


def test_a_layer_that_refuses_masks_of_pairs_is_asked_with_every_backend():
    layer = Refuses(EMBED, H, head_dim=HEAD, backend="sdpa")
    contract.refuses_pairs(layer, torch.randn(B, N, EMBED), torch.ones(N, N, dtype=torch.bool))


def test_hooks_that_look_at_other_queries_are_found():
    names = ["causality", "padding", "backends", "cache"]
    assert broken(OverQueries, names) == names


@pytest.mark.parametrize("check", ["causality", "padding"])
@pytest.mark.parametrize(("training", "least"), [(True, 200), (False, 0)])
def test_faults_of_long_sequences_in_training_and_of_evaluation_are_found(check, training, least):
    class Leaks(Dots):
        def normalise(self, scores):
            weights = scores.softmax(-1)
            if self.training != training or scores.shape[-1] < least:
                return weights
            return 0.5 * weights + 0.5 * weights.mean(-2, keepdim=True)

    with pytest.raises(AssertionError):
        keep_in_blocks(check, partial(Leaks, EMBED, H, head_dim=HEAD))


@pytest.mark.parametrize("check", ["causality", "padding", "bias", "gradients", "documents"])
def test_a_check_without_a_supporting_backend_fails(check, monkeypatch):
    monkeypatch.setattr(contract, "cpu_backends", lambda layer: [])
    with pytest.raises(AssertionError, match="no CPU backend supports"):
        CHECKS[check].run(partial(Dots, EMBED, H, head_dim=HEAD))


@pytest.mark.parametrize(
    "check",
    [
        *("causality", "padding", "masks of pairs", "masks of heads", "bias", "rows without keys"),
        *("gradients", "backends", "cross-attention", "dropout", "documents"),
    ],
)
def test_a_check_runs_every_backend(check, monkeypatch):
    """A fault of one backend is not hidden by another, which `auto` selects."""
    ran, choose = set(), backends.choose

    def recorded(*call):
        ran.add(choose(*call))
        return choose(*call)

    monkeypatch.setattr(backends, "choose", recorded)
    monkeypatch.setattr(contract, "WAYS", contract.WAYS[:1])
    CHECKS[check].run(partial(Dots, EMBED, H, head_dim=HEAD))
    assert ran == {"reference", "blockwise"}


# ---- examples ----------------------------------------------------------------------------------


def of_example(name):
    return runpy.run_path(str(ROOT / "examples/studies/after_the_scores.py"))[name]


@pytest.mark.parametrize(("name", "check"), taking_turns(["MultiToken", "Interleaved"], CHECKS))
def test_examples_keep_every_promise(name, check):
    keep_in_blocks(check, partial(of_example(name), EMBED, H, head_dim=HEAD))


def test_multi_token_attention_is_its_sum():
    layer = of_example("MultiToken")(EMBED, H, head_dim=HEAD).double()
    x = torch.randn(B, N, EMBED, dtype=torch.float64)
    q, k = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (layer.query_proj, layer.key_proj))
    scores, kernel = q @ k.mT / HEAD**0.5, layer.kernel[:, :, 0]
    mixed = torch.full_like(scores, -torch.inf)
    for i in range(N):
        for j in range(i + 1):
            near = [(t, j + t - 1) for t in range(3) if 0 <= j + t - 1 <= i]
            mixed[:, :, i, j] = sum(scores[:, :, i, at] @ kernel[:, :, t].T for t, at in near)
    maps = layer.weights(x, is_causal=True)
    torch.testing.assert_close(maps, mixed.softmax(-1), rtol=0, atol=1e-12)


def test_interleaved_heads_are_their_sum():
    pseudo = 2
    layer = of_example("Interleaved")(EMBED, H, head_dim=HEAD, num_pseudo=pseudo).double()
    with torch.no_grad():
        layer.collapse.normal_()
    x = torch.randn(B, N, EMBED, dtype=torch.float64)
    q, k = (p(x).unflatten(-1, (H, -1)) for p in (layer.query_proj, layer.key_proj))
    v = layer.value_proj(x).unflatten(-1, (H, pseudo, -1))
    heads = []
    for h in range(H):
        found = 0
        for a in range(pseudo):
            query = torch.einsum("m,bnme->bne", layer.of_query[h * pseudo + a], q)
            keys = [
                torch.einsum("m,bnme->bne", layer.of_key[h * pseudo + b], k) for b in range(pseudo)
            ]
            scores = query @ torch.cat(keys, 1).mT / HEAD**0.5
            values = torch.cat([v[:, :, h, b] for b in range(pseudo)], 1)
            found = found + layer.collapse[h, a, 0, 0] * (scores.softmax(-1) @ values)
        heads.append(found)
    expected = layer.out_proj(torch.cat(heads, -1))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


# ---- refusals ----------------------------------------------------------------------------------


class MixesBesideACore(SoftmaxAttention):
    def mix_weights(self, weights):
        return weights.flip(1)


class OtherShape(Dots):
    def normalise(self, scores):
        return scores.softmax(-1)[..., :-1]


class FewerHeads(Dots):
    def mix_weights(self, weights):
        return weights[:, :2]


def test_hooks_of_weights_beside_a_core_are_refused():
    with pytest.raises(TypeError, match="defines mix_weights and a core"):
        MixesBesideACore(EMBED, H, head_dim=HEAD)


@pytest.mark.parametrize(("cls", "hook"), [(OtherShape, "normalise"), (FewerHeads, "mix_weights")])
def test_other_shapes_are_refused(cls, hook):
    with pytest.raises(ValueError, match=rf"{hook} returned shape .*, expected .* = \(2, 4, 13"):
        cls(EMBED, H, head_dim=HEAD)(torch.randn(B, N, EMBED))


def test_masks_per_head_are_refused_where_heads_are_mixed():
    layer, pairs = Tempered(EMBED, H, head_dim=HEAD), torch.ones(H, N, N, dtype=torch.bool)
    with pytest.raises(ValueError, match="Tempered mixes heads after masking"):
        layer(torch.randn(B, N, EMBED), attn_mask=pairs)
    assert layer(torch.randn(B, N, EMBED), attn_mask=pairs[:1]).shape == (B, N, EMBED)


@pytest.mark.parametrize("backend", ["sdpa", "native", "flex", "triton"])
def test_engines_without_hooks_are_refused(backend):
    layer = Tempered(EMBED, H, head_dim=HEAD)
    layer.backend = backend
    with pytest.raises(NotImplementedError, match=f"no backend '{backend}'; use one of: auto"):
        layer(torch.randn(B, N, EMBED))
    needs = layer.core.needs()
    assert needs == {"own scores": "reference_scores", "own weights": "normalise, mix_weights"}


def test_cores_of_hooks_that_read_the_input_are_refused_by_themselves_and_get_it_in_a_swap():
    layer = Tempered(EMBED, H, head_dim=HEAD)
    call = layer.call(torch.randn(B, N, EMBED))
    with pytest.raises(ValueError, match=r"Tempered reads the input of its layer"):
        layer.core(type(call)(call.query, call.key, call.value, call.masks))
    tokens = torch.randn(2, 5, 8)
    for variant in (GatedAttention, Tempered):
        model = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)
        model, report = swap(model, variant, example=tokens)
        assert len(report.swapped) == 1
        model(tokens).sum().backward()
        gradients = [p.grad for n, p in model.named_parameters() if "self_attn" in n]
        assert all(g is not None and g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(
    "convert",
    [
        lambda layer: convert_layer(layer, Mixture(num_components=2)),
        convert_to_fish,
        lambda layer: embed_into_head_size(layer, 7),
        lambda layer: load_layer("torch", {}, layer),
    ],
)
def test_conversions_refuse_gated_layers(convert):
    with pytest.raises(ConfigError, match="GatedAttention defines gate: only layers without hooks"):
        convert(GatedAttention(EMBED, H, head_dim=HEAD))
