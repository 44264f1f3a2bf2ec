"""What an attention layer computes, opened up: maps, values, masks; and its core replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lit_probattn.analysis.approximation.kernels import kernel_weights
from lit_probattn.attention import Attention, HeadCall
from lit_probattn.attention.functional import repeat_heads


class NotApplicableError(ValueError):
    """The output of a layer is no weighted mean of its values, or it has not the needed kernel."""


@dataclass(frozen=True)
class Opened:
    """One call of an attention layer.

    Args:
        name: the layer's name in the model.
        layer: the layer.
        call: the call of its core.
        query: projected queries, (B, H_q, N, E).
        key: projected keys as scores see them, (B, H_kv, …, L, E).
        value: (B, H, L, E_v).
        weights: attention maps, (B, H, N, L), rows summing to one over `allowed`.
        allowed: pairs that may attend, (B, H, N, L) bool.
        real: queries that are real tokens, (B, N) bool.
        is_causal: whether the call was causal.
    """

    name: str
    layer: Attention
    call: HeadCall
    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    allowed: Tensor
    real: Tensor
    is_causal: bool

    @cached_property
    def output(self) -> Tensor:
        """The exact output of every head, (B, H, N, E_v)."""
        return self.weights @ self.value

    @cached_property
    def num_visible(self) -> Tensor:
        """Keys that every query sees, (B, H, N)."""
        return self.allowed.sum(-1)

    def project(self, output: Tensor) -> Tensor:
        """Apply the output map to heads' outputs: (B, H, N, E_v) -> (B, N, C)."""
        joined = output.to(self.layer.out_proj.weight.dtype).transpose(1, 2).flatten(2)
        result: Tensor = self.layer.out_proj(joined)
        return result

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return queries and keys, (B, H, ·, E), of a layer whose kernel is exp(q · k / √E).

        Raises:
            NotApplicableError: its maps are others.
        """
        heads = self.weights.shape[1]
        if self.key.dim() == 4 and self.query.shape[1] == heads:
            query, key = self.query.float(), repeat_heads(self.key, heads).float()
            found = kernel_weights(query, key, "exp", allowed=self.allowed)
            if torch.allclose(found, self.weights.float(), atol=1e-4):
                return query, key
        raise NotApplicableError(
            f"{self.name}: {type(self.layer).__name__} has not the kernel exp(q · k / √E) that "
            "hashing and random features stand for; leave out lsh and orf"
        )


def open_call(
    name: str,
    layer: Attention,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    bias: Tensor | None = None,
    cache: Any = None,
    rng: Any = None,
) -> Opened:
    """Compute maps and values of a call by the reference; arguments as in `Attention.forward`.

    Raises:
        NotApplicableError: the call uses a cache, or it has no maps, or some weights are negative.
    """
    if cache is not None:
        raise NotApplicableError(f"{name}: decoding with a cache is not approximated")
    try:
        weights = layer.weights(
            query, key, key_mask=key_mask, attn_mask=attn_mask, is_causal=is_causal, bias=bias
        )
    except NotImplementedError as error:
        raise NotApplicableError(f"{name}: {error}") from error
    if float(weights.min()) < 0:
        raise NotApplicableError(
            f"{name}: {type(layer).__name__} has negative weights (heads mixed after the kernel); "
            "no convex combination of values gives its output"
        )
    call = layer.call(
        *(query, key, value),
        key_mask=key_mask,
        attn_mask=attn_mask,
        is_causal=is_causal,
        bias=bias,
    )
    masks = call.masks
    allowed = masks.allowed(masks.all_rows, range(masks.num_keys), query.device)
    whole = torch.ones_like(weights, dtype=torch.bool)
    real = torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
    return Opened(
        name=name,
        layer=layer,
        call=call,
        query=call.query,
        key=layer.core.components(call.key),
        value=repeat_heads(call.value, weights.shape[1]).to(weights.dtype),
        weights=weights,
        allowed=whole if allowed is None else whole & allowed,
        real=key_mask if key is None and key_mask is not None else real,
        is_causal=is_causal,
    )


Core = Callable[[Opened], Tensor]


@contextmanager
def replaced_cores(layers: Mapping[str, Attention], core: Core) -> Iterator[None]:
    """Compute every layer's heads by `core` while the block lasts; (B, H, N, E_v) from `Opened`.

    Projections, masks and the output map stay those of the layer.
    """

    def make(name: str, layer: Attention) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            opened = open_call(name, layer, *args, **kwargs)
            return opened.project(core(opened))

        return forward

    try:
        for name, layer in layers.items():
            vars(layer)["forward"] = make(name, layer)
        yield
    finally:
        for layer in layers.values():
            vars(layer).pop("forward", None)


@contextmanager
def checked_layers(layers: Mapping[str, Attention], tolerance: float = 1e-3) -> Iterator[None]:
    """Check, while the block lasts, that outputs are the weighted means of values.

    Raises:
        NotApplicableError: they are not (another denominator or a factor on the output).
    """

    def check(layer: Attention, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        name = next(n for n, module in layers.items() if module is layer)
        opened = open_call(name, layer, *args, **kwargs)
        expected = opened.project(opened.output)
        real = opened.real
        difference = (out - expected)[real].norm() / out[real].norm().clamp_min(1e-30)
        if not float(difference) < tolerance:
            raise NotApplicableError(
                f"{name}: {type(layer).__name__} puts out something else than the mean of its "
                f"values by its weights (relative difference {float(difference):.1e})"
            )

    hooks = [x.register_forward_hook(check, with_kwargs=True) for x in layers.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
