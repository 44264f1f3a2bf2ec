"""The layers and masks that the kernels are compared, compiled and tuned with."""

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
from lit_probattn.configs import ConfigError

_FISH = {"num_heads": 3, "num_global_heads": 2, "noise_scale": 0.3}


@dataclass(frozen=True)
class Case:
    """A layer and the masks that it is tested with.

    Args:
        name: what the table prints.
        layer: the class.
        options: its arguments; two heads unless they say otherwise.
        masks: any of causal, key, pairs, bias, dropout.
    """

    name: str
    layer: Callable[..., Attention]
    options: Mapping[str, Any] = field(default_factory=dict)
    masks: tuple[str, ...] = ()


CASES: list[Case] = [
    Case("softmax", SoftmaxAttention),
    Case("softmax, grouped", SoftmaxAttention, {"num_heads": 4, "num_kv_heads": 2}, ("causal",)),
    Case("softmax, value size 9", SoftmaxAttention, {"value_head_dim": 9}, ("key", "dropout")),
    Case("gaussian", SoftmaxAttention, {"score": "gaussian"}, ("pairs", "bias")),
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
        {"prior_share": "head_position", "max_positions": 64, "prior_param": "softmax"},
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
        "smgk soft, mixtures per query head",
        MGKAttention,
        {"shifted_keys": True, "num_heads": 4, "num_kv_heads": 2, "mixture_heads": "query"},
        ("bias",),
    ),
    Case("smgk hard", MGKAttention, {"shifted_keys": True, "e_step": "hard"}, ("causal", "pairs")),
    Case("fish hard", FiSHAttention, {**_FISH, "noise": "none"}, ("causal", "pairs")),
    Case("fish", FiSHAttention, _FISH, ("key",)),
    Case("fish, noise per head", FiSHAttention, {**_FISH, "noise": "local"}, ("pairs",)),
    Case("fish, shared mixing", FiSHAttention, {**_FISH, "mixer": "shared"}, ("causal", "dropout")),
    Case("gfish", FiSHAttention, {**_FISH, "mixer": "mlp"}, ("causal", "key")),
    Case("linear", LinearAttention, {"num_heads": 4, "num_kv_heads": 2}, ("causal",)),
    Case("mlk", MLKAttention, {}, ("causal", "key", "dropout")),
    Case("mlk, shifted keys", MLKAttention, {"shifted_keys": True, "num_components": 3}, ("key",)),
    Case("linear fish hard", LinearFiSHAttention, {**_FISH, "noise": "none"}, ("causal", "key")),
    Case("linear fish", LinearFiSHAttention, _FISH, ("causal",)),
    Case("linear fish, own normaliser", LinearFiSHAttention, {**_FISH, "normalizer": "nonneg"}),
]


def named_like(cases: list[Case], names: str | None) -> list[Case]:
    """Return the cases whose name contains one of the comma-separated parts.

    Raises:
        ConfigError: none does.
    """
    parts = [part.strip() for part in (names or "").split(",")]
    found = [case for case in cases if any(part in case.name for part in parts)]
    if not found:
        known = ", ".join(case.name for case in cases)
        raise ConfigError(f"no kernel is named like {names!r}; expected a part of one of: {known}")
    return found


def draw_heads(
    layer: Attention, batch: int, num_queries: int, num_keys: int, draw: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, stored keys and value of a layer as projections of drawn numbers would be."""
    layout = layer.layout
    query = draw(batch, num_queries, layout.query * layout.head_dim)
    key = draw(batch, num_keys, layer.key_width)
    value = draw(batch, num_keys, layout.value * layout.value_head_dim)
    return (
        split_heads(query, layout.query),
        split_heads(key, layout.key, layout.keys_per_head),
        split_heads(value, layout.value),
    )


def _of_8(num_global_heads: int) -> dict[str, int]:
    return {"num_heads": 8, "num_global_heads": num_global_heads}


def compile_cases() -> list[Case]:
    """Return the cases whose kernels the compile table lists: each form once, causal."""
    mixture = {"num_components": 2}
    cases = [
        Case("softmax", SoftmaxAttention),
        Case("mgk soft", MGKAttention, mixture),
        Case("mgk hard", MGKAttention, {**mixture, "e_step": "hard"}),
        Case("smgk soft", MGKAttention, {**mixture, "shifted_keys": True}),
        Case("smgk hard", MGKAttention, {**mixture, "shifted_keys": True, "e_step": "hard"}),
        Case(
            "smgk soft, variances 1 3",
            MGKAttention,
            {**mixture, "shifted_keys": True, "variance": "paper_main"},
        ),
        Case("fish hard, 2 of 8", FiSHAttention, {**_of_8(2), "noise": "none"}),
        Case("fish hard, 4 of 8", FiSHAttention, {**_of_8(4), "noise": "none"}),
        Case("fish, 2 of 8", FiSHAttention, _of_8(2)),
        Case("gfish, 2 of 8", FiSHAttention, {**_of_8(2), "mixer": "mlp"}),
        Case("linear", LinearAttention),
        Case("linear fish, 2 of 8", LinearFiSHAttention, {**_of_8(2), "noise": "none"}),
    ]
    return [replace(case, masks=("causal",)) for case in cases]
