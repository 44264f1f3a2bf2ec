"""Three independent fused routes to soft MGK agree: our kernel, FlexAttention, expanded keys."""

from __future__ import annotations

import itertools

import pytest
import torch

from lit_probattn.attention import HeadCall, MGKAttention
from lit_probattn.attention.masks import make_masks
from profiling.kernels import flex
from profiling.kernels.flex import mgk_flex
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
B, H, N, L, E, K = 2, 3, 19, 29, 16, 2


@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("variance", "score", "masked"),
    mostly_slow(
        itertools.product(["equal", "paper_main"], ["gaussian", "dot"], [False, True]),
        [("paper_main", "gaussian", True), ("equal", "dot", False)],
    ),
)
def test_three_routes_agree(variance, score, masked):
    layer = MGKAttention(8, H, head_dim=E, variance=variance, score=score).to(DEVICE)
    with torch.no_grad():
        layer.core.prior.value.uniform_(0.2, 0.8)
    query = torch.randn(B, H, N, E, device=DEVICE)
    key, value = torch.randn(B, H, K, L, E, device=DEVICE), torch.randn(B, H, L, E, device=DEVICE)
    key_mask = (torch.rand(B, L) < 0.7).to(DEVICE) if masked else None
    masks = make_masks(B, H, N, L, key_mask=key_mask, is_causal=masked)
    core = layer.core
    arguments = core.variant(HeadCall(query, key, value, masks))
    with torch.no_grad():
        flex = mgk_flex(
            *(query, key, value),
            precision=1.0 / core.variance(),
            offset=arguments.log_prior,
            gaussian=score == "gaussian",
            equal_precision=variance == "equal",
            key_mask=key_mask,
            is_causal=masked,
        )
        exact = (query.double(), key.double(), value.double())
        expected = core.backends["reference"].compute(HeadCall(*exact, masks), arguments)
        others = [
            core.backends[name].compute(HeadCall(query, key, value, masks), arguments)
            for name in ("triton", "sdpa")
        ]
        for route in (flex, *others):
            torch.testing.assert_close(route.double(), expected, atol=5e-6, rtol=5e-6)


def test_grouped_heads_are_refused():
    with pytest.raises(ValueError, match="expected 4 key heads, received 2"):
        mgk_flex(
            *(torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 2, 3, 8), torch.zeros(1, 2, 3, 8)),
            precision=torch.ones(2, 2), offset=None, gaussian=False, equal_precision=True,
        )  # fmt: skip


def test_every_size_is_compiled_afresh(monkeypatch):
    """The compiler counts recompilations per function and stops fusing after some."""
    resets = []
    flex._compiled.cache_clear()
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    for size in (16, 32, 16):
        flex._compiled(1, 2, size)
    assert len(resets) == 2
    flex._compiled.cache_clear()
