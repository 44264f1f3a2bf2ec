"""Swapping in torch and timm: equal where it must be, host by host."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lit_probattn
from lit_probattn.interop.swap import cores
from lit_probattn.randomness import AttentionDropout, RandomKey
from tests.interop.swap.checks import (
    TIGHT,
    assert_same_model,
    assert_trains_in_one_graph,
    make_pairs_equal,
    swapped,
)
from tests.interop.swap.models import TIMM, TORCH, multihead, randomised, timm_model
from tests.support.helpers import double
from tests.support.slow import mostly_slow

CASES = [*TORCH, *TIMM]
EXACT = {
    "softmax": ("softmax", {}),
    "equal components": ("mgk", {"spread": 0.0}),
}


def case(name):
    torch.manual_seed(0)
    if name in TORCH:
        return TORCH[name]()
    model, call = timm_model(name)
    if "angles of each head" in name:
        try:
            call(model)
        except RuntimeError:  # "expected scalar type Double but found Float"
            pytest.skip("this timm turns by angles in float32 only")
    return model, call


# Where maps alone are computed no heads compare, and where a norm is over all heads no weight reads
# one of them alone.
UNMEASURED = (("softmax", "Swin 2"), ("equal components", "EVA02, a norm over heads"))


def written(name):
    """Options of a host that writes its softmax out."""
    return {"written_out": True} if name == "Swin 2" else {}


@pytest.mark.parametrize(
    ("how", "name"),
    mostly_slow(
        itertools.product(["softmax", "equal components"], CASES),
        [("softmax", CASES[0]), *(("equal components", n) for n in CASES)],
    ),
)
def test_the_model_stays_the_same_function(name, how):
    model, call = case(name)
    variant, options = EXACT[how]
    new, report = swapped(model, variant, example=call, **options, **written(name))
    assert all(layer.swapped for layer in report.layers)
    if (how, name) not in UNMEASURED:
        assert all(layer.error < 1e-12 for layer in report.layers)
    assert_same_model(model, new, call, report=report)


def test_hard_components_that_are_equal_too():
    model, call = case("encoder, padded and causal")
    new, report = swapped(model, "mgk", example=call, spread=0.0, e_step="hard")
    assert_same_model(model, new, call, report=report)


# Hosts in which heads cannot be joined, with a word of the reason.
FIXED = {
    "EVA02, a norm over heads": "a norm over all heads",
    "AttentionRope, angles of each head": "angles",
}
# Tables of positions and factors of the scores are averaged over joined heads.
TABLES = ("BEiT", "Swin", "Swin 2")
# Where queries and keys are normed after the projection, a cut of their products is not the norm's.
NORMED = ("ViT, norms of queries and keys", "Swin 2")
SMALLEST = ("Swin",)  # two heads in the first stages leave no choice
JOINED = ["encoder", "encoder, padded and causal", *TIMM]
JOINED = [name for name in JOINED if name not in (*FIXED, *NORMED, *SMALLEST)]


@pytest.mark.parametrize("name", JOINED)
def test_joining_equal_heads_loses_nothing(name):
    """With half the heads: the pairs are found, and cuts commute with rotations."""
    model, call = case(name)
    equal_tables(model)
    make_pairs_equal(model, call, [(0, 3), (1, 2)])
    new, report = swapped(model, "mgk", example=call, heads=0.5)
    assert [layer.groups for layer in report.layers] == [[[0, 3], [1, 2]]] * len(report.layers)
    torch.testing.assert_close(call(new), call(model), rtol=1e-7, atol=1e-7)


def equal_tables(model):
    """The table of positions that a host keeps for each head is the same for all."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("relative_position_bias_table"):
                parameter.copy_(parameter[:, :1].expand_as(parameter))


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_joined_heads_are_averaged(name, monkeypatch):
    """The bias of a joined head is the mean of the two, whatever the weights became."""
    model, call = case(name)
    new, report = swapped(model, "mgk", example=call, heads=0.5, **written(name))
    given, seen = [], []
    joined = cores.joined

    def note(tensor, groups):
        out = joined(tensor, groups)
        if tensor is not None and tensor.shape != out.shape and tensor.is_floating_point():
            given.append(tensor)
            seen.append((groups, out))
        return out

    monkeypatch.setattr(cores, "joined", note)
    assert torch.isfinite(call(new)).all()
    assert len(given) >= len(report.layers)
    for before, (groups, after) in zip(given, seen, strict=True):
        for head, group in enumerate(groups):
            torch.testing.assert_close(after[:, head], before[:, group].mean(1), **TIGHT)


@pytest.mark.parametrize("name", FIXED)
def test_heads_that_cannot_be_joined_are_refused_with_the_reason(name):
    model, call = case(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=FIXED[name]) as error:
        lit_probattn.swap(model, "mgk", example=call, heads=0.5)
    assert "2 of 2" in str(error.value)
    assert [type(m) for m in model.modules()] == kinds
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "decoder", "ViT", "EVA02", "BEiT", "Swin", "Swin 2"])
def test_one_graph_when_compiled(name):
    model, call = case(name)
    model, _ = lit_probattn.swap(model, "mgk", example=call, heads=0.5, **written(name))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(name != "BEiT"):  # its bias learns, by rows that C computes
        torch.testing.assert_close(call(compiled), call(model), **TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT", "BEiT", "Swin"])
@pytest.mark.parametrize("variant", ["mgk", "smgk"])
def test_training_with_attention_dropout_is_one_graph(name, variant):
    model, call = case(name)
    model, _ = lit_probattn.swap(model, variant, example=call)
    for module in model.modules():
        if hasattr(module, "attn_drop"):
            module.attn_drop.p = 0.3
    assert_trains_in_one_graph(model.train(), call)


# ---------------------------------------------------------------------- torch
def test_encoders_see_the_new_layers_in_evaluation():
    """torch's fused path reads weights around the layer; its nested tensors look into it."""
    model, call = case("encoder")
    new, _ = swapped(model, "mgk", heads=0.5)
    assert not new.use_nested_tensor
    seen = []
    for layer in new.layers:
        layer.self_attn.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        without = call(new)
    assert len(seen) == 2
    torch.testing.assert_close(without, call(new).detach(), **TIGHT)
    x = double(3, 7, 24)
    hidden = torch.arange(7)[None] >= torch.tensor([7, 4, 5])[:, None]
    with torch.no_grad():
        padded = new(x, src_key_padding_mask=hidden)
        alone = new(x[1:2, :4])
    torch.testing.assert_close(padded[1:2, :4], alone, **TIGHT)


def test_keys_that_a_layer_adds_are_refused_where_heads_change():
    """A learned key and a key of zeros are attended to; what makes them is no projection."""
    model = nn.ModuleDict(
        {
            "good": multihead(),
            "bias_kv": nn.MultiheadAttention(24, 4, add_bias_kv=True),
            "zeros": nn.MultiheadAttention(24, 4, add_zero_attn=True),
            "widths": nn.MultiheadAttention(24, 4, kdim=11, vdim=13),
        }
    )
    with pytest.raises(ValueError, match="1 of 4 attention layers cannot be swapped") as error:
        lit_probattn.swap(model)
    assert "bias_kv (MultiheadAttention): bias_kv.bias_k also affects its key heads" in str(
        error.value
    )
    assert type(model["good"]) is nn.MultiheadAttention
    threes = nn.ModuleList(nn.MultiheadAttention(24, 3) for _ in range(3))
    with pytest.raises(ValueError, match="3 of 3 attention layers") as error:
        lit_probattn.swap(threes, heads=0.5)
    assert "  0, 1, 2 (MultiheadAttention): 3 key heads cannot be joined" in str(error.value)
    _, report = lit_probattn.swap(model, keep=["bias*", "zeros", "widths"])
    assert [layer.action for layer in report.layers][:2] == ["swapped", "kept: as asked by `keep`"]
    with pytest.raises(ValueError, match="one of our layers"):
        lit_probattn.swap(model, layers=["good"])


def test_a_shared_layer_is_exchanged_wherever_it_is():
    shared = multihead()
    model = nn.ModuleDict({"first": nn.ModuleList([shared]), "second": nn.ModuleList([shared])})
    _, report = lit_probattn.swap(model)
    assert model["first"][0] is model["second"][0]
    assert isinstance(model["first"][0].cores, cores.Cores)
    assert len(report.layers) == 1


# ---------------------------------------------------------------------- timm
@pytest.mark.parametrize("masks", ["allowed", "added", "causal"])
def test_masks_of_a_vit_layer(masks):
    from timm.layers.attention import Attention

    torch.manual_seed(0)
    model = randomised(nn.ModuleList([Attention(24, num_heads=4, qkv_bias=True)]))
    x = double(2, 7, 24)
    new, _ = swapped(model, "mgk", example=lambda m: m[0](x), spread=0.0)
    if "is_causal" not in inspect.signature(Attention.forward).parameters and masks == "causal":
        pytest.skip("this timm has no causal ViT")
    allowed = torch.rand(7, 7) < 0.6
    allowed[:, 0] = True
    options = {
        "allowed": {"attn_mask": allowed},
        "added": {"attn_mask": double(1, 1, 7, 7).masked_fill(~allowed, float("-inf"))},
        "causal": {"is_causal": True},
    }[masks]
    torch.testing.assert_close(new[0](x, **options), model[0](x, **options), **TIGHT)
    assert not torch.allclose(new[0](x, **options), new[0](x))


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_grouped_heads_with_rotary_positions(half, fused):
    from timm.layers.attention import AttentionRope

    torch.manual_seed(0)
    if "num_kv_heads" not in inspect.signature(AttentionRope).parameters:
        pytest.skip("this timm has no grouped heads")
    kv = {} if fused else {"num_kv_heads": 4}
    options = {"rotate_half": half, "qkv_fused": fused, "num_prefix_tokens": 2}
    layer = AttentionRope(32, num_heads=8, **options, **kv)
    model = randomised(nn.ModuleList([layer]))
    x, angles = double(2, 7, 32), double(5, 2)
    angles = angles.repeat(1, 2) if half else angles.repeat_interleave(2, 1)
    rope = torch.cat([angles.sin(), angles.cos()], -1)
    call = lambda m: m[0](x, rope=rope)  # noqa: E731
    new, _ = swapped(model, "mgk", example=call, spread=0.0)
    expected = model[0](x, rope=rope)
    torch.testing.assert_close(new[0](x, rope=rope), expected, **TIGHT)
    assert not torch.allclose(model[0](x), expected)
    if not fused:
        make_pairs_equal(model, call, [(0, 2), (1, 3)])
        new, report = swapped(model, "mgk", example=call, heads=0.5)
        assert report.layers[0].groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
        torch.testing.assert_close(
            new[0](x, rope=rope), model[0](x, rope=rope), rtol=1e-7, atol=1e-7
        )


def test_windows_can_be_resized_after_the_swap():
    model, call = case("Swin")
    new, _ = swapped(model, "mgk", example=call, spread=0.0)
    pictures = double(1, 3, 96, 96)
    for each in (model, new):
        each.set_input_size(img_size=(96, 96), window_size=(6, 6))
    torch.testing.assert_close(new(pictures), model(pictures), **TIGHT)


@pytest.mark.parametrize("variant", ["softmax", "mgk"])
def test_attention_dropout_of_the_host_runs_in_our_core(variant):
    from timm.layers.attention import Attention

    torch.manual_seed(0)
    layer = Attention(24, num_heads=4, attn_drop=0.3)
    model = randomised(nn.ModuleList([layer]))
    x = double(2, 7, 24)
    new, _ = swapped(model, variant, spread=0.0, example=lambda m: m[0](x))
    assert torch.equal(new[0](x), new[0](x))
    new.train()
    torch.manual_seed(3)
    found = new[0](x)
    torch.manual_seed(3)
    draw_of_call = AttentionDropout(0.3, RandomKey(int(torch.randint(2**62, (1,)))))
    keep = draw_of_call.keep(2, 4, range(7), range(7), torch.device("cpu"))
    q, k, v = layer.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / 6**0.5).softmax(-1) * keep * draw_of_call.scale
    expected = layer.proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, expected, **TIGHT)
    assert not torch.equal(found, new[0](x))


class Written(nn.Module):
    """Attention that is written out, with values that are smaller than queries and keys."""

    def __init__(self, change: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(24, 32), nn.Linear(24, 32)
        self.value, self.out = nn.Linear(24, 16), nn.Linear(16, 24)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = (query @ key.mT).mul_(8**-0.5)
        if self.change is not None:
            self.change(scores)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("variant", ["softmax", "mgk"])
def test_values_of_another_size_than_keys_in_attention_that_is_written_out(variant):
    host, x = randomised(Written()), double(2, 7, 24)
    expected = host(x)
    new, report = lit_probattn.swap(host, variant, example=(x,), spread=1e-9, written_out=True)
    assert [layer.action for layer in report.layers] == ["swapped"]
    if variant == "softmax":
        torch.testing.assert_close(new(x), expected, **TIGHT)
    new(x).sum().backward()
    assert all(p.grad is not None for p in new.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "change",
    [
        lambda scores: scores[..., 1:].add_(torch.arange(6)),
        lambda scores: scores.__setitem__((..., slice(1, None)), scores[..., 1:] * 3 + 1),
        lambda scores: scores.diagonal(dim1=-2, dim2=-1).fill_(float("-inf")),
        lambda scores: scores.mul_(torch.arange(1, 8)),
        lambda scores: torch.nn.functional.relu(scores, inplace=True),
        lambda scores: scores.view(scores.shape).mul_(3),
    ],
    ids=["a view", "a part", "the diagonal", "a factor per pair", "a flag", "another name"],
)
def test_scores_that_are_changed_in_place_stay_changed(change):
    """MViT of timm adds its positions so."""
    host, x = randomised(Written(change)), double(2, 7, 24)
    expected = host(x)
    new, _ = lit_probattn.swap(host, "softmax", example=(x,), written_out=True)
    torch.testing.assert_close(new(x), expected, **TIGHT)
    graph = torch.compile(new, fullgraph=True, backend="eager")
    torch.testing.assert_close(graph(x), expected, **TIGHT)
