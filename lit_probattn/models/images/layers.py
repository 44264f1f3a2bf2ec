"""Replacements for the attention modules of timm's blocks.

timm's blocks call their attention without a random key, so the model stores the key of the current
call in a slot that all its layers share (`KeySlot`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from timm.layers import resize_rel_pos_bias_table
from timm.models.swin_transformer import get_relative_position_index
from torch import Tensor, nn

from lit_probattn.attention.layer import Attention
from lit_probattn.base.torch_internals import outside_graphs
from lit_probattn.randomness import RandomKey


class KeySlot:
    """Random key of the current call, also read by recomputation in backward."""

    def __init__(self) -> None:
        self.key: RandomKey | None = None

    @outside_graphs
    def of_layer(self, index: int, num_sequences: int) -> RandomKey | None:
        """Return the key of layer `index`, for sequences that are the windows of every sample."""
        if self.key is None:
            return None
        key = self.key.fold(index)
        ids = key.sample_ids
        if ids is None or num_sequences == len(ids):
            return key
        windows = torch.arange(num_sequences // len(ids), device=ids.device)
        return replace(key, sample_ids=(ids[:, None] * len(windows) + windows).flatten())


class _Replaced(nn.Module):
    """A layer of this package with the interface that timm's blocks expect of their attention.

    `old` is timm's layer, whose output dropout and position table are kept.
    """

    def __init__(self, attention: Attention, old: Any, slot: KeySlot, index: int) -> None:
        super().__init__()
        self.attention = attention
        self.proj_drop = old.proj_drop
        self.num_heads = attention.num_heads
        self.slot, self.index = slot, index


class TokenAttention(_Replaced):
    """Attention over all tokens of an image, in a block of a ViT."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Map (B, N, C) to (B, N, C); a boolean mask is True where a pair may attend."""
        is_bias = attn_mask is not None and attn_mask.dtype != torch.bool
        out = self.attention(
            x,
            attn_mask=None if is_bias else attn_mask,
            bias=attn_mask if is_bias else None,
            is_causal=is_causal,
            rng=self.slot.of_layer(self.index, len(x)),
        )
        return self.proj_drop(out)


class WindowAttention(_Replaced):
    """Attention inside windows with a learned relative position bias, in a block of a Swin model.

    All windows of all images form one batch of the layer. The bias has one value per local head
    and relative position and is added after any mixing of heads; its table has timm's name and
    shape.

    Source: Swin Transformer, ICCV 2021, Eq. (4); with mixed heads FiSH, NeurIPS 2022, appendix A.3.
    Departs from the source: pairs across shifted windows are masked, where the source adds -100 to
    their scores.
    """

    relative_position_index: Tensor

    def __init__(self, attention: Attention, old: Any, slot: KeySlot, index: int) -> None:
        super().__init__(attention, old, slot, index)
        self.window_size: tuple[int, int] = old.window_size
        self.relative_position_bias_table: nn.Parameter = old.relative_position_bias_table
        self.register_buffer(
            "relative_position_index", old.relative_position_index, persistent=False
        )

    @property
    def window_area(self) -> int:
        """Number of tokens of a window."""
        return self.window_size[0] * self.window_size[1]

    def position_bias(self) -> Tensor:
        """Return the bias of all pairs of a window, (1, H, N, N)."""
        area = self.window_area
        rows = self.relative_position_bias_table[self.relative_position_index.flatten()]
        return rows.view(area, area, -1).permute(2, 0, 1).contiguous()[None]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend inside each window; the result has the shape of `x`.

        Args:
            x: windows, image by image, (B · windows, N, C).
            mask: timm's mask of a shifted image, (windows per image, N, N); zero where attention is
                allowed.
        """
        allowed = None
        if mask is not None:
            images = x.shape[0] // mask.shape[0]
            allowed = (mask == 0).expand(images, -1, -1, -1).flatten(0, 1)[:, None]
        key = self.slot.of_layer(self.index, len(x))
        out = self.attention(x, attn_mask=allowed, bias=self.position_bias(), rng=key)
        return self.proj_drop(out)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Change the window size; the table is interpolated as in timm."""
        if tuple(window_size) == tuple(self.window_size):
            return
        old_size, table = self.window_size, self.relative_position_bias_table
        self.window_size = (window_size[0], window_size[1])
        shape = ((2 * window_size[0] - 1) * (2 * window_size[1] - 1), self.num_heads)
        with torch.no_grad():
            resized = resize_rel_pos_bias_table(
                table,
                new_window_size=self.window_size,
                new_bias_shape=shape,
                old_window_size=old_size,
            )
        self.relative_position_bias_table = nn.Parameter(resized, table.requires_grad)
        self.relative_position_index = get_relative_position_index(
            *self.window_size, device=table.device
        )
