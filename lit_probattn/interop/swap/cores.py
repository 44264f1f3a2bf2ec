"""Cores for the heads that a host gives, and the list of them that a swapped module owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lit_probattn.attention import Attention
from lit_probattn.attention.call import HeadLayout
from lit_probattn.attention.core import Core
from lit_probattn.attention.engines.table import LACKS_OF_CROSS_ATTENTION
from lit_probattn.attention.layer import PROJECTIONS
from lit_probattn.attention.own.derived import DerivedCore
from lit_probattn.attention.variant import first_lack
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.interop.swap.settings import Settings


class Cores(nn.ModuleList):
    """What computes the attention of one module, in the order of its calls in a forward.

    An entry is a core, or a layer of scores of its own without its projections.

    Args:
        mode: what gives the calls inside a forward to the entries; None where a library does.
    """

    def __init__(self, mode: Callable[[nn.Module], Any] | None) -> None:
        super().__init__()
        self.mode = mode

    def core(self, index: int) -> Core:
        """Return the core of a call."""
        found: Any = self[index]
        core: Core = found.core if isinstance(found, Attention) else found
        return core


def make_core(settings: Settings, given: HeadLayout, is_cross: bool) -> nn.Module:
    """Return what computes the heads of a host, an entry of `Cores`.

    Keys and values that query heads share are repeated where the variant has a head of its own for
    each. Variants with global heads have as many as the host has.

    Args:
        settings: variant and options.
        given: the host's heads.
        is_cross: whether queries attend to another sequence.

    Raises:
        UnsupportedError: the variant takes other heads, or does not fit the options or the host.
    """
    every = replace(given, key=given.query, value=given.query)
    reason = ""
    for wanted in dict.fromkeys((given, every)):
        for more in _choices(settings.options):
            try:
                part = _part(settings, wanted, more)
            except (TypeError, ValueError) as error:
                reason = reason or str(error)
                continue
            core = part.core if isinstance(part, Attention) else part
            if core.layout == wanted:
                _check(core, is_cross)
                return part
            taken, hosts = heads_of(core.layout), heads_of(given)
            reason = f"{settings.variant} takes {taken}, the host gives {hosts}"
            if core.layout.keys_per_head > 1:
                share = f"1/{core.layout.keys_per_head}"
                reason += f"; give heads={share}, or use a variant with one key per head"
    raise UnsupportedError(reason)


def _choices(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield options to try: as given, and with a global head for every head."""
    yield {}
    if not {"head_ratio", "num_global_heads"} & options.keys():
        yield {"head_ratio": 1.0, "num_global_heads": None}


def _part(settings: Settings, heads: HeadLayout, more: Mapping[str, Any]) -> Any:
    if settings.has_own_core:
        if more:
            raise ValueError("a variant without global heads")
        return settings.make_core(heads)
    given: dict[str, Any] = {"dropout": 0.0, "head_dim": heads.head_dim, **settings.options, **more}
    if heads.key != heads.query:
        given["num_kv_heads"] = heads.key
    if heads.value_head_dim != heads.head_dim:
        given["value_head_dim"] = heads.value_head_dim
    layer = settings.make_layer(heads.head_dim * heads.query, heads.query, **given)
    of_input = [name for name in layer.hooks() if name in ("query_side", "gate")]
    if of_input:
        raise ValueError(
            f"{type(layer).__name__} defines {', '.join(of_input)}, which read the input of its "
            f"layer: a swap has heads alone"
        )
    if not isinstance(layer.core, DerivedCore):
        return layer.core
    for name in PROJECTIONS:
        delattr(layer, name)
    return layer


def _check(core: Core, is_cross: bool) -> None:
    if core.has_m_step:
        raise UnsupportedError("its M-step needs our training loop")
    reason = first_lack(core.needs(), LACKS_OF_CROSS_ATTENTION) if is_cross else None
    if reason is not None:
        raise UnsupportedError(f"{core.name} {reason}, and here queries attend to another sequence")


def heads_of(layout: HeadLayout) -> str:
    """Say how many heads there are, and of which size."""
    keys = f"{layout.key}"
    if layout.keys_per_head > 1:
        keys += f" x {layout.keys_per_head}"
    sizes = f"{layout.head_dim}"
    if layout.value_head_dim != layout.head_dim:
        sizes += f" and {layout.value_head_dim}"
    return f"{layout.query} query, {keys} key and {layout.value} value heads of {sizes}"
