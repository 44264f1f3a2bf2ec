"""The door of `swap`: what it refuses, what it reports, and recipes."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

import lit_probattn
from lit_probattn.attention import ReleasedLinearAttention
from lit_probattn.interop.swap.cores import Cores
from tests.interop.swap.checks import TIGHT, swapped
from tests.interop.swap.models import TORCH, multihead, timm_model
from tests.interop.swap.table import self_and_cross
from tests.support.slow import mostly_slow


def model_of(**sizes) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"one": multihead(), "two": multihead()}).double()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("mkg",), {}, "unknown variant 'mkg'; did you mean 'mgk'"),
        (("mlkk",), {}, "swap accepts names of lit_probattn.list_attention()"),
        (
            ("mlk",),
            {},
            "mlk has 4 query, 4 x 2 key and 4 value heads of 6, the host has 4 query",
        ),
        (
            ("fish",),
            {"mixing": 2},
            "one, two (MultiheadAttention): attention lit_probattn.attention.FiSHAttention: mixing",
        ),
        (("fish",), {"spread": 0.2}, "spread is for mgk and smgk"),
        ((3,), {}, "variant must be a name, received 3"),
        ((), {"heads": 0.3}, "1, 1/2, 1/3, …; received 0.3"),
        ((), {"heads": 0}, "received 0"),
        ((), {"heads": 2.0}, "received 2.0"),
        (("softmax",), {"heads": 0.5}, "heads=0.5 needs several keys per head"),
        ((), {"heads": 0.5, "num_components": 3}, "multiple of 1/heads = 2, received 3"),
        ((), {"num_components": 0}, "num_components must be from 1 to 256, received 0"),
        ((), {"num_components": 10**6}, "num_components must be from 1 to 256, received 1000000"),
        ((), {"num_components": 2.0}, "num_components must be a whole number, received 2.0"),
        (("softmax",), {"num_components": 4}, "num_components is for mgk and smgk"),
        ((), {"spread": -1.0}, "spread must be a finite number of at least 0, received -1.0"),
        ((), {"spread": math.inf}, "spread must be a finite number of at least 0, received inf"),
        ((), {"spread": math.nan}, "spread must be a finite number of at least 0, received nan"),
        ((), {"seed": "1"}, "seed must be a whole number, received '1'"),
        ((), {"heads": "1"}, "heads must be a number, received '1'"),
        ((), {"layers": "one"}, "layers is a string, expected a list of names: ['one']"),
        ((), {"keep": "one"}, "keep is a string, expected a list of names: ['one']"),
        ((), {"learn_varianz": True}, "did you mean 'learn_variance'"),
        ((), {"shifted_keys": True}, "no option 'shifted_keys'"),
        ((), {"e_step": "soft"}, "e_step=soft needs the M-step"),
        ((), {"max_positions": 9}, "max_positions=9 has no effect with prior_share=head"),
        (
            (),
            {"variance": [1.0, -1.0]},
            "one, two (MultiheadAttention): variance multipliers must be",
        ),
        ((), {"score": "cosine"}, "score must be one of"),
        ((), {"layers": ["tow"]}, "no attention layer is called 'tow'; did you mean 'two'"),
        ((), {"keep": ["three"]}, "no attention layer is called 'three'"),
        ((), {"keep": ["*"]}, "no layer is left to swap: all of one, two are kept"),
        ((), {"heads": 1 / 3}, "4 key heads cannot be joined in groups of 3"),
        (({"version": 1},), {}, "not a recipe of swap: missing layers, settings"),
        (({"version": 2, "settings": {}, "layers": {}},), {}, "version 2, expected 1"),
        (({"version": 1, "settings": {"size": 3}, "layers": {}},), {}, "not a recipe of swap"),
        (({"version": 1, "settings": {}, "layers": {}},), {"heads": 0.5}, "no other argument"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(arguments, options, message):
    model = model_of()
    with pytest.raises(ValueError, match=re.escape(message)):
        lit_probattn.swap(model, *arguments, **options)
    assert all(type(m) is nn.MultiheadAttention for m in model.values())


def tied(model):
    model["two"].out_proj.weight = model["one"].out_proj.weight


def tied_with_another(model):
    model["head"] = nn.Linear(24, 24)
    model["head"].weight = model["two"].out_proj.weight


def pruned(model):
    prune.l1_unstructured(model["two"].out_proj, "weight", amount=0.5)


def normed(model):
    nn.utils.parametrizations.weight_norm(model["two"].out_proj)


def normed_as_before(model):
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model["two"].out_proj)


def not_a_number(model):
    model["two"].in_proj_weight.data[3, 1] = math.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tied, "one (MultiheadAttention): its out_proj.weight is two.out_proj.weight too (tied)"),
        (tied_with_another, "two (MultiheadAttention): its out_proj.weight is head.weight too"),
        (pruned, "two (MultiheadAttention): out_proj.weight is computed from others"),
        (normed, "two (MultiheadAttention): out_proj.weight is computed from others"),
        (normed_as_before, "two (MultiheadAttention): out_proj.weight is computed from others"),
        (not_a_number, "two (MultiheadAttention): in_proj_weight contains NaN in 1 of"),
    ],
)
@pytest.mark.parametrize("heads", [1.0, 0.5])
def test_weights_that_a_swap_would_lose_are_refused(change, message, heads):
    model = model_of()
    change(model)
    before = {n: (id(p), p.clone()) for n, p in model.named_parameters(remove_duplicate=False)}
    with pytest.raises(ValueError, match=re.escape(message)):
        lit_probattn.swap(model, "mgk", heads=heads)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    for name, (identity, value) in before.items():
        assert id(after[name]) == identity
        torch.testing.assert_close(after[name], value, equal_nan=True, rtol=0, atol=0)
    if change is tied_with_another:  # the others can be swapped
        _, report = lit_probattn.swap(model, "mgk", keep=["two"])
        assert [layer.swapped for layer in report.layers] == [True, False]


@pytest.fixture
def process_group():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", ["DistributedDataParallel", "fully_shard"])
def test_wrapped_models_are_refused(process_group, kind, inside):
    model: nn.Module = nn.TransformerEncoderLayer(24, 4)
    if kind == "DistributedDataParallel":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        wrapped = fully_shard(model, mesh=mesh)
    given = nn.ModuleDict({"inner": wrapped}) if inside else wrapped
    names = list(given.state_dict())
    with pytest.raises(ValueError, match=f"{'FSDP' if 'shard' in kind else kind}.*swap .*before"):
        lit_probattn.swap(given)
    assert list(given.state_dict()) == names


@pytest.mark.parametrize("variant", ["mgk", "smgk"])
def test_what_is_frozen_stays_frozen(variant):
    model = model_of().requires_grad_(False)
    lit_probattn.swap(model, variant)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == []
    other = model_of()
    other["one"].requires_grad_(False)
    lit_probattn.swap(other, variant)
    cores = {n: p.requires_grad for n, p in other.named_parameters() if ".core" in n}
    assert cores
    assert all(trained is n.startswith("two") for n, trained in cores.items())


@pytest.mark.parametrize("model", [[nn.Linear(3, 3)], None, nn.Linear])
def test_only_modules_are_swapped(model):
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module"):
        lit_probattn.swap(model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 5), "pass example=, one batch that the model takes"),
        (multihead(), "pass example=, one batch that the model takes"),
    ],
)
def test_models_that_cannot_be_swapped(model, message):
    with pytest.raises(ValueError, match=message):
        lit_probattn.swap(model)


def test_a_class_that_may_attend_needs_an_example():
    class RandomAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(3, 3)

    class AttentionBlock(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.inner = attention

    model = nn.Sequential(AttentionBlock(multihead()), AttentionBlock(RandomAttention()))
    with pytest.raises(ValueError, match="pass example=, one batch that the model takes"):
        lit_probattn.swap(model)
    x = torch.randn(2, 3, 24)
    _, report = lit_probattn.swap(model, example=lambda m: m[0].inner(x, x, x))
    assert [layer.swapped for layer in report.layers] == [True]


def test_what_cannot_attend_to_another_sequence_is_refused_there_only():
    host = self_and_cross()
    options = {"example": host.example, "denominator": "sqrt_len"}
    with pytest.raises(ValueError, match=r"^1 of 2 .*\n  other \(.*set padded_len.*another seq"):
        lit_probattn.swap(host.model, ReleasedLinearAttention, **options)
    _, report = lit_probattn.swap(host.model, ReleasedLinearAttention, padded_len=8, **options)
    assert [layer.swapped for layer in report.layers] == [True, True]


class Masked(nn.Module):
    """Self-attention of 4 heads with a mask or bias in the form of PyTorch's function."""

    def __init__(self, mask):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.register_buffer("mask", mask)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*heads, attn_mask=self.mask)
        return self.out(found.transpose(1, 2).flatten(2))


PAIRS = torch.ones(5, 5, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("variant", "heads", "mask", "message"),
    [
        ("linear", 1.0, torch.randn(4, 5, 5), "no scores before a softmax to add a bias to"),
        ("mlk", 0.5, torch.randn(5, 5), "no scores before a softmax to add a bias to"),
        ("talking_heads", 1.0, PAIRS.expand(4, 5, 5), "one attn_mask for all heads"),
    ],
)
def test_what_does_not_support_a_mask_of_the_example_is_refused(variant, heads, mask, message):
    x = torch.randn(2, 5, 24)
    model = nn.Sequential(Masked(None), Masked(mask))
    before, names = model(x), list(model.state_dict())
    with pytest.raises(ValueError, match=rf"^1 of 2 .*\n  1 \(Masked\): .*{message}"):
        lit_probattn.swap(model, variant, example=x, heads=heads)
    assert list(model.state_dict()) == names
    assert torch.equal(model(x), before)
    _, report = lit_probattn.swap(model, variant, example=x, heads=heads, keep=["1"])
    assert [layer.swapped for layer in report.layers] == [True, False]
    assert report.layers[0].error is not None


def test_masks_of_pairs_are_supported_by_variants_without_scores():
    x = torch.randn(2, 5, 24)
    for mask in (PAIRS, torch.zeros(5, 5).masked_fill(~PAIRS, float("-inf"))):
        model, report = lit_probattn.swap(Masked(mask), "linear", example=x)
        assert report.layers[0].error is not None
        assert model(x).isfinite().all()


def test_an_adapter_around_a_projection_is_refused():
    from timm.layers.attention import Attention

    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1.0

    model, x = nn.Sequential(Attention(24, num_heads=4)), torch.randn(2, 3, 24)
    model[0].qkv = Adapter(24, 72)
    for heads in (1.0, 0.5):
        with pytest.raises(ValueError, match=r"qkv is Adapter, expected torch\.nn\.Linear"):
            lit_probattn.swap(model, example=x, heads=heads)
    _, report = lit_probattn.swap(model, "smgk", example=x)  # which leaves projections alone
    assert len(report.swapped) == 1


@pytest.mark.parametrize("has_example", [False, True])
def test_a_replaced_forward_is_refused(has_example):
    """It would run instead of the swapped class's, and the swap would change nothing."""
    model, x = model_of(), torch.randn(2, 3, 24).double()
    model["two"].forward = functools.partial(type(model["two"]).forward, model["two"])
    options = {"example": lambda m: m["two"](x, x, x)} if has_example else {}
    with pytest.raises(ValueError, match=r"two \(MultiheadAttention\): .*forward.*replaced"):
        lit_probattn.swap(model, "smgk", **options)
    assert type(model["two"]) is nn.MultiheadAttention


class Written(nn.Module):
    """Attention in separate operations; `weights` is how it computes its map."""

    def __init__(self, weights):
        super().__init__()
        self.qkv, self.out, self.weights = nn.Linear(24, 72), nn.Linear(24, 24), weights

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        return self.out((self.weights(query, key) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "weights",
    [
        lambda q, k: torch.softmax(q @ k.mT, 2),
        lambda q, k: nn.Softmax(dim=1)(q @ k.mT),
        lambda q, k: (q @ k.mT).softmax(dim=-2),
    ],
)
def test_a_softmax_over_another_axis_than_keys_is_refused(weights):
    """Slot attention, for example, normalises over queries."""
    model = nn.Sequential(Written(weights), nn.TransformerEncoderLayer(24, 4, batch_first=True))
    options = {"example": torch.randn(2, 5, 24), "written_out": True}
    with pytest.raises(ValueError, match=r"^1 of 2 .*\n.*0 \(Written\): .*keep"):
        lit_probattn.swap(model, **options)
    _, report = lit_probattn.swap(model, keep=["0"], **options)
    assert [layer.name for layer in report.swapped] == ["1.self_attn"]


def test_attention_with_heads_in_the_batch_is_listed():
    """Its softmax has three dimensions, (B * H, N, L)."""

    def weights(query, key):
        query, key = (tensor.flatten(0, 1) for tensor in (query, key))
        return torch.bmm(query, key.mT).softmax(-1).unflatten(0, (2, 4))

    model = nn.Sequential(Written(weights), nn.TransformerEncoderLayer(24, 4, batch_first=True))
    options = {"example": torch.randn(2, 5, 24), "written_out": True}
    with pytest.raises(ValueError, match=r"^1 of 2 .*\n.*0 \(Written\): .*keep"):
        lit_probattn.swap(model, **options)


@pytest.mark.parametrize(
    "weights",
    [
        lambda q, k: torch.matmul(input=q, other=k.mT).softmax(-1),
        lambda q, k: nn.functional.softmax(input=torch.matmul(q, other=k.mT), dim=-1),
        lambda q, k: torch.softmax(torch.mul(q @ k.mT, other=6**-0.5), 3),
        lambda q, k: torch.softmax(torch.add(input=q @ k.mT, other=1.0), dim=3),
    ],
)
def test_keywords_of_functions_are_followed(weights):
    model, x = Written(weights), torch.randn(2, 5, 24)
    new, report = swapped(model, "softmax", example=x, written_out=True)
    assert [layer.swapped for layer in report.layers] == [True]
    torch.testing.assert_close(new(x), model(x))


# ---------------------------------------------------------------------- the report
def test_the_report_counts_what_is_there():
    model, call = timm_model("ViT")
    old = sum(p.numel() for p in model.parameters())
    before = call(model)
    new, report = lit_probattn.swap(model, "mgk", heads=0.5, keep=["blocks.1.attn"])
    assert new is model
    first, second = report.layers
    assert (first.name, first.kind, first.action) == ("blocks.0.attn", "Attention", "swapped")
    assert second.action == "kept: as asked by `keep`"
    assert report.swapped == [first]
    assert first.heads == first.kv_heads == (4, 2)
    assert first.components == (1, 2)
    change = first.parameters[1] - first.parameters[0]
    assert sum(p.numel() for p in model.parameters()) - old == change < 0
    assert first.parameters[0] == 4 * 32 * 32 + 4 * 32
    # Of 8 bytes: 4 heads of 8 entries, keys and values; then 2 heads with 2 keys and 1 value.
    assert first.cache_bytes == (4 * 16 * 8, 2 * 24 * 8)
    assert 0.05 < first.error < 2.0
    assert sorted(head for group in first.groups for head in group) == [0, 1, 2, 3]
    table = str(report).splitlines()
    assert table[0].split()[:5] == ["layer", "class", "action", "error", "heads"]
    assert f"{first.parameters[0]} -> {first.parameters[1]}" in table[1]
    assert "1 of 2 attention layers are now mgk" in str(report)
    assert "expect to fine-tune" in str(report)
    assert not torch.allclose(call(new), before)


def test_errors_are_those_of_the_layer():
    """The error in the report, again by hand: ‖new − old‖ / ‖old‖ on the same random tokens."""
    model = model_of()
    new, report = swapped(model, "mgk", heads=0.5)
    x = torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(0)).double()
    old, after = (m["one"](x, x, x, need_weights=False)[0] for m in (model.eval(), new.eval()))
    expected = float(((after - old).norm() / old.norm()).detach())
    assert abs(report.layers[0].error - expected) < 1e-12


def test_a_swap_leaves_random_numbers_and_modes_alone():
    model = model_of()
    model["two"].eval()
    state = torch.get_rng_state()
    lit_probattn.swap(model, "smgk")
    assert torch.equal(torch.get_rng_state(), state)
    assert model["one"].training
    assert not model["two"].training
    assert not any(m.training for m in model["two"].modules())


def test_frozen_layers_and_dtypes_stay():
    model = model_of().to(torch.bfloat16)
    for parameter in model["one"].parameters():
        parameter.requires_grad_(False)
    lit_probattn.swap(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    projections = [p for n, p in model["one"].named_parameters() if "_proj" in n]
    assert len(projections) == 4
    assert not any(p.requires_grad for p in projections)
    assert all(p.requires_grad for p in model["two"].parameters())


def test_shifted_keys():
    """smgk: one projection, K shifts; at the start those are small, and so is the Gaussian's part.

    With keys of one norm the only difference is that of the shifts.
    """
    model, call = timm_model("Swin 2")
    new, report = swapped(model, "smgk", example=call, spread=1e-7, written_out=True)
    assert report.layers[0].components == (1, 2)
    assert "gaussian" in str(report)
    torch.testing.assert_close(call(new), call(model), rtol=1e-4, atol=1e-4)
    shifts = [p for n, p in new.named_parameters() if n.endswith("cores.0.key_shift")]
    assert len(shifts) == len(report.layers)
    rotary, _ = timm_model("EVA02")  # shifts come after the rotation, the same for all places
    _, report = lit_probattn.swap(rotary, "smgk")
    assert all(layer.swapped for layer in report.layers)


# ---------------------------------------------------------------------- recipes
@pytest.mark.parametrize(
    "name", mostly_slow(["encoder", "EVA02", "Swin", "Swin 2", "BEiT"], ["encoder", "Swin 2"])
)
def test_a_saved_model_loads_again(name, tmp_path):
    def build():
        return TORCH[name]() if name in TORCH else timm_model(name)

    torch.manual_seed(0)
    model, call = build()
    options = {"learn_variance": True, "seed": 5}
    more = {"written_out": True} if name == "Swin 2" else {}
    model, report = lit_probattn.swap(model, "mgk", heads=0.5, example=call, **options, **more)
    with torch.no_grad():
        for parameter in model.parameters():  # as training would
            parameter.add_(0.1 * torch.randn_like(parameter))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (tmp_path / "recipe.json").write_text(json.dumps(report.recipe))

    torch.manual_seed(1)
    fresh, _ = build()
    recipe = json.loads((tmp_path / "recipe.json").read_text(encoding="utf-8"))
    fresh, again = lit_probattn.swap(fresh, recipe)
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(call(fresh), call(model))
    assert again.recipe == report.recipe
    assert [layer.groups for layer in again.layers] == [layer.groups for layer in report.layers]


def test_a_recipe_swaps_only_its_layers_and_only_in_its_model():
    model = model_of()
    fresh, other = copy.deepcopy(model), copy.deepcopy(model)
    _, report = lit_probattn.swap(model, "mgk", layers=["t*"])
    assert list(report.recipe["layers"]) == ["two"]
    _, again = lit_probattn.swap(fresh, report.recipe)
    assert [layer.name for layer in again.swapped] == ["two"]
    other["two"] = nn.MultiheadAttention(18, 3)
    with pytest.raises(ValueError, match=r"two: two.in_proj_weight is \[54, 18\] in the model"):
        lit_probattn.swap(other, report.recipe)
    del other["two"]
    with pytest.raises(ValueError, match="two: the recipe has MultiheadAttention, the model no su"):
        lit_probattn.swap(other, report.recipe)


CALL = ("layers", "two", "calls", 0)


@cache
def recipe_text():
    return json.dumps(lit_probattn.swap(model_of(), "mgk", heads=0.5)[1].recipe)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("version",), "1", "version '1', expected 1"),
        (("settings",), None, "settings: expected a mapping, received None"),
        (("settings", "size"), 3, "settings: unknown key 'size'"),
        (("settings", "heads"), "half", "heads must be a number, received 'half'"),
        (("layers",), ["two"], "layers: expected a mapping of names, received ['two']"),
        (("layers", "two"), None, "layer two: expected a mapping, received None"),
        (("layers", "two", "haeds"), 3, "layer two: unknown key 'haeds'"),
        (("layers", "two", "calls"), ..., "layer two: missing calls"),
        (("layers", "two", "calls"), [], "layer two, calls: expected a list of calls"),
        (("layers", "two", "calls"), None, "layer two, calls: expected a list of calls"),
        (("layers", "two", "class"), 3, "layer two, class: expected a name, received 3"),
        ((*CALL, "way"), "door", "layer two, way: expected one of interface"),
        ((*CALL, "cross"), 1, "layer two, cross: expected true or false"),
        ((*CALL, "heads"), [4, 4], "layer two, heads: expected five whole numbers"),
        ((*CALL, "heads"), None, "layer two, heads: expected five whole numbers"),
        ((*CALL, "heads"), [4, 4, 4, 6, "6"], "layer two, heads: expected five whole numbers"),
        ((*CALL, "heads"), [4, 3, 3, 6, 6], "layer two, heads: 4 query heads are no multiple"),
        (
            (*CALL, "projections"),
            None,
            "layer two, projections: expected a value as in the settings",
        ),
        ((*CALL, "projections"), {}, "layer two, projections: expected rows of weights"),
        ((*CALL, "groups"), None, "layer two, groups: expected groups of 2 heads"),
        ((*CALL, "groups"), "01", "layer two, groups: expected groups of 2 heads"),
        ((*CALL, "groups"), [[0, 1], [2, 9]], "layer two, groups: expected each of 0"),
        ((*CALL, "groups"), [[0, 1], [1, 2]], "layer two, groups: expected each of 0"),
        ((*CALL, "groups"), [[0, 1], [2, -1]], "layer two, groups: expected each of 0"),
        ((*CALL, "groups"), [[0, 1]], "layer two, groups: expected each of 0"),
        ((*CALL, "groups"), [[0, 1, 2], [3]], "layer two, groups: expected groups of"),
        ((*CALL, "groups"), [[0, 1], ["2", 3]], "layer two, groups: expected groups"),
    ],
)
def test_recipes_of_another_form_are_named(where, value, message):
    part = recipe = json.loads(recipe_text())
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = value
    if value is ...:
        del part[where[-1]]
    model = model_of()
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        lit_probattn.swap(model, recipe)
    assert "\n" not in str(error.value)
    assert all(type(m) is nn.MultiheadAttention for m in model.values())


def test_a_recipe_builds_a_model_without_weights():
    model, call = TORCH["encoder"]()
    model, report = lit_probattn.swap(model, "mgk", heads=0.5)
    with torch.device("meta"):
        empty, _ = TORCH["encoder"]()
    with pytest.raises(ValueError, match="has no weights: pass a recipe"):
        lit_probattn.swap(empty, "mgk", heads=0.5)
    empty, again = lit_probattn.swap(empty, report.recipe)
    assert "not measured: no weights" in str(again)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    torch.testing.assert_close(call(empty), call(model), **TIGHT)


def test_swapped_models_can_be_copied_and_pickled(tmp_path):
    model, call = TORCH["encoder"]()
    model, _ = lit_probattn.swap(model, "mgk", heads=0.5)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(call(other), call(model))
    assert sum(isinstance(m, Cores) for m in other.modules()) == 2
