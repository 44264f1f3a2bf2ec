"""The layers that decoding is tested with, by name: those of the kernels, and their caches' own."""

from __future__ import annotations

import torch

from lit_probattn.attention import (
    FiSHAttention,
    KVCache,
    LinearAttention,
    MGKAttention,
    MLKAttention,
    ReleasedMGKAttention,
    SoftmaxAttention,
)
from profiling.kernels.cases import CASES

B, N, C, E = 2, 13, 11, 5
GROUPED = {"num_heads": 6, "num_kv_heads": 3}
SHIFTED = {"shifted_keys": True, "variance": "paper_main"}
FISH = {"num_heads": 4, "noise_at_eval": True}
LAYERS = {
    **{case.name.replace(" soft", ""): (case.layer, dict(case.options)) for case in CASES},
    "softmax, grouped, rotary": (
        SoftmaxAttention,
        {**GROUPED, "rotary_dim": 4},
    ),
    "mgk hard, rotary": (
        MGKAttention,
        {**GROUPED, "e_step": "hard", "variance": "code_lm", "rotary_dim": 4},
    ),
    "mgk, unequal, row eps": (
        ReleasedMGKAttention,
        {**GROUPED, "row_eps": 0.01, "variance": "code_lm"},
    ),
    "mgk, equal, row eps": (ReleasedMGKAttention, {"row_eps": 0.01}),
    **{
        f"smgk, rotary, shift {shift}": (
            MGKAttention,
            {**GROUPED, **SHIFTED, "rotary_dim": 4, "rotary_shift": shift},
        )
        for shift in ("before", "after", "unrotated")
    },
    "fish, noise at evaluation": (
        FiSHAttention,
        {**FISH, "num_global_heads": 2, "noise_scale": 0.3},
    ),
    "fish as written, noise per head at evaluation": (
        FiSHAttention,
        {**FISH, "mixer": "relu_sum", "noise": "local"},
    ),
    "linear, favor, grouped": (
        LinearAttention,
        {**GROUPED, "feature_map": "favor"},
    ),
    "linear, favor, normalised": (
        LinearAttention,
        {"feature_map": "favor", "feature_norm": "sum"},
    ),
    "linear, dpfp, multi-query": (LinearAttention, {"num_kv_heads": 1, "feature_map": "dpfp"}),
    "mlk, favor": (MLKAttention, {"feature_map": "favor"}),
    "mlk, per position": (MLKAttention, {"prior_share": "head_position", "max_positions": 31}),
}
LAYERS = {name: (cls, {"num_heads": 3, **options}) for name, (cls, options) in LAYERS.items()}


def make(name, **options):
    cls, kind = LAYERS[name]
    layer = cls(C, head_dim=E, **{**kind, **options}).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.rand_like(parameter)
    return layer


CACHED = [name for name in LAYERS if isinstance(make(name).new_cache(), KVCache)]
