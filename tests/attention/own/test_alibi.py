"""MGK with ALiBi: one class of its equation and normal form, and every engine supports it."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.attention.mgk.core import MGKCore
from lit_probattn.attention.own.contract import CHECKS, backends_for
from tests.attention.own.alibi import ALiBiMGKAttention, ramp

FORMS = {
    "mgk": {},
    "smgk": {"shifted_keys": True, "variance": "paper_main"},
    "hard": {"e_step": "hard"},
    "grouped": {"num_heads": 4, "num_kv_heads": 2, "shifted_keys": True},
}
N, C, E = 13, 11, 5


def make(**options):
    return ALiBiMGKAttention(C, head_dim=E, **{"num_heads": 3, **options})


@pytest.mark.parametrize("form", FORMS)
def test_it_is_mgk_with_a_bias_of_distances_on_every_engine(form):
    torch.manual_seed(3)
    layer = make(**FORMS[form]).double()
    plain = layer.make_core(MGKCore)
    plain.double().load_state_dict(layer.core.state_dict())
    x, i = torch.randn(2, N, C, dtype=torch.float64), torch.arange(N)
    bias = -ramp(layer.num_heads, 2, x)[..., 1:] * (i[:, None] - i)
    call = layer.call(x, is_causal=True)
    biased = layer.call(x, is_causal=True, bias=bias[None])
    expected = plain(biased)
    wanted = torch.autograd.grad(expected.square().sum(), layer.key_proj.weight)
    supported = backends_for(layer, x, is_causal=True)
    assert {"reference", "blockwise"} <= set(supported)
    assert ("sdpa" in supported) == (form != "hard")
    for backend in supported:
        layer.core.backend = backend
        call = layer.call(x, is_causal=True)
        found = layer.core(call)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        grads = torch.autograd.grad(found.square().sum(), layer.key_proj.weight)
        torch.testing.assert_close(grads, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("check", CHECKS)
def test_it_keeps_the_promises_of_every_layer(check):
    CHECKS[check].run(lambda **o: make(**{"shifted_keys": True, **o}))
