"""One call of our core from inside another library's layer: its heads, its masks, its scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core
from lit_probattn.attention.masks import make_masks
from lit_probattn.attention.numerics import repeat_heads
from lit_probattn.attention.packing import Packing
from lit_probattn.base.graphs import written
from lit_probattn.functional.call import split_mask


def joined(tensor: Tensor | None, groups: list[list[int]]) -> Tensor | None:
    """Return a mask or a bias (B, H, N, L) of former heads for the heads that they became.

    Floats are averaged; True is what any of the former heads may attend to. What all heads share,
    or what is for the new heads already, is returned as it is.

    Args:
        tensor: of up to four dimensions.
        groups: the former heads of every head.
    """
    former = sum(map(len, groups))
    if tensor is None or tensor.dim() < 4 or tensor.shape[1] != former or former == len(groups):
        return tensor
    parts = [tensor[:, group] for group in groups]
    if tensor.dtype == torch.bool:
        return torch.stack([part.any(1) for part in parts], 1)
    return torch.stack([part.mean(1) for part in parts], 1)


def scaled(core: Core, query: Tensor, key: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply products of queries and keys by a factor per head, (1, H, 1, 1).

    Distances need both sides multiplied, by the root; then every key head has a query head of its
    own.
    """
    if getattr(core, "score", "dot") == "dot":
        return query * factor, key
    root = factor.sqrt()
    return query * root, key * root.repeat_interleave(key.shape[1] // root.shape[1], 1)


def documents_mask(
    query: Tensor, key: Tensor, bounds: tuple[Tensor, Tensor], mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Return a mask that also keeps packed documents apart, in the form of `split_mask`.

    Args:
        query: (B, H, N, E).
        key: (B, H_k, L, …).
        bounds: where documents begin and end among the B·N queries and the B·L keys, (D + 1,) each.
        mask: what may attend so far. None means all.
        is_causal: whether queries see no later keys, beside the mask.

    Raises:
        ValueError: bounds end elsewhere than the tokens, as with a cache of earlier ones.
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
    """Return packed documents as our layers take them, or None where a mask has to do.

    That is in a graph, which would hold the bounds, and where a document goes over the end of a
    row. The arguments and errors are those of `documents_mask`.
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
                "documents cover all tokens, and go without a cache of earlier ones"
            )


def head_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    packing: Packing | None = None,
    look: bool = False,
) -> HeadCall:
    """Return a call of a core with the masks of another library.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv·K, L, E), the components of a head side by side.
        value: (B, H_kv, L, E_v).
        mask: as `split_mask` takes it, broadcastable to (B, H, N, L).
        bias: added to the scores, broadcastable to (B, H, N, L).
        is_causal: query i sees keys up to i + L − N.
        scale: factor on products. None means 1/√E.
        packing: documents, each of which attends to itself alone.
        look: whether to look at the values of masks: zeros are no bias, and equal rows are a mask
            of keys.
    """
    allowed, added = split_mask(mask)
    if added is not None and not (look and _is_zero(added)):
        bias = added if bias is None else bias + added
    if bias is not None:
        bias = bias.to(query.dtype)
    keys = None
    if allowed is not None and allowed.dim() == 4 and allowed.shape[-1] == value.shape[2]:
        first = allowed[:, :1, :1]
        if first.shape == allowed.shape or (look and bool((allowed == first).all())):
            keys, allowed = first[:, 0, 0].expand(query.shape[0], -1), None
    sizes = (*query.shape[:3], value.shape[2])
    masks = make_masks(*sizes, key_mask=keys, attn_mask=allowed, bias=bias, is_causal=is_causal)
    return HeadCall(query, key, value, masks, scale=scale, packing=packing)


def _is_zero(added: Tensor) -> bool:
    return not added.requires_grad and not bool(added.any())


def fitted_call(
    core: Core,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    **masks: Any,
) -> HeadCall:
    """Return a call of a core with the heads that a host gives it.

    Keys and values that query heads share are repeated where the core does not share them. A scale
    other than 1/√E goes, half of it each, into queries and keys where scores have no place for it.

    Args:
        core: its layout has the host's query heads.
        query: (B, H, N, E), or (1, H, N, E) for all samples alike.
        key: (B, H_k, L, E), H_k a divisor of the core's key heads.
        value: (B, H_v, L, E_v), likewise.
        scale: of the host. None means 1/√E.
        masks: as `head_call` takes them.
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
    return head_call(query, key, value, scale=scale, look=look, **masks)
