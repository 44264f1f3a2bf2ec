"""The mask convention.

A mask is boolean and True means *may attend* (pairs) or *is a real token* (keys). `is_causal` is
aligned bottom-right: with N queries and L keys, query i attends to the keys j <= i + L - N, so that
the last query attends to all keys. `bias` is added to the scores before the softmax. Fully masked
rows have zero output and zero gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from lit_probattn.base.graphs import is_symbol


def span(start: int, stop: int) -> range:
    """Return the positions from `start` to `stop`.

    If these are dynamic in an exported program, the result is a slice with the same `start` and
    `stop`, because a range would turn them into numbers. Only code without blocks receives it.
    """
    if is_symbol(start) or is_symbol(stop):
        return cast(range, slice(start, stop))
    return range(start, stop)


@dataclass(frozen=True)
class Block:
    """A block of scores: its queries and a prefix of the keys."""

    rows: range
    cols: range


@dataclass(frozen=True)
class Masks:
    """The allowed pairs of N queries and L keys.

    Args:
        num_queries: N.
        num_keys: L.
        key_mask: real keys, (B, L) bool. None means all.
        attn_mask: allowed pairs, 4-dimensional bool broadcastable to (B, H, N, L). None means all.
        is_causal: bottom-right aligned causal mask, in addition to the others.
        bias: additive scores, 4-dimensional, broadcastable to (B, H, N, L).
    """

    num_queries: int
    num_keys: int
    key_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    is_causal: bool = False
    bias: Tensor | None = None

    @property
    def causal_offset(self) -> int:
        """Query i attends to keys up to i + causal_offset."""
        return self.num_keys - self.num_queries

    @property
    def has_pair_mask(self) -> bool:
        """Whether pairs are masked, by anything other than `bias`."""
        return self.is_causal or self.key_mask is not None or self.attn_mask is not None

    @property
    def boolean(self) -> list[Tensor]:
        """Boolean masks, which a backward pass that reads them again must save.

        Then PyTorch raises an error if they are changed in place before it.
        """
        return [mask for mask in (self.key_mask, self.attn_mask) if mask is not None]

    @property
    def all_rows(self) -> range:
        """All queries."""
        return span(0, self.num_queries)

    @property
    def all_cols(self) -> range:
        """All keys."""
        return span(0, self.num_keys)

    def visible_keys(self, rows: range) -> range:
        """Return the shortest prefix of keys with all keys that these queries may attend to."""
        if not self.is_causal:
            return self.all_cols
        if is_symbol(rows.stop):  # all rows
            return self.all_cols
        return range(max(0, min(self.num_keys, rows.stop + self.causal_offset)))

    def allowed(self, rows: range, cols: range, device: torch.device) -> Tensor | None:
        """Return a block's allowed pairs, bool broadcastable to (B, H, rows, cols), or None."""
        allowed: Tensor | None = None
        # The first row attends to the fewest keys: a decoded token attends to all of them.
        if self.is_causal and rows.start + self.causal_offset < cols.stop - 1:
            last_key = torch.arange(rows.start, rows.stop, device=device) + self.causal_offset
            index = torch.arange(cols.start, cols.stop, device=device)
            allowed = (index[None, :] <= last_key[:, None])[None, None]
        if self.key_mask is not None:
            real = self.key_mask[:, None, None, cols.start : cols.stop]
            allowed = real if allowed is None else allowed & real
        if self.attn_mask is not None:
            pairs = slice_block(self.attn_mask, rows, cols)
            allowed = pairs if allowed is None else allowed & pairs
        return allowed

    def bias_block(self, rows: range, cols: range) -> Tensor | None:
        """Return the additive bias of a block, broadcastable to (B, H, rows, cols), or None."""
        return None if self.bias is None else slice_block(self.bias, rows, cols)


def slice_block(pairs: Tensor, rows: range, cols: range) -> Tensor:
    """Slice a tensor broadcastable to (B, H, N, L) to a block; broadcast dimensions stay 1."""
    if pairs.shape[-2] != 1:
        pairs = pairs[..., rows.start : rows.stop, :]
    if pairs.shape[-1] != 1:
        pairs = pairs[..., cols.start : cols.stop]
    return pairs


def make_masks(
    batch_size: int,
    num_heads: int,
    num_queries: int,
    num_keys: int,
    *,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    bias: Tensor | None = None,
) -> Masks:
    """Check the masks of a call and reshape them to four dimensions.

    Fewer dimensions are aligned on the right, as PyTorch broadcasts: (N, L) or (H, N, L).

    Raises:
        ValueError: a mask or the bias has a shape that cannot be broadcast to (B, H, N, L), or a
            mask is not boolean, or the bias is not floating point.
    """
    shape = (batch_size, num_heads, num_queries, num_keys)
    if key_mask is not None:
        _check_bool("key_mask", key_mask)
        if key_mask.shape != (batch_size, num_keys):
            raise ValueError(
                f"key_mask has shape {tuple(key_mask.shape)}, expected (batch, keys) = "
                f"({batch_size}, {num_keys})"
            )
    if attn_mask is not None:
        _check_bool("attn_mask", attn_mask)
        attn_mask = _four_dimensional("attn_mask", attn_mask, shape)
    if bias is not None:
        if not bias.is_floating_point():
            raise ValueError(
                f"bias has dtype {bias.dtype}, expected floating point; boolean masks go to "
                "attn_mask"
            )
        bias = _four_dimensional("bias", bias, shape)
    return Masks(num_queries, num_keys, key_mask, attn_mask, is_causal, bias)


def check_query_mask(mask: Tensor, query: Tensor) -> None:
    """Check a mask of queries.

    Raises:
        ValueError: it is not a boolean tensor (B, N) for queries (B, N, C).
    """
    if mask.dtype != torch.bool or mask.shape != query.shape[:2]:
        raise ValueError(
            f"query_mask has dtype {mask.dtype} and shape {tuple(mask.shape)}, expected torch.bool "
            f"and (batch, queries) = {tuple(query.shape[:2])}"
        )


def _check_bool(name: str, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name} has dtype {mask.dtype}, expected torch.bool with True = may attend; "
            "additive masks go to bias"
        )


def _four_dimensional(name: str, pairs: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """View a tensor of 2, 3 or 4 dimensions with four, checked against (B, H, N, L)."""
    given = tuple(pairs.shape)
    if pairs.dim() in (2, 3):
        pairs = pairs[(None,) * (4 - pairs.dim())]
    if pairs.dim() != 4 or any(
        size not in (1, full) for size, full in zip(pairs.shape, shape, strict=True)
    ):
        raise ValueError(
            f"{name} has shape {given}, expected (queries, keys) = {shape[2:]} or one that "
            f"broadcasts to (batch, heads, queries, keys) = {shape}"
        )
    return pairs
