"""FlexAttention as an engine: every form that it does not lack, against the equation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import flex_attention

from lit_probattn.attention.backends import attend
from lit_probattn.attention.engines import flex
from lit_probattn.attention.engines.table import NORMAL_FORM
from tests.attention.variants import EMBED, layers
from tests.support.slow import SHARES, mostly_slow, some_of

LAYERS = layers()
# Coefficients and row terms are of components that differ.
LAYERS["smgk, variances 1 3"] = partial(LAYERS["smgk"], variance="paper_main")
N = 37
MASKS = ("none", "causal", "last", "key", "pairs", "bias")


def masks(kind, heads):
    torch.manual_seed(5)
    return {
        "none": {},
        "causal": {"is_causal": True},
        "last": {"is_causal": True},  # and only the last queries
        "key": {"key_mask": torch.rand(2, N) < 0.7},
        "pairs": {"attn_mask": torch.rand(2, 1, N, N) < 0.7},
        "bias": {"bias": torch.randn(1, heads, N, N), "is_causal": True},
    }[kind]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", LAYERS)
def test_every_form_agrees_with_the_equation(name, share, monkeypatch):
    """PyTorch's debug mode runs the same operator without tracing, which takes most of the time."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    agrees_with_the_equation(name, some_of(MASKS, share, name))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_slow(
        [("smgk, variances 1 3", "bias"), ("fish", "key")], [("smgk, variances 1 3", "bias")]
    ),
)
def test_forms_can_be_traced(name, kind):
    agrees_with_the_equation(name, [kind])


def agrees_with_the_equation(name, kinds):
    torch.manual_seed(3)
    layer = LAYERS[name]().eval()
    if "flex" not in layer.core.backends:
        lacks, needs = NORMAL_FORM["flex"].lacks, layer.core.variant(layer.call(rows())).needs()
        assert needs.keys() & lacks or not layer.core.makes.has_scores
        return
    for kind in kinds:
        call = layer.call(rows(), **masks(kind, layer.layout.out))
        if kind == "last":
            few = replace(call.masks, num_queries=7)
            call = replace(call, query=call.query[:, :, -7:], masks=few)
        with torch.no_grad():
            variant = layer.core.variant(call)
            found = NORMAL_FORM["flex"].compute(call, variant)
            exact = layer.double()
            wide = replace(
                call,
                query=call.query.double(),
                key=call.key.double(),
                value=call.value.double(),
            )
            expected = attend(wide, exact.core.variant(wide), "reference")
            layer.float()
        error = (found.double() - expected).abs().max() / expected.square().mean().sqrt()
        assert error < 2e-5, kind


def rows():
    return torch.randn(2, N, EMBED, generator=torch.Generator().manual_seed(1))


def test_it_is_refused_on_a_cpu():
    layer = LAYERS["softmax"]()
    layer.backend = "flex"
    with pytest.raises(NotImplementedError, match="it is for CUDA"):
        layer(rows())


def test_every_size_is_compiled_afresh(monkeypatch):
    """The compiler counts recompilations per function and stops fusing after some."""
    resets = []
    flex._compiled.cache_clear()
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    for size in (16, 32, 16):
        flex._compiled(1, 2, size)
    assert len(resets) == 2
    flex._compiled.cache_clear()
