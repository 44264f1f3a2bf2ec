"""Layers and masks that the kernels are compared, compiled and tuned with; variants own them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from lit_probattn.attention import Attention, variants
from lit_probattn.attention.layer import split_heads
from lit_probattn.base.errors import ConfigError


@dataclass(frozen=True)
class Case:
    """An `Example` of a variant, and the variant.

    Args:
        options: its arguments; two heads unless they say otherwise.
        masks: any of causal, key, pairs, bias, dropout.
    """

    name: str
    layer: Callable[..., Attention]
    options: Mapping[str, Any] = field(default_factory=dict)
    masks: tuple[str, ...] = ()


def cases_of(kind: Literal["kernel_examples", "kernel_forms"]) -> list[Case]:
    """Return what the variants declare; a class that is derived from another has its own only."""
    return [
        Case(example.name, cls, example.options, example.masks)
        for cls in variants().values()
        for example in vars(cls).get(kind, ())
    ]


CASES = cases_of("kernel_examples")


def named_like(cases: list[Case], names: str | None) -> list[Case]:
    """Return the cases whose name contains a comma-separated part; a ConfigError without any."""
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


def compile_cases() -> list[Case]:
    """Return the cases whose kernels the compile table lists: each form once, causal.

    Forms with pairs are there with attention dropout, too.
    """
    forms = [replace(case, masks=("causal",)) for case in cases_of("kernel_forms")]
    return forms + [
        replace(case, name=f"{case.name} with dropout", masks=("causal", "dropout"))
        for case in forms
        if "linear" not in case.name
    ]
