"""Variants of every kind in Llama: trained, written with, saved and loaded; and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import lit_probattn
from lit_probattn.attention import Attention, MGKAttention
from lit_probattn.base import allowed_code
from lit_probattn.interop.swap.settings import Settings
from tests.attention.own.alibi import ALiBiMGKAttention
from tests.interop.swap.table import GROUPED, host_of
from tests.support.slow import mostly_slow

T = pytest.importorskip("transformers", reason="transformers is not installed")


class Cosine(Attention):
    """A variant of a user: ten times the cosine of query and key."""

    def reference_scores(self, query, key):
        unit = (nn.functional.normalize(x, dim=-1) for x in (query, key))
        return 10.0 * next(unit) @ next(unit).mT


class Gated(MGKAttention):
    """MGK whose outputs pass a gate of the query's token."""

    def build(self, options):
        super().build(options)
        self.gate_proj = nn.Linear(self.embed_dim, self.layout.out * self.value_head_dim)

    def gate(self, out, x):
        return out * self.gate_proj(x).sigmoid().unflatten(-1, (out.shape[1], -1)).transpose(1, 2)


FILE = """
model:
  init_args:
    attention:
      class_path: {}
      init_args: {{num_heads: 4}}
"""
VARIANTS = {
    "a class": (Cosine, {}),
    "a file": (f"{__name__}.Cosine.yaml", {}),
    "MGK, half the heads": ("mgk", {"heads": 0.5}),
    "ALiBi-MGK, half the heads": (ALiBiMGKAttention, {"heads": 0.5, "score": "dot"}),
    "gated sMGK": (Gated, {"shifted_keys": True, "num_components": 2}),
    "FiSH, G = H": ("fish", {"noise": "none"}),
    "GFiSH, G = H": ("gfish", {"noise": "none"}),
}


# FiSH is GFiSH without hidden units.
@pytest.fixture(
    scope="module", params=mostly_slow(VARIANTS, [v for v in VARIANTS if v != "FiSH, G = H"])
)
def made(request, tmp_path_factory):
    variant, options = VARIANTS[request.param]
    if request.param == "a file":
        path = tmp_path_factory.mktemp("variant") / "cosine.yaml"
        path.write_text(FILE.format(f"{__name__}.Cosine"))
        variant = str(path)
    host = host_of("Llama")
    model = copy.deepcopy(host.model)
    model, report = lit_probattn.swap(model, variant, example=host.example, **options)
    return host, model, report


@pytest.fixture
def swapped(made):
    host, model, report = made
    return host, copy.deepcopy(model), report


def test_steps_of_training_and_writing(swapped):
    host, model, _ = swapped
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = host.example["input_ids"]
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = model.train()(**host.example, labels=ids).loss
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    still = [n for n, p in model.named_parameters() if torch.equal(p, before[n])]
    assert still == []
    model.eval()
    lengths = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(host.prompt, use_cache=False, **lengths)
    for kind in ("dynamic", "static"):
        found = model.generate(host.prompt, cache_implementation=kind, **lengths)
        assert torch.equal(found, plain), kind


@pytest.mark.parametrize(
    "made", mostly_slow(VARIANTS, ["a class", "gated sMGK", "GFiSH, G = H"]), indirect=True
)
def test_a_pretrained_folder_and_its_recipe_need_no_example(swapped, tmp_path):
    host, model, report = swapped
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    host.model.save_pretrained(tmp_path / "host")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    recipe = json.loads(json.dumps(report.recipe))
    fresh = T.LlamaForCausalLM.from_pretrained(tmp_path / "host")
    fresh, _ = lit_probattn.swap(fresh, recipe)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    expected = host.output(model)
    assert torch.equal(host.output(fresh.eval()), expected)
    assert torch.equal(host.output(copy.deepcopy(model)), expected)


def test_whole_layers_can_be_checkpointed(swapped):
    host, model, _ = swapped
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        out = model(**host.example, use_cache=False).logits
        out.square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------------- what is refused
def test_a_frozen_layer_gets_a_frozen_core_and_tied_embeddings_stay_tied():
    model = T.LlamaForCausalLM(T.LlamaConfig(tie_word_embeddings=True, **GROUPED))
    model.model.layers[0].requires_grad_(False)
    lit_probattn.swap(model, "mgk", heads=0.5)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for index, layer in enumerate(model.model.layers):
        assert {p.requires_grad for p in layer.self_attn.parameters()} == {index == 1}


def test_a_variant_that_reads_tokens_is_refused_where_there_are_none():
    host = host_of("by hand, windows")
    with pytest.raises(ValueError, match="gate, which read the input of its layer"):
        lit_probattn.swap(host.model, Gated, example=host.example, shifted_keys=True)


def test_the_import_of_a_variant_does_not_change_the_start_of_its_layer(tmp_path, monkeypatch):
    """The first layer is drawn from the seed as the second, when the module is loaded already."""
    code = """
import torch
from lit_probattn.attention import SoftmaxAttention

DRAWN = torch.rand(3)


class Own(SoftmaxAttention):
    pass
"""
    (tmp_path / "draws_at_import.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(allowed_code.VARIABLE, "draws_at_import")
    settings = Settings("draws_at_import.Own")
    first, second = (settings.make_layer(12, 2) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
