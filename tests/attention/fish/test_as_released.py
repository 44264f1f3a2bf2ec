"""Presets of the released FiSH code: the draws of the mixture, and starts.

What they compute is compared with the released modules in tests/convert/test_layer_names.py.
"""

from __future__ import annotations

import torch

from lit_probattn.attention import FiSHAttention, HeadCall
from lit_probattn.attention.masks import Masks
from lit_probattn.base.config_files import run_stem
from lit_probattn.configs import attention_entry
from lit_probattn.randomness import RandomKey
from tests.support.paths import shipped

FILES = {run_stem(path): path for path in shipped("attention") if "as_released" in path.parts}
LENGTH, EMBED, HEAD = 13, 11, 5


def make(name, **extra):
    spec = attention_entry(FILES[name])
    assert spec["class_path"] == "lit_probattn.attention.FiSHAttention"
    sizes = {"embed_dim": EMBED, "head_dim": HEAD}
    return FiSHAttention(**{**sizes, **spec["init_args"], **extra})


def test_mixture_draws_for_every_local_and_global_head():
    """The code sums p_k (G_k + s ε_jk) over k; ours draws that sum's normal directly."""
    layer = make("lm_mish").double()
    assert layer.core.noise_kind == "local_global"
    with torch.no_grad():
        layer.core.mixing.weights[0].normal_()
        layer.core.noise_scale.theta.fill_(0.7)
    zeros = torch.zeros(1, 2, 256, HEAD, dtype=torch.float64)
    call = HeadCall(zeros, zeros, zeros, Masks(256, 256), rng=RandomKey(1))
    drawn = layer.core.variant(call).scores(call)[0]
    drawn = drawn.detach().flatten(1) * HEAD**0.5
    s = 0.7**2
    generator = torch.Generator().manual_seed(1)
    literal = torch.randn(8, 2, 256 * 256, generator=generator, dtype=torch.float64)
    literal = (layer.core.mixing.weights[0].detach()[0][:, None] * s * literal).sum(1)
    assert (drawn.std(1) / literal.std(1) - 1).abs().max() < 0.02
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.02


def test_released_starts():
    for name in ("lm_gfish", "lm_mish", "translation_gfish"):
        theta = make(name).core.noise_scale.theta
        torch.testing.assert_close(theta, torch.full_like(theta, 0.1))
    assert make("lm_gfish").core.noise_scale.theta.shape == (2,)
    assert make("translation_gfish").core.noise_scale.theta.shape == (1,)
    assert make("lm_gfish").core.mixing.weights[1].abs().max() < 0.12
