"""Packed documents in functional attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from lit_probattn.attention.packing import (
    Packing,
    gather,
    packing_of,
    refuse_beside_documents,
    scatter,
)
from lit_probattn.functional.call import check_heads

Form = TypeVar("Form", bound=Callable[..., Tensor])


def takes_documents(*per_key: str, has_scores: bool = True) -> Callable[[Form], Form]:
    """Add `cu_seqlens` and `cu_seqlens_k` to a functional form.

    The form is called once for each group of documents of similar lengths.

    Args:
        per_key: arguments that may have an entry for every position of a key, in the last of three
            dimensions, up to the longest document.
        has_scores: whether a causal mask alone excludes padding after a document.
    """

    def decorate(form: Form) -> Form:
        @wraps(form)
        def run(
            query: Tensor,
            key: Any,
            value: Tensor,
            *given: Any,
            cu_seqlens: Tensor | Packing | None = None,
            cu_seqlens_k: Tensor | None = None,
            **named: Any,
        ) -> Tensor:
            packing = packing_of(cu_seqlens, cu_seqlens_k)
            if packing is None:
                return form(query, key, value, *given, **named)
            mask_at = list(_names(form)).index("attn_mask") - 3
            masks = given[mask_at : mask_at + 1] or (named.pop("attn_mask", None),)
            refuse_beside_documents(attn_mask=masks[0])
            before, after = given[:mask_at], given[mask_at + 1 :]
            named |= dict(zip(("dropout_p", "is_causal"), after, strict=False))
            if not isinstance(key, Tensor):
                key = torch.stack(tuple(key), 2)
            check_heads(query, key, value)
            batch_size = query.shape[0]
            packing.check(batch_size, query.shape[2], value.shape[2])
            rng = named.pop("rng", None)
            alone = has_scores and packing.is_self and bool(named.get("is_causal"))
            groups, parts = packing.groups(query.device), []
            for group in groups:
                mask = group.key_mask(None, alone)
                own = {n: _first(named[n], group.keys.shape[1]) for n in per_key if n in named}
                parts.append(
                    form(
                        *(gather(query, group.queries), gather(key, group.keys)),
                        *(gather(value, group.keys), *before),
                        attn_mask=None if mask is None else mask[:, None, None],
                        rng=group.key_of(rng, packing.num_documents),
                        **{**named, **own},
                    )
                )
            if not parts:  # no document has queries and keys
                own = {n: _first(named[n], 0) for n in per_key if n in named}
                none = key[..., :0, :], value[:, :, :0]
                return form(query, *none, *before, **{**named, **own})
            return scatter(parts, groups, batch_size)

        return run  # type: ignore[return-value]

    return decorate


def _names(form: Callable[..., Any]) -> list[str]:
    code = form.__code__
    return list(code.co_varnames[: code.co_argcount])


def _first(values: Any, length: int) -> Any:
    """Return the entries of the first keys, if there is one per key."""
    return values[..., :length] if isinstance(values, Tensor) and values.dim() == 3 else values
