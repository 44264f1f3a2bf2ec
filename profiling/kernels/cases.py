"""Layers and masks that the kernels are compared, compiled and tuned with; variants own them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lit_probattn.attention import Attention, variants


@dataclass(frozen=True)
class Case:
    """An `Example` of a variant, and the variant.

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


def cases_of(kind: Literal["kernel_examples", "kernel_forms"]) -> list[Case]:
    """Return what the variants declare; a class that is derived from another has its own only."""
    return [
        Case(example.name, cls, example.options, example.masks)
        for cls in variants().values()
        for example in vars(cls).get(kind, ())
    ]


CASES = cases_of("kernel_examples")


def compile_cases() -> list[Case]:
    """Return the cases whose kernels the compile table lists: each form once, causal."""
    return [replace(case, masks=("causal",)) for case in cases_of("kernel_forms")]
