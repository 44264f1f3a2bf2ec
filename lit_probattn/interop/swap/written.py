"""Attention in separate operations: products of queries and keys are followed to their softmax.

The core's attention weights replace the softmax of the host's scores. Both are stored, and so are
summands of the host's products: about three times the memory of the host's weights, and no fused
backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_probattn.base.torch_internals import outside_functions
from lit_probattn.interop.swap.cores import TensorMap
from lit_probattn.interop.swap.taking import Attending

T = torch.Tensor
SOFTMAX = {F.softmax, torch.softmax, T.softmax}
_PRODUCTS = {torch.matmul, T.matmul, T.__matmul__, torch.bmm, T.bmm}
_ADDED_PRODUCTS = {torch.baddbmm, T.baddbmm}
_FACTORS = {torch.mul, T.mul, T.__mul__, T.__rmul__, T.mul_, T.__imul__}
_DIVISORS = {torch.div, T.div, T.__truediv__, T.div_, T.__itruediv__}
_SUMS = {torch.add, T.add, T.__add__, T.__radd__, T.add_, T.__iadd__}
_SUMS |= {torch.masked_fill, T.masked_fill, T.masked_fill_, torch.where, T.where}
_FORMS = {T.view, T.reshape, torch.reshape, T.to, T.float, T.contiguous, T.type_as, T.unflatten}
_FORMS |= {T.unsqueeze, T.squeeze, T.clone}


_CHANGES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__"}
_CHANGES |= {"__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__"}


def in_order(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return positional arguments, then the tensors that are given by name."""
    return (*args, *(kwargs[name] for name in ("input", "other", "mat2") if name in kwargs))


def over_keys(args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether the arguments of a softmax, in order, select the last axis."""
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    return axis in (-1, args[0].dim() - 1)


def _is_in_place(func: Any, kwargs: Any) -> bool:
    """Whether a function changes one of its arguments."""
    name = getattr(func, "__name__", "")
    changes = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
    return changes or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


@dataclass(frozen=True)
class Product:
    """Scores factor · query keyᵀ, possibly with a summand.

    Args:
        query: (…, N, E).
        key_t: (…, E, L).
        factor: a number.
        factors: an additional factor per head, (…, 1, 1).
        added: whether a mask or bias is added.
    """

    query: Tensor
    key_t: Tensor
    factor: float = 1.0
    factors: Tensor | None = None
    added: bool = False

    def keys(self, key_t: Tensor, lead: torch.Size) -> Tensor:
        """Return keys as (B, H, L, E) for leading dimensions (B, H)."""
        full = torch.broadcast_shapes(self.query.shape[:-2], key_t.shape[:-2])
        size, cols = key_t.shape[-2:]
        return key_t.expand(*full, size, cols).reshape(*lead, size, cols).mT


class Products:
    """Tensors of one forward that come from a product, and how."""

    def __init__(self) -> None:
        self.known: TensorMap[Product] = TensorMap()
        self.maps: TensorMap[Any] = TensorMap()  # the site of a softmax, by its results

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the result of a function."""
        made: Product | None = None
        args = in_order(args, kwargs)
        if func in _PRODUCTS:
            if args[0].dim() > 2 and len(args) > 1 and args[1].dim() > 2:
                made = Product(args[0], args[1])
        elif func in _ADDED_PRODUCTS:
            both = [*args[1:], *(kwargs[n] for n in ("batch1", "batch2") if n in kwargs)]
            factor = float(kwargs.get("alpha", 1.0))
            made = Product(both[0], both[1], factor, added=True)
        elif func in _FACTORS | _DIVISORS | _SUMS | _FORMS:
            made = self._passed_on(func, args)
        if _is_in_place(func, kwargs):  # perhaps of scores, or of a view of them
            self.known.entries = [(t, replace(p, added=True)) for t, p in self.known.entries]
        if made is not None:
            self.known.set(out, made)
        if args and func in _FORMS | {F.dropout}:
            site = self.maps.get(args[0])
            if site is not None:
                self.maps.set(out, site)

    def _passed_on(self, func: Any, args: Any) -> Product | None:
        """Return how a result comes from the product of an argument, or None."""
        products = [self.known.get(argument) for argument in args]
        at = next((i for i, product in enumerate(products) if product is not None), -1)
        found = products[at] if at >= 0 else None
        if found is None:
            return None
        if func in _SUMS:
            return replace(found, added=True)
        if func in _FORMS:
            return found
        other, divides = args[1 - at], func in _DIVISORS
        if found.added or (divides and at == 1):
            return None
        if isinstance(other, Tensor) and other.numel() > 1:
            if divides or other.dim() < 2 or other.shape[-2:] != (1, 1):
                return None  # a factor per pair is not a scale
            before = 1.0 if found.factors is None else found.factors
            return replace(found, factors=before * other)
        number = float(other)
        return replace(found, factor=found.factor * (1 / number if divides else number))

    def values_of(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Tensor | None]:
        """Return the site whose weights a function multiplies with values, and the values."""
        args = in_order(args, kwargs)
        first = self.maps.get(args[0]) if args else None
        if first is None or func not in _PRODUCTS:
            return None, None
        return first, args[1]

    def heads(self, scores: Tensor) -> tuple[Tensor, Tensor, Product] | None:
        """Return queries (B, H, N, E) and keys (B, H, L, E) of scores (B, H, N, L), or None."""
        found = self.known.get(scores)
        if found is None or scores.dim() != 4:
            return None
        (rows, size), cols = found.query.shape[-2:], found.key_t.shape[-1]
        if (rows, cols) != tuple(scores.shape[-2:]):
            return None
        lead = scores.shape[:2]
        full = torch.broadcast_shapes(found.query.shape[:-2], found.key_t.shape[:-2])
        if torch.Size(full).numel() != lead.numel():
            return None
        query = found.query.expand(*full, rows, size).reshape(*lead, rows, size)
        return query, found.keys(found.key_t, lead), found


class AttendingInWriting(Attending):
    """Replaces the softmax of scores in separate operations by the attention weights of cores."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.products = Products()

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow products; at their softmax, return the attention weights of the next core."""
        if func in SOFTMAX:
            given = in_order(args, kwargs)
            heads = self.products.heads(given[0]) if over_keys(given, kwargs) else None
            if heads is not None:
                maps = self.maps(self.next_call(), given[0], *heads)
                return maps.to(kwargs.get("dtype") or given[0].dtype)
        out = func(*args, **kwargs)
        self.products.follow(func, args, kwargs, out)
        if self.products.known.get(out) is None:  # the core computes scores of other components
            self.follow_components(func, args, kwargs, out)
        return out

    def maps(
        self, index: int, scores: Tensor, query: Tensor, key: Tensor, found: Product
    ) -> Tensor:
        """Return a core's weights instead of the softmax of a host's scores, (B, H, N, L)."""
        masks: dict[str, Tensor] = {}
        cores: Any = self.module.cores
        factors = found.factors
        if factors is not None and factors.dim() < 4:
            factors = factors.view(*(1,) * (4 - factors.dim()), *factors.shape)
        if found.added:
            product = query @ key.mT * found.factor
            rest = scores - (product if factors is None else product * factors).to(scores.dtype)
            seen = scores > torch.finfo(scores.dtype).min / 2
            masks = {"mask": seen, "bias": rest.masked_fill(~seen, 0.0)}
        keys = self.components(found.key_t, lambda key_t: found.keys(key_t, scores.shape[:2]))
        with outside_functions():
            masks |= {} if factors is None else {"factors": factors}
            core = cores.core(index)
            size = core.layout.value_head_dim  # weights need values of the right shape only
            value = key if key.shape[-1] == size else key.new_zeros(*key.shape[:-1], size)
            call = cores.call(index, query, keys, value, scale=found.factor, **masks)
            weights: Tensor = core.weights(call)
            return F.pad(weights, (0, 0, 0, 0, 0, query.shape[1] - weights.shape[1]))
