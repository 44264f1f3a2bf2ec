"""Calls of a core from another library's layer: heads, masks, scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core
from lit_probattn.attention.numerics import repeat_heads
from lit_probattn.attention.packing import Packing
from lit_probattn.base.graphs import written
from lit_probattn.functional.call import head_call


def joined(tensor: Tensor | None, groups: list[list[int]]) -> Tensor | None:
    """Return a mask or bias ([B,] H, N, L) of the host's heads for merged heads.

    Floats are averaged; a pair is allowed if any of the merged heads allows it. Tensors that all
    heads share, or that already have the new heads, are returned unchanged.

    Args:
        tensor: mask or bias of up to four dimensions.
        groups: the merged heads of every head.
    """
    former = sum(map(len, groups))
    if tensor is None or tensor.dim() < 3 or tensor.shape[-3] != former or former == len(groups):
        return tensor
    parts = [tensor[..., group, :, :] for group in groups]
    if tensor.dtype == torch.bool:
        return torch.stack([part.any(-3) for part in parts], -3)
    return torch.stack([part.mean(-3) for part in parts], -3)


def scaled(core: Core, query: Tensor, key: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply products of queries and keys by a factor per head, (1, H, 1, 1).

    Distances require the root of the factor on both sides, and therefore a separate query head for
    every key head.
    """
    if getattr(core, "score", "dot") == "dot":
        return query * factor, key
    root = factor.sqrt()
    return query * root, key * root.repeat_interleave(key.shape[1] // root.shape[1], 1)


def documents_mask(
    query: Tensor, key: Tensor, bounds: tuple[Tensor, Tensor], mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Return a mask that also separates packed documents, in the form of `split_mask`.

    Args:
        query: (B, H, N, E).
        key: (B, H_k, L, …).
        bounds: bounds of documents among the B·N queries and the B·L keys, (D + 1,) each.
        mask: allowed pairs so far. None means all.
        is_causal: whether later keys are masked, in addition to the mask.

    Raises:
        ValueError: bounds do not end at the last token, for example with a cache.
    """
    documents = []
    if not torch.compiler.is_compiling():
        _check_ends(query, key, bounds)
    for ends, tensor in zip(bounds, (query, key), strict=True):
        batch, length = tensor.shape[0], tensor.shape[2]
        places = torch.arange(batch * length, device=ends.device, dtype=ends.dtype)
        found = torch.searchsorted(ends, places, right=True)
        documents.append(found.view(batch, length).to(query.device))
    same = documents[0][:, None, :, None] == documents[1][:, None, None, :]  # (B, 1, N, L)
    if is_causal:
        same = same.tril(key.shape[2] - query.shape[2])
    if mask is None:
        return same
    if mask.dtype == torch.bool:
        return mask & same
    return mask.masked_fill(~same, torch.finfo(mask.dtype).min)


def packing_of_documents(
    query: Tensor, key: Tensor, bounds: tuple[Tensor, Tensor]
) -> Packing | None:
    """Return the packing of documents, or None if only a mask can separate them.

    This is the case in a graph, which would contain the bounds, and if a document crosses the end
    of a row. Arguments and errors are the same as for `documents_mask`.
    """
    if written() is not None:
        return None
    _check_ends(query, key, bounds)
    packing = Packing(bounds[0], None if torch.equal(*bounds) else bounds[1])
    try:
        packing.check(query.shape[0], query.shape[2], key.shape[2])
    except ValueError:
        return None
    return packing


def _check_ends(query: Tensor, key: Tensor, bounds: tuple[Tensor, Tensor]) -> None:
    for name, ends, tensor in zip("qk", bounds, (query, key), strict=True):
        tokens = tensor.shape[0] * tensor.shape[2]
        if int(ends[-1]) != tokens:
            raise ValueError(
                f"cu_seq_lens_{name} ends at {int(ends[-1])}, expected {tokens}: bounds of "
                "documents must cover all tokens, and do not support a cache"
            )


def fitted_call(
    core: Core,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    **masks: Any,
) -> HeadCall:
    """Return a call of a core with the heads of a host.

    Shared keys and values are repeated if the core does not share them. If the scores do not
    support a scale other than 1/√E, its root is applied to queries and to keys.

    Args:
        core: core whose layout has the host's query heads.
        query: (B, H, N, E), or (1, H, N, E) for all samples.
        key: (B, H_k, L, E), H_k a divisor of the core's key heads.
        value: (B, H_v, L, E_v), H_v a divisor of the core's value heads.
        scale: scale of the host. None means 1/√E.
        masks: arguments of `head_call`.
    """
    layout, size = core.layout, query.shape[-1]
    key = repeat_heads(key, layout.key * layout.keys_per_head)
    value = repeat_heads(value, layout.value)
    if scale is not None and abs(scale * size**0.5 - 1.0) < 1e-6:
        scale = None
    if scale is not None and not core.makes.takes_scale:
        root = (scale * size**0.5) ** 0.5
        query, key, scale = query * root, key * root, None
    if query.shape[0] != value.shape[0]:
        query = query.expand(value.shape[0], -1, -1, -1)
    look = not core.makes.has_scores and not torch.compiler.is_compiling()
    return head_call(query, key, value, query.shape[1], scale=scale, look=look, **masks)
