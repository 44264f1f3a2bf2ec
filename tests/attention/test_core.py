"""Cores alone: heads in, heads out, as functional forms and other people's models use them."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_probattn.attention import FiSHAttention, HeadCall, HeadLayout, MGKAttention
from lit_probattn.attention.backends import (
    GPU_BACKENDS,
    _pays_off,
    attend,
    engines_of,
    reason_against,
)
from lit_probattn.attention.draws import normal_noise
from lit_probattn.attention.engines.sdpa import _kernel_size, fused_attention
from lit_probattn.attention.engines.table import NORMAL_FORM
from lit_probattn.attention.fish.layer import FiSHCore, FiSHOptions
from lit_probattn.attention.linear.layer import LinearAttention
from lit_probattn.attention.masks import make_masks, span
from lit_probattn.attention.mgk.core import MGKCore
from lit_probattn.attention.mgk.options import MGKOptions
from lit_probattn.attention.softmax import Softmax, SoftmaxCore
from lit_probattn.attention.variant import wide_heads
from lit_probattn.randomness import RandomKey
from tests.support.helpers import double
from tests.support.paths import ROOT

B, H, N, L, E, E_V, K = 2, 6, 7, 13, 5, 3, 2
CLOSE = {"rtol": 0.0, "atol": 1e-12}


def layout(**options) -> HeadLayout:
    heads = {"query": H, "key": H, "value": H, "out": H, "head_dim": E, "value_head_dim": E_V}
    return HeadLayout(**{**heads, **options})


def call(*, key_heads=H, scale=None, bias=None, **options) -> HeadCall:
    query, key, value = double(B, H, N, E), double(B, key_heads, L, E), double(B, H, L, E_V)
    masks = make_masks(B, H, N, L, bias=bias)
    return HeadCall(query, key, value, masks, scale=scale, **options)


def supported(core, of):
    variant = core.variant(of)
    found = {name: reason_against(engine, of, variant) for name, engine in core.backends.items()}
    return [name for name, reason in found.items() if name not in GPU_BACKENDS and reason is None]


def test_a_core_computes_heads_without_projections():
    core = SoftmaxCore(layout()).double()
    assert list(core.parameters()) == []
    one = call()
    expected = F.scaled_dot_product_attention(one.query, one.key, one.value)
    torch.testing.assert_close(core(one), expected, **CLOSE)
    assert torch.equal(attend(one, core.variant(one)), core(one))
    assert core.pick(one) == "sdpa"


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_heads_that_share_queries_and_keys_use_pytorchs_fused_kernel(heads):
    """Other kernels store the scores; the fused one refuses unequal numbers of heads."""
    query, key, value = double(B, 1, N, E), double(B, 1, L, E), double(B, heads, L, E)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = fused_attention(query, key, value, masks=make_masks(B, heads, N, L), scale=0.3)
    torch.testing.assert_close(out, (0.3 * query @ key.mT).softmax(-1) @ value, **CLOSE)


def test_keys_without_components_have_no_dimension_for_them():
    one = call()
    with pytest.raises(ValueError, match="key has 6 x 1 heads"):
        SoftmaxCore(layout())(replace(one, key=one.key[:, :, None]))


@pytest.mark.parametrize(
    ("size", "on_gpu", "on_cpu"), [(5, 8, 16), (8, 8, 16), (16, 16, 16), (65, 72, 65)]
)
def test_heads_are_padded_to_what_pytorchs_kernels_are_fast_for(size, on_gpu, on_cpu):
    assert _kernel_size(size, torch.device("cuda")) == on_gpu
    assert _kernel_size(size, torch.device("cpu")) == on_cpu


@pytest.mark.parametrize(("entries", "fused"), [(256, True), (257, False)])
def test_pytorchs_kernels_on_gpus_take_heads_of_up_to_256(entries, fused):
    """As FlashAttention-2 and cuDNN do."""
    masks = SimpleNamespace(key_mask=None, attn_mask=None, bias=None)
    query = torch.empty(1, 1, 700, 8, dtype=torch.bfloat16, device="meta")
    one = SimpleNamespace(is_dynamic=False, query=query, num_keys=700, masks=masks, device="cuda")
    variant = SimpleNamespace(sizes=lambda _: {"entries of all global maps": entries})
    assert _pays_off(variant, one, 512) == fused
    assert not _pays_off(variant, one, 701)


def test_the_library_of_c_takes_as_many_parts_as_its_buffers_have():
    text = (ROOT / "lit_probattn/kernels/cpu/vectors.h").read_text(encoding="utf-8")
    (most,) = re.findall(r"#define MOST (\d+) /\* components, maps, hidden units \*/", text)
    names = ("components", "global maps", "hidden units")
    assert NORMAL_FORM["native"].limits == dict.fromkeys(names, int(most))


@pytest.mark.parametrize("scale", [0.11, 1.0])
def test_softmax_takes_any_scale(scale):
    core, one = SoftmaxCore(layout()), call(scale=scale)
    expected = F.scaled_dot_product_attention(one.query, one.key, one.value, scale=scale)
    for backend in supported(core, one):
        core.backend = backend
        torch.testing.assert_close(core(one), expected, **CLOSE)
    torch.testing.assert_close(core.weights(one) @ one.value, expected, **CLOSE)


@pytest.mark.parametrize("make", [SoftmaxCore, MGKCore])
def test_gaussian_scale_is_the_inverse_of_the_variance(make):
    """Scores −scale ‖q − k‖² / 2: for a mixture σ²_r = c_r / scale."""
    scale = 0.31
    options = {"score": "gaussian"}
    if make is MGKCore:
        options |= {"num_components": 1, "variance": [1.0]}
    core, one = make(layout(), options=make.options_class(**options)), call(scale=scale)
    distance = (one.query[:, :, :, None] - one.key[:, :, None]).square().sum(-1)
    expected = (-distance * scale / 2).softmax(-1) @ one.value
    for backend in supported(core, one):
        core.backend = backend
        torch.testing.assert_close(core(one).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("mixer", ["linear", "mlp"])
@pytest.mark.parametrize("position", ["before", "after"])
def test_hard_fish_scales_its_scores(mixer, position):
    """1/√E before the mixing or after it; a given factor enters at the same place."""
    options = {"mixer": mixer, "noise": "none", "scale_position": position, "mixing_bias": "none"}
    core = FiSHCore(layout(query=2, key=2), options=FiSHOptions(**options)).double()
    one = call()
    one = HeadCall(one.query[:, :2], one.key[:, :2], one.value, one.masks, scale=0.17)
    maps = (one.query @ one.key.mT) * (0.17 if position == "before" else 1.0)
    first, *rest = core.mixing.weights
    scores = torch.einsum("hg,bgij->bhij", first, maps)
    for weight in rest:
        scores = torch.einsum("hu,buij->bhij", weight, scores.relu())
    scores = scores * (0.17 if position == "after" else 1.0)
    for backend in supported(core, one):
        core.backend = backend
        torch.testing.assert_close(core(one), scores.softmax(-1) @ one.value, **CLOSE)


def test_linear_attention_refuses_a_scale():
    core = LinearAttention(8, 2).core
    one = HeadCall(
        double(1, 2, 3, 4),
        double(1, 2, 3, 4),
        double(1, 2, 3, 4),
        make_masks(1, 2, 3, 3),
        scale=1.0,
    )
    with pytest.raises(ValueError, match=r"no scores that scale=1\.0 could multiply"):
        core(one)


@pytest.mark.parametrize("e_step", ["learned", "hard"])
def test_components_may_come_as_further_heads(e_step):
    """(B, H·K, L, E), the K keys of a head side by side, is (B, H, K, L, E)."""
    core = MGKCore(
        layout(keys_per_head=K), options=MGKOptions(e_step=e_step, variance="paper_main")
    )
    one = call(key_heads=H * K)
    stacked = HeadCall(one.query, one.key.unflatten(1, (H, K)), one.value, one.masks)
    for backend in supported(core, one):
        core.backend = backend
        assert torch.equal(core(one), core(stacked))


@pytest.mark.parametrize("name", ["attn_mask", "bias"])
def test_masks_of_fewer_dimensions_are_aligned_on_the_right(name):
    for given in ((N, L), (H, N, L), (B, 1, N, L)):
        pairs = torch.rand(given)
        masks = make_masks(B, H, N, L, **{name: pairs < 0.7 if name == "attn_mask" else pairs})
        assert getattr(masks, name).shape == (1,) * (4 - len(given)) + given
    for given in ((L, N), (N + 1, L), (H + 1, N, L), (L,), (1, B, H, N, L)):
        pairs = torch.zeros(given, dtype=torch.bool if name == "attn_mask" else torch.float32)
        with pytest.raises(ValueError, match=f"{name} has shape"):
            make_masks(B, H, N, L, **{name: pairs})


@pytest.mark.parametrize(("heads", "alike"), [(1, H), (H, 1)])
def test_heads_of_one_map_and_one_bias_share_a_softmax(heads, alike):
    core = FiSHCore(layout(query=2, key=2), options=FiSHOptions(mixer="shared", noise="none"))
    query, key, value = double(B, 2, N, E), double(B, 2, L, E), double(B, H, L, E_V)
    one = HeadCall(query, key, value, make_masks(B, H, N, L, bias=double(B, heads, N, L)))
    assert wide_heads(core.variant(one).lower(one), one) == alike


def test_masks_of_shapes_alone_have_no_numbers():
    masks = make_masks(B, H, N, L, is_causal=True)
    assert masks.allowed(masks.all_rows, masks.all_cols, torch.device("meta")).is_meta


def test_noise_of_shapes_alone_has_no_numbers():
    made = normal_noise(RandomKey(5), 2, 3, range(4), range(7, 12), torch.device("meta"))
    assert made.is_meta
    assert made.shape == (2, 3, 4, 5)


@pytest.mark.parametrize("end", ["start", "stop"])
def test_a_dynamic_span_stays_dynamic(end):
    """A number in its place would fix the size with which the program was recorded."""

    class Cut(torch.nn.Module):
        def forward(self, x, y):
            found = span(y.shape[0], 40) if end == "start" else span(0, y.shape[0])
            return x[found.start : found.stop]

    size = torch.export.Dim("size", min=2, max=38)
    x, y = torch.arange(64), torch.zeros(7)
    program = torch.export.export(Cut(), (x, y), dynamic_shapes={"x": None, "y": {0: size}})
    found = program.module()(x, torch.zeros(11))
    assert torch.equal(found, x[11:40] if end == "start" else x[:11])


def test_an_m_step_is_gathered_by_the_core_alone():
    layer = MGKAttention(8, 2, e_step="soft")
    owners = [name for name, m in layer.named_modules() if hasattr(m, "prior_statistics")]
    assert owners == ["core"]
    layer(torch.randn(1, 5, 8))
    assert layer.core.prior_statistics()[1].max() > 0
    before = layer.core.prior_statistics().clone()
    layer.core.variant(layer.call(torch.randn(1, 5, 8)))
    assert torch.equal(layer.core.prior_statistics(), before), "choosing gathers nothing"


def test_auto_asks_only_the_backends_of_its_order(monkeypatch):
    asked = []

    def asks(name):
        return replace(engines[name], missing=lambda *_: asked.append(name))

    engines = engines_of(Softmax)
    monkeypatch.setattr(Softmax, "own_engines", {name: asks(name) for name in engines})
    attend(call(), Softmax())
    assert asked == ["sdpa"]


def test_a_variant_with_scores_of_its_own_does_not_get_those_of_its_parent():
    """Without a normal form, only the reference supports it."""

    class Doubled(Softmax):
        def scores(self, call):
            return 2.0 * super().scores(call)

    class Flat(Softmax):
        def normalise(self, scores, allowed):
            return torch.ones_like(scores) / scores.shape[-1]

    for cls in (Doubled, Flat):
        assert list(engines_of(cls)) == ["reference"]
    one = call()
    assert not torch.allclose(attend(one, Doubled()), attend(one, Softmax()))
    torch.testing.assert_close(
        attend(one, Flat()), one.value.mean(2, keepdim=True).expand(-1, -1, N, -1)
    )


@pytest.mark.parametrize("cls", [MGKAttention, FiSHAttention, LinearAttention])
def test_a_misspelt_argument_names_the_variant_and_the_nearest(cls):
    says = f"{cls.__name__} received an unexpected keyword argument"
    message = f"{says} 'head_dm'; did you mean 'head_dim'?"
    with pytest.raises(TypeError, match=re.escape(message)):
        cls(64, 4, head_dm=16)
    with pytest.raises(TypeError, match=f"{says} 'zzz'; expected .*head_dim"):
        cls(64, 4, zzz=1)


def test_arguments_of_a_variant_are_near_too():
    with pytest.raises(TypeError, match="did you mean 'num_components'"):
        MGKAttention(64, 4, num_component=2)


def test_common_arguments_that_a_variant_has_not_are_refused():
    with pytest.raises(TypeError, match="num_kv_heads"):
        FiSHAttention(8, 2, num_kv_heads=1)
    with pytest.raises(TypeError, match="rotary_dim"):
        LinearAttention(8, 2, rotary_dim=2)
