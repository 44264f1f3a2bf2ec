"""What the attention layers of a model see, recorded without changing what the model computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention import Attention, HeadCall
from lit_probattn.attention.functional import compute_dtype
from lit_probattn.attention.masks import Masks


@dataclass(frozen=True)
class LayerCall:
    """One call of an attention layer.

    Args:
        name: the layer's name in the model.
        layer: the layer.
        query: (S, N, C); S sequences: samples, texts of pairs, or windows of pictures.
        key: (S, L, C_k), or None for self-attention.
        key_mask: real keys, (S, L) bool. None means all.
        attn_mask: allowed pairs, as in `Attention.forward`.
        is_causal: causal mask.
        bias: additive scores, as in `Attention.forward`.
    """

    name: str
    layer: Attention
    query: Tensor
    key: Tensor | None = None
    key_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    is_causal: bool = False
    bias: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.query.shape[0]

    @property
    def num_keys(self) -> int:
        """L."""
        return self.query.shape[1] if self.key is None else self.key.shape[1]

    def one(self, index: int, *, padded: bool = False) -> LayerCall:
        """Return the call for one sequence alone.

        Args:
            index: which.
            padded: keep padding at the end. Otherwise self-attention ends with the last real token;
                weights among the tokens that stay do not change.
        """
        here = slice(index, index + 1)

        def pick(value: Tensor | None, shared: bool = False) -> Tensor | None:
            return value if value is None or shared else value[here]

        def pick_pairs(value: Tensor | None) -> Tensor | None:
            return pick(value, shared=value is not None and (value.dim() < 4 or len(value) == 1))

        call = replace(
            self,
            query=self.query[here],
            key=pick(self.key),
            key_mask=pick(self.key_mask),
            attn_mask=pick_pairs(self.attn_mask),
            bias=pick_pairs(self.bias),
        )
        if padded or call.key is not None or call.key_mask is None:
            return call
        real = call.key_mask[0].nonzero()
        return call.first(int(real[-1]) + 1 if len(real) else 0)

    def first(self, length: int) -> LayerCall:
        """Return the self-attention of the first `length` positions among themselves."""

        def pairs(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            rows = value[..., :length, :] if value.shape[-2] > 1 else value
            return rows[..., :length] if value.shape[-1] > 1 else rows

        return replace(
            self,
            query=self.query[:, :length],
            key_mask=None if self.key_mask is None else self.key_mask[:, :length],
            attn_mask=pairs(self.attn_mask),
            bias=pairs(self.bias),
        )

    def double(self, layer: Attention) -> LayerCall:
        """Return the call in float64.

        Args:
            layer: the layer in float64, from `in_double`.
        """
        return replace(
            self,
            layer=layer,
            query=self.query.double(),
            key=None if self.key is None else self.key.double(),
            bias=None if self.bias is None else self.bias.double(),
        )

    @property
    def _arguments(self) -> dict[str, Any]:
        return {
            "key_mask": self.key_mask,
            "attn_mask": self.attn_mask,
            "is_causal": self.is_causal,
            "bias": self.bias,
        }

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Attention maps by the equation, (S, H, N, L), without dropout and noise."""
        found = self.layer.weights(self.query, self.key, **self._arguments)
        return found.to(self.query.dtype)

    @torch.no_grad()
    def project(self) -> tuple[Tensor, Tensor, Masks]:
        """Queries (S, H_q, N, E), keys that scores see, and masks."""
        call = self.call()
        dtype = compute_dtype(call.query)
        key = self.layer.core.components(call.key)
        return call.query.to(dtype), key.to(dtype), call.masks

    def call(self) -> HeadCall:
        """The call of the layer's core."""
        return self.layer.call(self.query, self.key, **self._arguments)

    @torch.no_grad()
    def scores(self) -> Tensor:
        """Scores before the softmax, (S, H, N, L), bias included; zero where a pair is masked."""
        call = self.call()
        found, masks = self.layer.core.scores(call), call.masks
        rows, cols = masks.all_rows, range(masks.num_keys)
        bias = masks.bias_block(rows, cols)
        found = found if bias is None else found + bias
        allowed = masks.allowed(rows, cols, found.device)
        return found if allowed is None else found.masked_fill(~allowed, 0.0)

    @torch.no_grad()
    def allowed(self) -> Tensor:
        """Pairs that are not masked, with real queries only, (S, 1 or H, N, L) bool."""
        masks = self.call().masks
        device = self.query.device
        pairs = masks.allowed(masks.all_rows, range(masks.num_keys), device)
        if pairs is None:
            pairs = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        pairs = pairs.expand(self.num_sequences, -1, masks.num_queries, masks.num_keys)
        if self.key is None and self.key_mask is not None:
            pairs = pairs & self.key_mask[:, None, :, None]
        return pairs


def in_double(layer: Attention) -> Attention:
    """Return a copy of a layer in float64; its weights are those of the layer."""
    return copy.deepcopy(layer).double()


@contextmanager
def record(model: nn.Module) -> Iterator[list[LayerCall]]:
    """Collect the calls of every attention layer of a model while the block lasts.

    The layers compute what they always do; only references to their inputs are kept.

    Raises:
        ValueError: a layer is called with a cache (decoding), whose keys are not in the call.
    """
    calls: list[LayerCall] = []

    def watch(name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs.get("cache") is not None:
                raise ValueError("attention with a cache cannot be recorded: run whole sequences")
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            kept = ("query", "key", "key_mask", "attn_mask", "is_causal", "bias")
            found: dict[str, Any] = {k: given[k] for k in kept if k in given}
            found = {k: v.detach() if isinstance(v, Tensor) else v for k, v in found.items()}
            assert isinstance(layer, Attention)
            calls.append(LayerCall(name, layer, **found))

        return hook

    hooks = [
        module.register_forward_pre_hook(watch(name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    ]
    try:
        yield calls
    finally:
        for handle in hooks:
            handle.remove()
