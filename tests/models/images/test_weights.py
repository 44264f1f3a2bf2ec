"""Weights of replaced layers: copied from timm's layers, or loaded from its state dicts."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.models.images import load_timm_state_dict, replace_attention
from tests.models.images.made import hard_fish, hard_gfish, pictures, swin, vit


@pytest.mark.parametrize("mixer", ["linear", "mlp"])
@pytest.mark.parametrize("make", [swin, vit])
def test_copy_of_all_heads_is_timm(make, mixer):
    """As many global heads as local ones, each copied: the same function."""
    theirs = make()
    ours = copy.deepcopy(theirs)
    wide = {"mixer_ratios": [0.5]} if mixer == "mlp" else {}
    replace_attention(
        ours, lambda *a, **k: hard_fish(*a, mixer=mixer, **wide, **k), init="copy", head_ratio=1.0
    )
    torch.testing.assert_close(ours(pictures()), theirs(pictures()), rtol=0, atol=1e-4)


def test_copy_takes_the_first_head_of_each_group():
    """Two of four heads: like timm with heads 0, 0, 2, 2 for queries and keys."""
    theirs = swin()
    ours = copy.deepcopy(theirs)
    replace_attention(ours, hard_fish, stages=[1], init="copy", head_ratio=2.0)
    for block in theirs.layers[1].blocks:
        for name in ("weight", "bias"):
            rows = getattr(block.attn.qkv, name).data.view(3, 4, 6, -1)
            rows[:2, 1], rows[:2, 3] = rows[:2, 0].clone(), rows[:2, 2].clone()
    torch.testing.assert_close(ours(pictures()), theirs(pictures()), rtol=0, atol=1e-4)


def test_timm_state_dict_loads_into_the_untouched_parts():
    state, model = swin(seed=1).state_dict(), swin(seed=2)
    replace_attention(model, hard_gfish, stages=[1], head_ratio=2.0)
    fresh = model.layers[1].blocks[0].attn.attention.query_proj.weight.clone()
    kept, own = load_timm_state_dict(model, state), model.state_dict()
    assert "layers.1.blocks.0.attn.attention.query_proj.weight" in kept
    loaded = own.keys() - {*kept}
    assert "layers.1.blocks.1.attn.relative_position_bias_table" in loaded
    assert all(torch.equal(own[name], state[name]) for name in loaded)
    assert torch.equal(model.layers[1].blocks[0].attn.attention.query_proj.weight, fresh)


@pytest.mark.parametrize("make", [swin, vit])
def test_timm_state_dict_fills_softmax_layers_too(make):
    theirs, ours = make(seed=1), make(seed=2)
    replace_attention(ours, SoftmaxAttention)
    assert load_timm_state_dict(ours, theirs.state_dict(), projections=True) == []
    torch.testing.assert_close(ours(pictures()), theirs(pictures()), rtol=0, atol=1e-4)


def test_projections_that_do_not_fit_are_refused_and_change_nothing():
    """Those of a layer with two keys per position, after those of one with one."""
    model = swin(seed=2)
    replace_attention(model, SoftmaxAttention, stages=[0])
    replace_attention(model, MGKAttention, stages=[1])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="one key per position"):
        load_timm_state_dict(model, swin(seed=1).state_dict(), projections=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        # As many rows of keys as the replaced layer: two keys of each of two heads.
        (partial(MGKAttention, num_kv_heads=2), "has 2 keys per position"),
        (partial(SoftmaxAttention, value_head_dim=3), "has value heads of size 3"),
    ],
)
def test_copy_of_other_heads_is_refused(attention, message):
    with pytest.raises(ValueError, match=message):
        replace_attention(swin(), attention, stages=[1], init="copy")


def test_state_dict_of_another_model_is_refused_and_changes_nothing():
    model = swin(seed=2)
    replace_attention(model, SoftmaxAttention)
    before = copy.deepcopy(model.state_dict())
    for other, message in (
        (vit(), r"missing: patch_embed\.norm\.weight.*unexpected: cls_token"),
        (
            swin(embed_dim=24),
            r"shape: patch_embed\.proj\.weight \(24, 3, 2, 2\) instead of \(12, 3, 2, 2\)",
        ),
        (swin(depths=(2, 4)), r"unexpected: layers\.1\.blocks\.2"),
    ):
        with pytest.raises(ValueError, match=message):
            load_timm_state_dict(model, other.state_dict(), projections=True)
    state = swin().state_dict()
    del state["layers.0.blocks.0.attn.qkv.weight"]
    with pytest.raises(ValueError, match=r"missing .*layers\.0\.blocks\.0\.attn\.qkv\.weight"):
        load_timm_state_dict(model, state, projections=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
