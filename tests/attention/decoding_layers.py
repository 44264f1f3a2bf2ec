"""The layers that decoding is tested with, by name."""

from __future__ import annotations

import torch

from lit_probattn.attention import (
    FiSHAttention,
    LinearAttention,
    MGKAttention,
    MLKAttention,
    ReleasedMGKAttention,
    SoftmaxAttention,
)

B, N, C, E = 2, 13, 11, 6
POSITIONS = {"prior_share": "head_position", "max_positions": 31}
LAYERS = {
    "softmax": (SoftmaxAttention, {"num_heads": 3}),
    "softmax, grouped, rotary": (
        SoftmaxAttention,
        {"num_heads": 6, "num_kv_heads": 3, "rotary_dim": 4},
    ),
    "gaussian, grouped": (
        SoftmaxAttention,
        {"num_heads": 6, "num_kv_heads": 2, "score": "gaussian"},
    ),
    "mgk": (MGKAttention, {"num_heads": 3}),
    "mgk, K=3, unequal, grouped": (
        MGKAttention,
        {"num_heads": 6, "num_kv_heads": 3, "num_components": 3, "variance": "paper_main"},
    ),
    "mgk, hard, rotary": (
        MGKAttention,
        {"num_heads": 3, "e_step": "hard", "variance": "code_lm", "rotary_dim": 6},
    ),
    "mgk, dot, log det": (
        MGKAttention,
        {"num_heads": 3, "score": "dot", "variance": "paper_main", "include_log_det": True},
    ),
    "mgk, per position, row eps": (
        ReleasedMGKAttention,
        {"num_heads": 3, "row_eps": 0.01, "variance": "code_lm", **POSITIONS},
    ),
    "mgk, equal, row eps": (ReleasedMGKAttention, {"num_heads": 3, "row_eps": 0.01}),
    "smgk": (MGKAttention, {"num_heads": 3, "shifted_keys": True}),
    "smgk, unequal, grouped": (
        MGKAttention,
        {
            "num_heads": 6,
            "num_kv_heads": 3,
            "shifted_keys": True,
            "variance": "paper_main",
        },
    ),
    "smgk, hard": (
        MGKAttention,
        {"num_heads": 3, "shifted_keys": True, "e_step": "hard", "variance": "code_lm"},
    ),
    **{
        f"smgk, rotary, shift {shift}": (
            MGKAttention,
            {"num_heads": 3, "shifted_keys": True, "rotary_dim": 4, "rotary_shift": shift},
        )
        for shift in ("before", "after", "unrotated")
    },
    "fish": (FiSHAttention, {"num_heads": 4, "num_global_heads": 2}),
    "fish, noise at evaluation": (
        FiSHAttention,
        {"num_heads": 4, "num_global_heads": 2, "noise_scale": 0.3, "noise_at_eval": True},
    ),
    "gfish": (FiSHAttention, {"num_heads": 4, "num_global_heads": 2, "mixer": "mlp"}),
    "mish": (FiSHAttention, {"num_heads": 4, "num_global_heads": 2, "mixer": "shared"}),
    "fish as written, noise per head at evaluation": (
        FiSHAttention,
        {"num_heads": 4, "mixer": "relu_sum", "noise": "local", "noise_at_eval": True},
    ),
    "fish, mixed keys": (
        FiSHAttention,
        {"num_heads": 4, "num_global_heads": 2, "mix_on": "key", "noise": "none"},
    ),
    "linear": (LinearAttention, {"num_heads": 3}),
    "linear, favor, grouped": (
        LinearAttention,
        {"num_heads": 6, "num_kv_heads": 3, "feature_map": "favor"},
    ),
    "linear, favor, normalised": (
        LinearAttention,
        {"num_heads": 3, "feature_map": "favor", "feature_norm": "sum"},
    ),
    "linear, dpfp, multi-query": (
        LinearAttention,
        {"num_heads": 3, "num_kv_heads": 1, "feature_map": "dpfp"},
    ),
    "mlk": (MLKAttention, {"num_heads": 3}),
    "mlk, favor": (MLKAttention, {"num_heads": 3, "feature_map": "favor"}),
    "mlk, per position": (MLKAttention, {"num_heads": 3, **POSITIONS}),
    "smlk": (MLKAttention, {"num_heads": 3, "shifted_keys": True}),
}
CACHED = [
    name for name, (cls, _) in LAYERS.items() if not issubclass(cls, LinearAttention | MLKAttention)
]


def make(name, **options):
    cls, kind = LAYERS[name]
    layer = cls(C, head_dim=E, **{**kind, **options}).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.rand_like(parameter)
    return layer
