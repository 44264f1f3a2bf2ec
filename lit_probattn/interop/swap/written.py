"""Attention that a model writes out: products of queries and keys are followed to their softmax.

The core's maps stand in the place of the softmax of the host's scores. Both store all of them, and
so does what the host added to its products: about three times the memory of the host's own, and no
fused backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_probattn.base.torch_internals import outside_functions
from lit_probattn.interop.swap.core import fitted_call
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


@dataclass(frozen=True)
class Product:
    """Scores that are factor · query keyᵀ, perhaps with something added."""

    query: Tensor
    key_t: Tensor
    factor: float = 1.0
    added: bool = False


class Products:
    """What is known of the tensors of one forward: which of them come from a product, and how."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, Product]] = {}

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note a result of a function."""
        if func in _PRODUCTS:
            if args[0].dim() > 2 and len(args) > 1 and args[1].dim() > 2:
                self.known[id(out)] = out, Product(args[0], args[1])
        elif func in _ADDED_PRODUCTS:
            both = [*args[1:], *(kwargs[n] for n in ("batch1", "batch2") if n in kwargs)]
            factor = float(kwargs.get("alpha", 1.0))
            self.known[id(out)] = out, Product(both[0], both[1], factor, added=True)
        elif func in _FACTORS | _DIVISORS | _SUMS | _FORMS:
            self._pass_on(func, args, out)

    def _pass_on(self, func: Any, args: Any, out: Any) -> None:
        at = next((i for i, a in enumerate(args) if id(a) in self.known), None)
        if at is None:
            return
        found = self.known[id(args[at])][1]
        if func in _SUMS:
            found = replace(found, added=True)
        elif func in _FACTORS | _DIVISORS:
            other, divides = args[1 - at], func in _DIVISORS
            if found.added or (divides and at == 1):
                return
            if isinstance(other, Tensor) and other.numel() > 1:
                if divides or other.dim() < 2 or other.shape[-2:] != (1, 1):
                    return  # a factor of each pair is no scale
                found = replace(found, query=found.query * other)
            else:
                number = float(other)
                found = replace(found, factor=found.factor * (1 / number if divides else number))
        self.known[id(out)] = out, found

    def heads(self, scores: Tensor) -> tuple[Tensor, Tensor, Product] | None:
        """Return queries (B, H, N, E) and keys (B, H, L, E) of scores (B, H, N, L), or None."""
        found = self.known.get(id(scores), (None, None))[1]
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
        key = found.key_t.expand(*full, size, cols).reshape(*lead, size, cols).mT
        return query, key, found


class AttendingInWriting(Attending):
    """Puts maps of cores in the place of the softmax of scores that a module writes out."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.products = Products()

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Follow products; where their softmax is taken, return the maps of the next core."""
        if func in SOFTMAX:
            heads = self.products.heads(args[0])
            if heads is not None:
                with outside_functions():
                    maps = maps_of(self.next_core(), args[0], *heads)
                    return maps.to(kwargs.get("dtype") or args[0].dtype)
        out = func(*args, **kwargs)
        self.products.follow(func, args, kwargs, out)
        return out


def maps_of(core: Any, scores: Tensor, query: Tensor, key: Tensor, found: Product) -> Tensor:
    """Return a core's maps in place of the softmax of a host's scores, (B, H, N, L)."""
    masks: dict[str, Tensor] = {}
    if found.added:
        rest = scores - (query @ key.mT * found.factor).to(scores.dtype)
        seen = scores > torch.finfo(scores.dtype).min / 2
        masks = {"mask": seen, "bias": rest.masked_fill(~seen, 0.0)}
    call = fitted_call(core, query, key, key, scale=found.factor, **masks)
    weights: Tensor = core.weights(call)
    return weights
