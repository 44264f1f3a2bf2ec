"""Packed documents, computed as ordinary calls on groups of similar lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.packing import Group, gather, scatter
from lit_probattn.base.torch_internals import outside_graphs


def call_of(group: Group, call: HeadCall, key_mask: Tensor | None) -> HeadCall:
    """Return the call of a group, one document per row, with each document's own draws."""
    packing, dropout = call.packing, call.dropout
    assert packing is not None
    if dropout is not None:
        own = group.key_of(dropout.key, packing.num_documents)
        assert own is not None
        dropout = replace(dropout, key=own)
    real = group.real_queries

    def gathered(mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return real
        own = mask.flatten()[group.queries]
        return own if real is None else own & real

    size = group.queries.shape[1], group.keys.shape[1]
    return replace(
        call,
        query=gather(call.query, group.queries),
        key=gather(call.key, group.keys),
        value=gather(call.value, group.keys),
        side=None if call.side is None else gather(call.side, group.queries),
        masks=Masks(*size, key_mask=key_mask, is_causal=call.masks.is_causal),
        dropout=dropout,
        rng=group.key_of(call.rng, packing.num_documents),
        query_mask=gathered(call.query_mask),
        output_mask=gathered(call.output_mask),
        packing=None,
    )


@outside_graphs
def attend_to_documents(
    compute: Callable[[HeadCall], Tensor],
    call: HeadCall,
    num_heads: int,
    *,
    pads: bool,
    has_scores: bool,
) -> Tensor:
    """Compute a packed call group by group; (B, H, N, E_v).

    Args:
        compute: computes a call without packing.
        call: the packed call.
        num_heads: H of the output.
        pads: whether documents of different lengths may be padded to one length.
        has_scores: whether a causal mask alone excludes padding after a document; a key mask would
            disable the causal path of engines.
    """
    packing, masks = call.packing, call.masks
    assert packing is not None
    # A causal mask aligns the last query of a call with its last key, also if both are padding.
    aligned = not masks.is_causal or packing.bounds == packing.key_bounds
    groups = packing.groups(call.query.device, exact=not (pads and aligned))
    hidden = masks.is_causal and has_scores
    parts = [compute(call_of(g, call, g.key_mask(masks.key_mask, hidden))) for g in groups]
    batch_size, num_queries = call.query.shape[0], call.query.shape[2]
    if not parts:  # no queries
        return call.value.new_zeros(batch_size, num_heads, num_queries, call.value.shape[-1])
    return scatter(parts, groups, batch_size)


def weights_of_documents(
    weights: Callable[[HeadCall], Tensor], call: HeadCall, num_heads: int
) -> Tensor:
    """Return the attention weights (B, H, N, L) of a packed call, zero between documents.

    Args:
        weights: returns the attention weights of a call without packing.
        call: the packed call.
        num_heads: H.

    Raises:
        ValueError: queries and keys of a document are in different rows.
    """
    packing, num_queries, num_keys = call.packing, call.query.shape[2], call.num_keys
    assert packing is not None
    maps = call.query.new_zeros(call.query.shape[0], num_heads, num_queries, num_keys)
    for group in packing.groups(call.query.device, exact=True):
        rows, key_rows = group.queries[:, 0] // num_queries, group.keys // max(1, num_keys)
        if bool((key_rows != rows[:, None]).any()):
            raise ValueError("no map has queries and keys of a document that are in different rows")
        found = weights(call_of(group, call, group.key_mask(call.masks.key_mask)))
        maps = maps.to(found.dtype)
        if not group.keys.shape[1]:
            continue
        first_query, first_key = group.queries[:, 0] % num_queries, group.keys[:, 0] % num_keys
        places = zip(rows.tolist(), first_query.tolist(), first_key.tolist(), strict=True)
        for own, (row, i, j) in zip(found, places, strict=True):
            maps[row, :, i : i + own.shape[-2], j : j + own.shape[-1]] = own
    return maps
