"""Attention variants: equation, normal form, parameters and cost of each.

Names are imported on first use; `__init__.pyi` lists them, one per line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_probattn.base.lazy import exports

if TYPE_CHECKING:
    from lit_probattn.attention.layer import Attention

__getattr__, __dir__, _names = exports(__name__)
__all__ = sorted([*_names, "variants"])


def variants() -> dict[str, type[Attention]]:
    """Return the attention layers that this package exports, by name."""
    found: dict[str, Any] = {name: __getattr__(name) for name in _names}
    base = found["Attention"]
    return {
        name: item
        for name, item in found.items()
        if isinstance(item, type) and issubclass(item, base) and item is not base
    }
