"""Cores for the heads of a host, and their list, which a swapped module owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_probattn.attention import Attention
from lit_probattn.attention.call import HeadCall, HeadLayout, key_or_fresh, with_dropout
from lit_probattn.attention.core import Core
from lit_probattn.attention.engines.table import LACKS_OF_CROSS_ATTENTION
from lit_probattn.attention.layer import PROJECTIONS
from lit_probattn.attention.own.derived import DerivedCore
from lit_probattn.attention.variant import first_lack
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.torch_internals import outside_functions
from lit_probattn.interop.swap.classes import parameter_of
from lit_probattn.interop.swap.core import fitted_call, joined, scaled
from lit_probattn.interop.swap.settings import Settings

Value = TypeVar("Value")


@dataclass
class Sharing:
    """Relation between the heads of a core and of the host.

    Args:
        groups: the merged query heads of every head. None means that no heads were merged.
        weight: name of the parameter that computes keys, below the module. None unless keys have
            components that the host does not compute.
        bias: name of their bias, if any.
        axis: axis of the weight with the heads.
        rows: rows of the weight, in the order of the host's key heads.
        bias_rows: rows of the bias.
        repeats: number of times the host repeats each key head.
        selected: names below the module of the weights that store some rows, or to which further
            components of keys belong.
    """

    groups: list[list[int]] | None = None
    weight: str | None = None
    bias: str | None = None
    axis: int = 0
    rows: list[int] = field(default_factory=list)
    bias_rows: list[int] = field(default_factory=list)
    repeats: int = 1
    selected: tuple[str, ...] = ()


class Cores(nn.ModuleList):
    """The cores of one module, in the order of its calls in a forward.

    An entry is a core, or a layer with hooks and without projections.

    Args:
        mode: routes the calls of a forward to the entries; None if the library does.
    """

    def __init__(self, mode: Callable[[nn.Module], Any] | None) -> None:
        super().__init__()
        self.mode = mode
        self.sharing: list[Sharing] = []
        self.tokens: Tensor | None = None  # of the current forward, if an entry reads them

    def core(self, index: int) -> Core:
        """Return the core of a call."""
        return core_of(self[index])

    def call(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
        **options: Any,
    ) -> HeadCall:
        """Return the call of a core for heads of the host; see `fitted_call`.

        The first heads are the merged ones. `factors`, (1, H, 1, 1), multiply the products of
        queries and keys.
        """
        core, groups = self.core(index), self.sharing[index].groups
        if groups is not None:
            query, value = query[:, : core.layout.query], value[:, : core.layout.value]
            mask, bias, factors = (joined(x, groups) for x in (mask, bias, factors))
        if factors is not None:
            query, key = scaled(core, query, key, factors)
        return fitted_call(core, query, key, value, mask=mask, bias=bias, **options)

    def attend(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        dropout: float = 0.0,
        needs_weights: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output (B, H, N, E_v) and, if requested, weights; dropped heads give zeros.

        Args:
            index: index of the call.
            query: (B, H, N, E).
            key: (B, H_kv·K, L, E).
            value: (B, H_kv, L, E_v).
            dropout: probability.
            needs_weights: whether to return attention weights.
            options: masks, bias, scale and documents; see `head_call`.
        """
        core, weights = self.core(index), None
        with outside_functions():  # calls made here are not sites of an enclosing module
            call = with_dropout(self.call(index, query, key, value, **options), dropout)
            layer: Any = self[index]
            reads = token_hooks(layer)
            tokens = self._tokens_for(query) if reads else query
            if "query_side" in reads:
                call = replace(call, side=layer.query_side(tokens))
            if needs_weights:
                call = replace(call, rng=key_or_fresh(call.rng))
                weights = core.weights(call)
            out: Tensor = core(call)
            if "gate" in reads:
                out = layer.gate(out, tokens)
            return F.pad(out, (0, 0, 0, 0, 0, query.shape[1] - out.shape[1])), weights

    @property
    def reads_tokens(self) -> bool:
        """Whether an entry reads the tokens of queries, in addition to their heads."""
        return any(map(token_hooks, self))

    def _tokens_for(self, query: Tensor) -> Tensor:
        """Return the tokens of queries, (B, N, C).

        Raises:
            RuntimeError: the module did not receive them.
        """
        tokens = self.tokens
        if tokens is None or tokens.shape[:2] != (query.shape[0], query.shape[2]):
            found = None if tokens is None else tuple(tokens.shape)
            raise RuntimeError(
                f"the variant reads {query.shape[2]} tokens of {query.shape[0]} samples in "
                f"addition to their heads; the module's first tensor is {found}"
            )
        return tokens

    def twins(self, module: nn.Module) -> TensorMap[list[Tensor]]:
        """Return the parameters of further components by those that compute keys."""
        found: TensorMap[list[Tensor]] = TensorMap()
        for core, sharing in zip(self, self.sharing, strict=True):
            more: Any = core
            parts = (
                (sharing.weight, "key_weight", sharing.axis, sharing.rows),
                (sharing.bias, "key_bias", 0, sharing.bias_rows),
            )
            for name, own, axis, rows in parts:
                if name is None:
                    continue
                held = parameter_of(module, name)
                found.set(held, [_with(held, axis, rows, part) for part in getattr(more, own)])
        return found

    def check_weights(self, module: nn.Module) -> None:
        """Check that the weights of which the swap selected rows are those of the module.

        A wrapper (an adapter) would be merged into rows that are not stored.

        Raises:
            RuntimeError: a layer was wrapped or replaced after the swap.
        """
        for sharing in self.sharing:
            for name in sharing.selected:
                parameter_of(module, name)


class TensorMap(Generic[Value]):
    """Values of tensors, which are compared by identity; PyTorch 2.11 does not compile `id`."""

    def __init__(self) -> None:
        self.entries: list[tuple[Tensor, Value]] = []

    def get(self, tensor: Any) -> Value | None:
        """Return the value of a tensor; None if it has none."""
        for held, value in self.entries:
            if held is tensor:
                return value
        return None

    def set(self, tensor: Tensor, value: Value) -> None:
        """Set the value of a tensor."""
        self.entries = [(t, v) for t, v in self.entries if t is not tensor]
        self.entries.append((tensor, value))


def _with(held: Tensor, axis: int, rows: list[int], part: Tensor) -> Tensor:
    """Return a tensor with some rows replaced."""
    first, count = rows[0], len(rows)
    if rows == list(range(first, first + count)):
        rest = held.shape[axis] - first - count
        after = held.narrow(axis, first + count, rest)
        return torch.cat([held.narrow(axis, 0, first), part, after], axis)
    return held.index_copy(axis, torch.tensor(rows, device=held.device), part)


def token_hooks(part: nn.Module) -> tuple[str, ...]:
    """Return the hooks of an entry that read the tokens of queries."""
    hooks = part.hooks() if isinstance(part, Attention) else ()
    return tuple(name for name in hooks if name in ("gate", "query_side"))


def core_of(part: Any) -> Core:
    """Return the core of an entry of `Cores`."""
    core: Core = part.core if isinstance(part, Attention) else part
    return core


def make_core(settings: Settings, given: HeadLayout, is_cross: bool, width: int = 0) -> nn.Module:
    """Return the entry of `Cores` that computes the heads of a host, or joined heads.

    Shared keys and values are repeated if the variant has a separate head for each query head.
    Variants with global heads have as many as the host has heads. Neither holds for joined heads,
    which have several keys each.

    Args:
        settings: variant and options.
        given: the host's heads, or the heads after the swap.
        is_cross: whether queries attend to another sequence.
        width: width of the tokens that the module receives; 0 if it receives none.

    Raises:
        UnsupportedError: the variant has other heads, or does not support the options or the host.
    """
    joins, reason = given.keys_per_head > 1, ""
    tries: Iterable[tuple[HeadLayout, dict[str, Any]]] = [(given, {})]
    if not joins:
        every = replace(given, key=given.query, value=given.query)
        tries = product(dict.fromkeys((given, every)), _choices(settings.options))
    for wanted, more in tries:
        try:
            part = _part(settings, wanted, more, width)
        except (TypeError, ValueError) as error:
            reason = reason or str(error)
            continue
        core = core_of(part)
        if core.layout == wanted:
            _check(core, is_cross and not joins)
            return part
        whose = "joined heads are" if joins else "host has"
        reason = f"{settings.variant} has {heads_of(core.layout)}, the {whose} {heads_of(given)}"
        if core.layout.keys_per_head > 1 and not joins:
            share = f"1/{core.layout.keys_per_head}"
            reason += f"; set heads={share}, or use a variant with one key per head"
    raise UnsupportedError(reason)


def _choices(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return options to try: unchanged, and with one global head per head."""
    if {"head_ratio", "num_global_heads"} & options.keys():
        return [{}]
    return [{}, {"head_ratio": 1.0, "num_global_heads": None}]


def _part(settings: Settings, heads: HeadLayout, more: Mapping[str, Any], width: int) -> Any:
    if settings.has_own_core:
        if more:
            raise ValueError("a variant without global heads")
        return settings.make_core(heads)
    given: dict[str, Any] = {"dropout": 0.0, "head_dim": heads.head_dim, **settings.options, **more}
    if heads.key != heads.query:
        given["num_kv_heads"] = heads.key
    if heads.value_head_dim != heads.head_dim:
        given["value_head_dim"] = heads.value_head_dim
    layer = settings.make_layer(width or heads.head_dim * heads.query, heads.query, **given)
    reads = token_hooks(layer)
    if reads and not width:
        raise ValueError(
            f"{type(layer).__name__} defines {', '.join(reads)}, which read the input of its "
            "layer, but the module does not receive the tokens of its queries"
        )
    if not isinstance(layer.core, DerivedCore) and not reads:
        return layer.core
    for name in PROJECTIONS:
        delattr(layer, name)
    return layer


def _check(core: Core, is_cross: bool) -> None:
    if core.has_m_step:
        raise UnsupportedError("its M-step requires this package's training loop")
    reason = first_lack(core.needs(), LACKS_OF_CROSS_ATTENTION) if is_cross else None
    if reason is not None:
        raise UnsupportedError(f"{core.name} {reason}, and here queries attend to another sequence")


def heads_of(layout: HeadLayout) -> str:
    """Return the number and size of heads as text."""
    keys = f"{layout.key}"
    if layout.keys_per_head > 1:
        keys += f" x {layout.keys_per_head}"
    sizes = f"{layout.head_dim}"
    if layout.value_head_dim != layout.head_dim:
        sizes += f" and {layout.value_head_dim}"
    return f"{layout.query} query, {keys} key and {layout.value} value heads of {sizes}"
