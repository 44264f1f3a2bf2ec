"""The layers and masks that the kernels are compared, compiled and tuned with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lit_probattn.attention import (
    Attention,
    FiSHAttention,
    LinearAttention,
    LinearFiSHAttention,
    MGKAttention,
    MLKAttention,
    SoftmaxAttention,
)

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
