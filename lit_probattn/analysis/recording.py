"""Record the inputs of a model's attention layers without changing its computation."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention import Attention, HeadCall
from lit_probattn.attention.masks import Masks, slice_block
from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.randomness import RandomKey

_POSITIONAL = ("query", "key", "value")
_MASKS = ("key_mask", "attn_mask", "is_causal", "bias")
_OPTIONS = (*_MASKS, "rng")


@dataclass(frozen=True)
class LayerCall:
    """One call of an attention layer; its arguments are those of `Attention.forward`."""

    name: str
    layer: Attention
    query: Tensor  # (S, N, C); S sequences: samples, texts of pairs, or windows of images
    key: Tensor | None = None  # (S, L, C_k); None for self-attention
    value: Tensor | None = None  # (S, L, C_k); None for `key`
    key_mask: Tensor | None = None  # real keys, (S, L) bool; None means all
    attn_mask: Tensor | None = None  # allowed pairs
    is_causal: bool = False
    bias: Tensor | None = None  # added to scores
    rng: RandomKey | None = None  # key of the layer's random draws

    @classmethod
    def of(
        cls, name: str, layer: Attention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LayerCall:
        """Read the arguments of a call.

        Raises:
            ValueError: the call uses a cache (decoding), so it does not contain all keys.
        """
        if kwargs.get("cache") is not None:
            raise ValueError(f"{name}: calls with a cache cannot be recorded: run whole sequences")
        given = dict(zip(_POSITIONAL, args, strict=False)) | dict(kwargs)
        kept: dict[str, Any] = {k: given[k] for k in (*_POSITIONAL, *_OPTIONS) if k in given}
        kept = {k: v.detach() if isinstance(v, Tensor) else v for k, v in kept.items()}
        return cls(name, layer, **kept)

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.query.shape[0]

    @property
    def real(self) -> Tensor:
        """Whether queries are real tokens, (S, N) bool."""
        if self.key is None and self.key_mask is not None:
            return self.key_mask
        return torch.ones(self.query.shape[:2], dtype=torch.bool, device=self.query.device)

    def one(self, index: int, *, padded: bool = False) -> LayerCall:
        """Return the call restricted to one sequence.

        Args:
            padded: keep padding at the end. Otherwise self-attention ends with the last real token,
                which does not change the weights of the remaining tokens.
        """

        names = ("query", "key", "value", "key_mask", "attn_mask", "bias")
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        of_pairs = ("attn_mask", "bias")  # may be shared by all sequences
        shared = [n for n in of_pairs if n in given and (given[n].dim() < 4 or len(given[n]) == 1)]
        here = slice(index, index + 1)
        call = replace(self, **{n: x[here] for n, x in given.items() if n not in shared})
        rng = self.rng or RandomKey(0)
        ids = torch.arange(self.num_sequences) if rng.sample_ids is None else rng.sample_ids
        call = replace(call, rng=replace(rng, sample_ids=ids[here]))
        if padded or call.key is not None or call.key_mask is None:
            return call
        real = call.key_mask[0].nonzero()
        return call.first(int(real[-1]) + 1 if len(real) else 0)

    def first(self, length: int) -> LayerCall:
        """Return the self-attention call restricted to the first `length` positions."""

        def pairs(value: Tensor | None) -> Tensor | None:
            return None if value is None else slice_block(value, range(length), range(length))

        return replace(
            self,
            query=self.query[:, :length],
            key_mask=None if self.key_mask is None else self.key_mask[:, :length],
            attn_mask=pairs(self.attn_mask),
            bias=pairs(self.bias),
        )

    def double(self, layer: Attention) -> LayerCall:
        """Return the call in float64 for a layer of `in_double`."""
        given = {name: getattr(self, name) for name in ("query", "key", "value", "bias")}
        changed = {name: x.double() for name, x in given.items() if x is not None}
        return replace(self, layer=layer, **changed)

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Return the maps by the reference, (S, H, N, L), without dropout."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        return self.layer.weights(self.query, self.key, **options).to(self.query.dtype)

    @torch.no_grad()
    def project(self) -> tuple[Tensor, Tensor, Masks]:
        """Return queries (S, H_q, N, E), the keys of the scores, and masks."""
        call = self.call()
        dtype = compute_dtype(call.query)
        key = self.layer.core.components(call.key)
        return call.query.to(dtype), key.to(dtype), call.masks

    def call(self) -> HeadCall:
        """Return the call of the layer's core."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        return self.layer.call(self.query, self.key, self.value, **options)

    @torch.no_grad()
    def scores(self) -> Tensor:
        """Return scores before the softmax, (S, H, N, L), with bias; zero for masked pairs."""
        call = self.call()
        found, masks = self.layer.core.scores(call), call.masks
        bias = masks.bias_block(masks.all_rows, range(masks.num_keys))
        found = found if bias is None else found + bias
        seen = visible(call)
        return found if seen is None else found.masked_fill(~seen, 0.0)

    @torch.no_grad()
    def allowed(self) -> Tensor:
        """Return unmasked pairs with a real query, (S, 1 or H, N, L) bool."""
        call = self.call()
        pairs = visible(call)
        if pairs is None:
            pairs = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.query.device)
        masks = call.masks
        pairs = pairs.expand(self.num_sequences, -1, masks.num_queries, masks.num_keys)
        return pairs & self.real[:, None, :, None]


def visible(call: HeadCall) -> Tensor | None:
    """Return unmasked pairs, bool broadcastable to (S, H, N, L); None means all."""
    masks = call.masks
    return masks.allowed(masks.all_rows, range(masks.num_keys), call.query.device)


def in_double(layer: Attention) -> Attention:
    """Return a copy of a layer in float64 with the same weights."""
    return copy.deepcopy(layer).double()


@contextmanager
def record(model: nn.Module) -> Iterator[list[LayerCall]]:
    """Collect the calls of all attention layers of a model inside the block.

    The computation is unchanged; only references to the inputs are stored.

    Raises:
        ValueError: a layer is called with a cache (decoding).
    """
    calls: list[LayerCall] = []

    def keep(name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(LayerCall.of(name, layer, args, kwargs))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, Attention):
                hook = module.register_forward_pre_hook(partial(keep, name), with_kwargs=True)
                hooks.enter_context(hook)
        yield calls
