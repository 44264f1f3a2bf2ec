"""Layers and masks with which the kernels are compared, compiled and tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lit_probattn.attention import (
    Attention,
    FiSHAttention,
    LinearAttention,
    LinearFiSHAttention,
    MGKAttention,
    MLKAttention,
    SoftmaxAttention,
)
from lit_probattn.attention.layer import split_heads
from lit_probattn.base.errors import ConfigError


@dataclass(frozen=True)
class Case:
    """A variant with options, and the masks of its call.

    Args:
        name: name in tables and tests.
        layer: class of the variant.
        options: its arguments; two heads by default.
        masks: any of causal, key, pairs, bias, dropout.
    """

    name: str
    layer: Callable[..., Attention]
    options: Mapping[str, Any] = field(default_factory=dict)
    masks: tuple[str, ...] = ()


_3_HEADS = {"num_heads": 3, "num_global_heads": 2}
_NOISY = {**_3_HEADS, "noise_scale": 0.3}
_8_HEADS = {"num_heads": 8, "num_global_heads": 2}
_MIXED = {**_3_HEADS, "mixer": "mlp", "mixing_bias": "all", "noise": "none"}
_SHIFTED = {"num_components": 2, "shifted_keys": True}

# Cases in which the fused kernels are compared with the reference.
CASES = [
    Case("fish hard", FiSHAttention, {**_3_HEADS, "noise": "none"}, ("causal", "pairs")),
    Case("fish", FiSHAttention, _NOISY, ("key",)),
    Case("fish, noise per head", FiSHAttention, {**_NOISY, "noise": "local"}, ("pairs",)),
    Case(
        "fish, shared mixing", FiSHAttention, {**_NOISY, "mixer": "shared"}, ("causal", "dropout")
    ),
    Case("gfish", FiSHAttention, {**_NOISY, "mixer": "mlp"}, ("causal", "key")),
    Case("gfish, mixed queries", FiSHAttention, {**_MIXED, "mix_on": "query"}, ("key", "dropout")),
    Case("gfish, mixed keys", FiSHAttention, {**_MIXED, "mix_on": "key"}, ("causal",)),
    Case("linear", LinearAttention, {"num_heads": 4, "num_kv_heads": 2}, ("causal",)),
    Case("linear fish hard", LinearFiSHAttention, {**_3_HEADS, "noise": "none"}, ("causal", "key")),
    Case("linear fish", LinearFiSHAttention, _NOISY, ("causal",)),
    Case("mgk soft", MGKAttention, {}, ("causal",)),
    Case("mgk soft, K=1", MGKAttention, {"num_components": 1}, ("key",)),
    Case(
        "mgk soft, K=3, variances 1 3 5",
        MGKAttention,
        {"num_components": 3, "variance": "paper_main"},
        ("causal", "key", "bias"),
    ),
    Case(
        "mgk soft, K=4, learned variances",
        MGKAttention,
        {"num_components": 4, "learn_variance": True, "include_log_det": True},
    ),
    Case("mgk soft, dot", MGKAttention, {"score": "dot", "variance": "paper_main"}, ("pairs",)),
    Case("mgk soft, multi-query", MGKAttention, {"num_kv_heads": 1}, ("causal", "dropout")),
    Case(
        "mgk soft, prior per position",
        MGKAttention,
        {"prior_share": "head_position", "max_positions": 2048, "prior_param": "softmax"},
    ),
    Case("mgk hard", MGKAttention, {"e_step": "hard"}, ("causal",)),
    Case(
        "mgk hard, variances 1 3 5",
        MGKAttention,
        {"e_step": "hard", "num_components": 3, "variance": "paper_main"},
        ("key",),
    ),
    Case("smgk soft", MGKAttention, {"shifted_keys": True}, ("causal",)),
    Case("smgk soft, K=4", MGKAttention, {"shifted_keys": True, "num_components": 4}, ("key",)),
    Case(
        "smgk soft, learned variances",
        MGKAttention,
        {"shifted_keys": True, "variance": "paper_main", "learn_variance": True},
        ("dropout",),
    ),
    Case(
        "smgk soft, grouped",
        MGKAttention,
        {"shifted_keys": True, "num_heads": 4, "num_kv_heads": 2},
        ("bias",),
    ),
    Case("smgk hard", MGKAttention, {"shifted_keys": True, "e_step": "hard"}, ("causal", "pairs")),
    Case("mlk", MLKAttention, {}, ("causal", "key", "dropout")),
    Case("mlk, shifted keys", MLKAttention, {"shifted_keys": True, "num_components": 3}, ("key",)),
    Case("softmax", SoftmaxAttention),
    Case("softmax, grouped", SoftmaxAttention, {"num_heads": 4, "num_kv_heads": 2}, ("causal",)),
    Case("softmax, value size 9", SoftmaxAttention, {"value_head_dim": 9}, ("key", "dropout")),
    Case("gaussian", SoftmaxAttention, {"score": "gaussian"}, ("pairs", "bias")),
]

# Each specialisation of the kernels once, for compilation.
FORMS = [
    Case("fish hard, 2 of 8", FiSHAttention, {**_8_HEADS, "noise": "none"}),
    Case("fish hard, 4 of 8", FiSHAttention, {**_8_HEADS, "num_global_heads": 4, "noise": "none"}),
    Case("fish, 2 of 8", FiSHAttention, _8_HEADS),
    Case("gfish, 2 of 8", FiSHAttention, {**_8_HEADS, "mixer": "mlp"}),
    Case("linear", LinearAttention),
    Case("linear fish, 2 of 8", LinearFiSHAttention, {**_8_HEADS, "noise": "none"}),
    Case("mgk soft", MGKAttention, {"num_components": 2}),
    Case("mgk hard", MGKAttention, {"num_components": 2, "e_step": "hard"}),
    Case("smgk soft", MGKAttention, _SHIFTED),
    Case("smgk hard", MGKAttention, {**_SHIFTED, "e_step": "hard"}),
    Case("smgk soft, variances 1 3", MGKAttention, {**_SHIFTED, "variance": "paper_main"}),
    Case("linear, mixed keys", MLKAttention),
    Case("softmax", SoftmaxAttention),
]


def named_like(cases: list[Case], names: str | None) -> list[Case]:
    """Return the cases whose name contains a comma-separated part; ConfigError if none does."""
    parts = [part.strip() for part in (names or "").split(",")]
    found = [case for case in cases if any(part in case.name for part in parts)]
    if not found:
        known = ", ".join(case.name for case in cases)
        raise ConfigError(f"no kernel name contains {names!r}; expected a part of one of: {known}")
    return found


def draw_heads(
    layer: Attention, batch: int, num_queries: int, num_keys: int, draw: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random query, stored keys and value in the memory layout of a layer's projections."""
    layout = layer.layout
    query = draw(batch, num_queries, layout.query * layout.head_dim)
    key = draw(batch, num_keys, layer.key_width)
    value = draw(batch, num_keys, layout.value * layout.value_head_dim)
    return (
        split_heads(query, layout.query),
        split_heads(key, layout.key, layout.keys_per_head),
        split_heads(value, layout.value),
    )


def compile_cases() -> list[Case]:
    """Return the cases of the compile table: each specialisation once, causal.

    Kernels that loop over pairs are also listed with attention dropout.
    """
    forms = [replace(case, masks=("causal",)) for case in FORMS]
    return forms + [
        replace(case, name=f"{case.name} with dropout", masks=("causal", "dropout"))
        for case in forms
        if "linear" not in case.name
    ]
