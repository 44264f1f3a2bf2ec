"""Layers with the interface of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_probattn.attention import Attention
from lit_probattn.attention.call import key_or_fresh
from lit_probattn.functional.call import is_zero, split_mask


class _NoTensor:
    """Stands for a projection that does not exist.

    `nn.TransformerEncoder` does not use its fused path, which converts to nested tensors, if one of
    the weights of its first layer overrides torch's functions.
    """

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        """Override no function."""
        return NotImplemented


class MultiheadForm(nn.Module):
    """An attention layer that is called like `torch.nn.MultiheadAttention`.

    It also replaces it in `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`.

    Departs from torch: the output of a fully masked row is the bias of the output projection, not
    NaN; returned weights are without dropout; fused inference paths, including nested tensors, are
    not used.

    Args:
        layer: any attention layer; its parameters are under `layer.`.
        batch_first: whether tensors are (B, N, C); else (N, B, C), torch's default.

    Raises:
        TypeError: `layer` is not a layer of this package.
    """

    # Attributes that torch's encoder and its layer check before they bypass the call.
    in_proj_weight = _NoTensor()
    in_proj_bias: None = None
    _qkv_same_embed_dim = False

    def __init__(self, layer: Attention, batch_first: bool = False) -> None:
        if not isinstance(layer, Attention):
            found = type(layer).__name__
            hint = "; it has this interface already" if isinstance(layer, MultiheadForm) else ""
            if isinstance(layer, nn.MultiheadAttention):
                hint = "; lit_probattn.swap replaces torch's layers"
            raise TypeError(f"layer must be an Attention of lit_probattn, received {found}{hint}")
        super().__init__()
        self.layer, self.batch_first = layer, batch_first
        self.embed_dim, self.num_heads = layer.embed_dim, layer.num_heads
        self.head_dim = layer.head_dim
        self.kdim = self.vdim = layer.key_embed_dim

    @property
    def out_proj(self) -> nn.Linear:
        """The layer's output projection, which `nn.TransformerEncoder` reads."""
        return self.layer.out_proj

    @property
    def dropout(self) -> float:
        """Dropout of the layer's attention weights; setting it changes the layer's."""
        return self.layer.dropout

    @dropout.setter
    def dropout(self, probability: float) -> None:
        self.layer.dropout = probability

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention.

        Args:
            query: (N, B, C), or (B, N, C) with batch_first, or (N, C) without a batch.
            key: the same with L positions. If query, key and value are one tensor, it is
                self-attention.
            value: like `key`.
            key_padding_mask: (B, L), or (L) without a batch: True masks a key; or floats, which
                are added to the scores.
            need_weights: whether to return attention weights; they need N x L memory.
            attn_mask: (N, L) or (B·H, N, L): True masks a pair; or floats, which are added.
            average_attn_weights: whether the weights are averaged over heads.
            is_causal: states that `attn_mask` is the causal mask, which is then not read.

        Returns:
            The output in the layout of `query`, and the weights (B, N, L), or (B, H, N, L) if they
            are not averaged, or None.

        Raises:
            ValueError: shapes do not match, or `is_causal` without `attn_mask`.
            NotImplementedError: the variant does not support the call, for example added floats
                without scores.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal describes attn_mask: pass attn_mask as well, as in torch")
        itself = key is query and value is query
        batched = query.dim() == 3
        if not batched:
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        shape = (query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        # A compiler cannot read values; with scores, adding zeros is harmless.
        look = not (torch.compiler.is_compiling() and self.layer.core.makes.has_scores)
        key_mask, bias = _real_keys(key_padding_mask, shape, look)
        is_causal = is_causal and shape[2] == shape[3]  # otherwise the mask defines its alignment
        pairs, more = (None, None) if is_causal else _allowed_pairs(attn_mask, shape, look)
        if more is not None:
            bias = more if bias is None else bias + more
        bias = None if bias is None else bias.to(query.dtype)
        masks: dict[str, Any] = {"key_mask": key_mask, "attn_mask": pairs, "is_causal": is_causal}
        masks["bias"] = bias
        # The weights have the noise of the output.
        draw = key_or_fresh(None) if need_weights else None
        others = () if itself else (key, value)
        output = self.layer(query, *others, **masks, rng=draw)
        weights = None
        if need_weights:
            weights = self.layer.weights(query, None if itself else key, **masks, rng=draw)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's says Any


def as_multihead_attention(layer: Attention, *, batch_first: bool = False) -> MultiheadForm:
    """Return a layer with the call, masks and result of `torch.nn.MultiheadAttention`.

    Args:
        layer: any attention layer, such as `lit_probattn.create("smgk", 256, 4)`.
        batch_first: whether tensors are (B, N, C); else (N, B, C), torch's default.
    """
    return MultiheadForm(layer, batch_first)


def _real_keys(
    mask: Tensor | None, shape: tuple[int, int, int, int], look: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of real keys, and the summand of the scores."""
    if mask is None:
        return None, None
    batch_size, _, _, num_keys = shape
    if mask.shape != (batch_size, num_keys):
        raise ValueError(
            f"key_padding_mask has shape {tuple(mask.shape)}, expected {(batch_size, num_keys)}"
        )
    real, added = _split("key_padding_mask", mask, look)
    return real, None if added is None else added[:, None, None, :]


def _allowed_pairs(
    mask: Tensor | None, shape: tuple[int, int, int, int], look: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask of pairs, and the summand of the scores."""
    if mask is None:
        return None, None
    batch_size, num_heads, *pairs = shape
    if list(mask.shape) not in (pairs, [batch_size * num_heads, *pairs]):
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}, expected {tuple(pairs)} or "
            f"{(batch_size * num_heads, *pairs)}"
        )
    allowed, added = _split("attn_mask", mask, look)
    if mask.dim() == 3:
        allowed = None if allowed is None else allowed.view(shape)
        added = None if added is None else added.view(shape)
    return allowed, added


def _split(name: str, mask: Tensor, look: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return allowed pairs and added floats; None instead of zeros, if `look` reads the values."""
    allowed, added = split_mask(~mask if mask.dtype == torch.bool else mask, name)
    # A mask of zeros and -inf only masks pairs, which every variant supports.
    return allowed, None if added is not None and look and is_zero(added) else added
