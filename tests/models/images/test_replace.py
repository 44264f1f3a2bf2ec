"""timm's Swin and ViT with our attention: equal where it must be, refused where it cannot work."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import timm
import torch

from lit_probattn.attention import Core, MGKAttention, SoftmaxAttention
from lit_probattn.models.images import ImageModel, replace_attention
from lit_probattn.models.images.layers import KeySlot
from lit_probattn.randomness import RandomKey
from tests.models.images.made import SWIN, VIT, hard_fish, hard_gfish, pictures, spread, swin, vit


def gradients(model, loss_of=lambda logits: logits.square().sum()):
    model.zero_grad()
    loss_of(model(pictures())).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", [swin, vit])
@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise"])
def test_softmax_through_the_replacement_is_timm(make, backend):
    """Logits and the gradients of all that both have; the windows of odd blocks are shifted."""
    theirs = make()
    ours = copy.deepcopy(theirs)
    names = replace_attention(
        ours, lambda *a, **k: SoftmaxAttention(*a, backend=backend, **k), init="copy"
    )
    assert len(names) == (4 if make is swin else 3)
    kinds = {core.auto_kind for core in ours.modules() if isinstance(core, Core)}
    assert kinds == ({"window"} if make is swin else {""})  # rows of the table of `auto`
    torch.testing.assert_close(ours(pictures()), theirs(pictures()), rtol=0, atol=1e-4)
    expected, found = gradients(theirs), gradients(ours)
    shared = expected.keys() & found.keys()
    assert any("relative_position_bias_table" in name for name in shared) == (make is swin)
    for name in shared:
        scale = expected[name].abs().max()
        torch.testing.assert_close(found[name] / scale, expected[name] / scale, rtol=0, atol=1e-4)


def test_inference_may_use_the_fused_reduction():
    theirs = swin()
    ours = copy.deepcopy(theirs)
    replace_attention(ours, lambda *a, **k: SoftmaxAttention(*a, backend="sdpa", **k), init="copy")
    with torch.no_grad():
        torch.testing.assert_close(ours(pictures()), theirs(pictures()), rtol=0, atol=1e-4)
    with pytest.raises(NotImplementedError, match="gradient to the additive bias"):
        ours(pictures())


def test_only_the_chosen_stages_and_blocks_change():
    model = swin()
    before = {name for name in model.state_dict() if "attn" not in name}
    assert replace_attention(model, SoftmaxAttention, stages=[1]) == [
        "layers.1.blocks.0",
        "layers.1.blocks.1",
    ]
    assert type(model.layers[0].blocks[0].attn).__module__.startswith("timm")
    assert before <= set(model.state_dict())
    assert replace_attention(model, SoftmaxAttention, blocks=[1]) == ["layers.0.blocks.1"]
    slots = {id(layer.attn.slot) for layer in (*model.layers[1].blocks, model.layers[0].blocks[1])}
    assert len(slots) == 1
    assert replace_attention(vit(), SoftmaxAttention, blocks=[2, 0]) == ["blocks.0", "blocks.2"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stages": [0, 1], "global_heads": [1, 3]}, [1, 1, 3, 3]),
        ({"stages": [1, 0], "global_heads": [3, 1]}, [1, 1, 3, 3]),
        ({"global_heads": 2}, [2, 2, 2, 2]),
        ({"head_ratio": 2.0}, [1, 1, 2, 2]),
        ({"blocks": [0, 3], "head_ratio": 4.0}, [1, 1]),
    ],
)
def test_global_heads_per_stage_or_as_a_ratio(options, expected):
    model = swin()
    names = replace_attention(model, hard_fish, **options)
    layers = [model.get_submodule(f"{name}.attn.attention") for name in names]
    assert [layer.num_global_heads for layer in layers] == expected
    assert [layer.head_dim for layer in layers] == [6] * len(layers)
    assert model(pictures()).shape == (3, 7)


def test_each_local_head_has_its_own_position_bias():
    """A constant per local head changes nothing, as softmax cancels it only after the mixing."""
    model = swin()
    replace_attention(model, hard_gfish, head_ratio=2.0)
    layer = model.layers[1].blocks[1].attn
    assert layer.relative_position_bias_table.shape == (49, 4)
    assert layer.attention.num_global_heads == 2
    base = model(pictures())
    with torch.no_grad():
        layer.relative_position_bias_table += torch.tensor([1.0, -2.0, 3.0, 0.5])
    torch.testing.assert_close(model(pictures()), base, rtol=1e-4, atol=1e-4)
    grad = gradients(model)["layers.1.blocks.1.attn.relative_position_bias_table"]
    assert (grad.abs().sum(0) > 0).all()


def test_a_shifted_window_sees_its_own_region_only():
    """A pixel far away on the other side of the picture's edge has no influence."""
    model = swin(depths=(2,), num_heads=(2,))
    replace_attention(model, SoftmaxAttention, init="copy")
    block = model.layers[0].blocks[1]
    x = torch.randn(1, 16, 16, 12, requires_grad=True)
    block(x)[0, 0, 0].sum().backward()
    seen = x.grad[0].abs().sum(-1) > 0
    expected = torch.zeros(16, 16, dtype=torch.bool)
    expected[:2, :2] = True
    assert torch.equal(seen, expected)


@pytest.mark.parametrize(
    ("name", "sizes"), [("swin_tiny_patch4_window7_224", SWIN), ("vit_tiny_patch16_224", VIT)]
)
def test_any_variant_runs_and_draws_by_sample(name, sizes):
    """Dropout of a picture's windows depends on its id, not on its place in the batch."""
    model = ImageModel(
        lambda *a, **k: MGKAttention(*a, dropout=0.5, **k),
        model_name=name,
        num_classes=7,
        image_size=32,
        model_options=sizes,
    )
    spread(model).train()
    x, ids = pictures(4), torch.tensor([11, 12, 13, 14])
    out = model(x, rng=RandomKey(1, 2, ids))
    turned = model(x.flip(0), rng=RandomKey(1, 2, ids.flip(0))).flip(0)
    torch.testing.assert_close(turned, out, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(x, rng=RandomKey(1, 3, ids)), out, atol=1e-2)
    assert not torch.allclose(model(x, rng=RandomKey(1, 2, ids + 100)), out, atol=1e-2)
    # Pictures that differ in nothing but their ids, neighbours too, draw for themselves.
    alike = model(x[:1].expand(4, -1, -1, -1), rng=RandomKey(1, 2, ids))
    assert (alike[1:] - alike[:-1]).abs().amax(-1).min() > 1e-2


def test_every_window_of_every_picture_has_its_own_draw():
    slot = KeySlot()
    slot.key = RandomKey(1, 2, torch.tensor([11, 12, 13]))
    found, expected = slot.of_layer(3, 12), slot.key.fold(3)
    assert replace(found, sample_ids=None) == replace(expected, sample_ids=None)
    ids = found.sample_ids
    assert ids.shape == (12,)
    assert len(set(ids.tolist())) == 12
    slot.key = RandomKey(1, 2, torch.tensor([12]))
    assert torch.equal(slot.of_layer(3, 4).sample_ids, ids[4:8])  # whatever the batch


@pytest.mark.parametrize("is_copy", [False, True])
def test_recomputation_in_backward_sees_the_same_draw(is_copy):
    """Each of two forward passes its own; also in a copy, such as a moving average."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = ImageModel(
            lambda *a, **k: SoftmaxAttention(*a, dropout=0.5, **k),
            model_name="swin_tiny_patch4_window7_224",
            num_classes=7,
            image_size=32,
            model_options=SWIN,
            activation_checkpointing=recompute,
        )
        spread(model).train()
        model = copy.deepcopy(model) if is_copy else model
        ids = torch.arange(3)
        logits = [model(pictures(), rng=RandomKey(1, step, ids)) for step in (2, 3)]
        torch.stack(logits).square().sum().backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad)


def test_windows_that_do_not_divide_the_picture():
    """Refused; or, if asked for, padded as timm does."""
    model = swin(window_size=5)
    with pytest.raises(ValueError, match=r"layers\.0\.blocks\.0: windows of 5x5 .* 16x16"):
        replace_attention(model, SoftmaxAttention)
    theirs = copy.deepcopy(model)
    replace_attention(model, SoftmaxAttention, init="copy", allow_padding=True)
    torch.testing.assert_close(model(pictures()), theirs(pictures()), rtol=0, atol=1e-4)


def test_another_picture_size_moves_the_windows_like_timm():
    theirs = swin()
    ours = copy.deepcopy(theirs)
    replace_attention(ours, SoftmaxAttention, init="copy")
    x = torch.randn(2, 3, 64, 64)
    for model in (ours, theirs):
        model.set_input_size((64, 64), window_size=8)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (swin, {"stages": [2]}, r"stages must be distinct numbers from 0 to 1, received \[2\]"),
        (swin, {"stages": [1, 1]}, r"stages must be .*0 to 1, received \[1, 1\]"),
        (swin, {"blocks": [-1]}, "blocks must be distinct numbers from 0 to 3"),
        (swin, {"stages": [0], "blocks": [0]}, "stages and blocks are mutually exclusive"),
        (vit, {"stages": [0]}, "a ViT has none"),
        (swin, {"stages": [0, 1], "global_heads": [1]}, r"one number for each of stages=\[0, 1\]"),
        (
            swin,
            {"global_heads": 1, "head_ratio": 2.0},
            r"global_heads and head_ratio .*received 1 and 2\.0",
        ),
        (swin, {"global_heads": 3}, "num_global_heads must be at most num_heads=2"),
    ],
)
def test_wrong_choices_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        replace_attention(make(), hard_fish, **options)


@pytest.mark.parametrize("init", ["fresh", "copy"])
def test_a_refused_replacement_leaves_the_model_as_it_was(init):
    """The second stage has 4 heads; layers of the first one could be replaced."""
    model = swin()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="num_global_heads"):
        replace_attention(model, hard_fish, stages=[0, 1], global_heads=[2, 5], init=init)
    assert [type(module) for module in model.modules()] == before


def test_what_cannot_be_replaced_is_named():
    with pytest.raises(ValueError, match="has no global heads"):
        replace_attention(swin(), SoftmaxAttention, head_ratio=2.0)
    with pytest.raises(NotImplementedError, match=r"blocks\.0: q_norm inside attention"):
        replace_attention(vit(qk_norm=True), SoftmaxAttention)
    with pytest.raises(NotImplementedError, match="cannot replace the attention of ResNet"):
        replace_attention(timm.create_model("resnet18"), SoftmaxAttention)
    model = swin()
    replace_attention(model, SoftmaxAttention)
    with pytest.raises(NotImplementedError, match="replaced already"):
        replace_attention(model, SoftmaxAttention)


def test_picture_of_another_size_is_refused():
    model = ImageModel(
        SoftmaxAttention,
        model_name="swin_tiny_patch4_window7_224",
        num_classes=7,
        image_size=32,
        model_options=SWIN,
    )
    with pytest.raises(ValueError, match=r"images \(B, 3, 32, 32\), received \(2, 3, 16, 32\)"):
        model(torch.zeros(2, 3, 16, 32))
    with pytest.raises(ValueError, match="no model 'swin_tinny'; similar: swin_tiny"):
        ImageModel(SoftmaxAttention, model_name="swin_tinny", num_classes=3)


@pytest.mark.parametrize(
    ("attention", "options", "expected"),
    [
        (None, {}, 28_288_354),
        (hard_gfish, {"head_ratio": 2.0}, 26_223_394),
        pytest.param(hard_gfish, {"global_heads": [6, 12]}, 26_223_394, marks=pytest.mark.slow),
        pytest.param(hard_fish, {"head_ratio": 2.0}, 26_221_138, marks=pytest.mark.slow),
    ],
)
def test_published_parameters_of_swin_t(attention, options, expected):
    with torch.device("meta"):
        model = timm.create_model("swin_tiny_patch4_window7_224")
        if attention is not None:
            replace_attention(model, attention, stages=[2, 3], **options)
    assert sum(p.numel() for p in model.parameters()) == expected
