"""Maps, values and masks of an attention layer's calls, and replacement of its heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lit_probattn.analysis.recording import LayerCall, visible
from lit_probattn.attention import Attention, HeadCall
from lit_probattn.attention.numerics import masked_softmax, repeat_heads
from lit_probattn.base.errors import UnsupportedError, prefixed

_TOLERANCE = 1e-3  # relative difference of outputs


@dataclass(frozen=True)
class Opened:
    """A call of an attention layer with its intermediate results."""

    seen: LayerCall  # the call of the layer
    call: HeadCall  # the call of its core
    weights: Tensor  # maps, (B, H, N, L), rows sum to one over `allowed`

    @property
    def name(self) -> str:
        """Name of the layer in the model."""
        return self.seen.name

    @property
    def layer(self) -> Attention:
        """The layer."""
        return self.seen.layer

    @cached_property
    def value(self) -> Tensor:
        """Values of all heads, (B, H, L, E_v)."""
        return repeat_heads(self.call.value, self.weights.shape[1]).to(self.weights.dtype)

    @cached_property
    def allowed(self) -> Tensor:
        """Pairs that may attend, (B, H, N, L) bool."""
        whole, seen = torch.ones_like(self.weights, dtype=torch.bool), visible(self.call)
        return whole if seen is None else whole & seen

    @cached_property
    def output(self) -> Tensor:
        """Exact output of all heads, (B, H, N, E_v)."""
        return self.weights @ self.value

    @cached_property
    def num_visible(self) -> Tensor:
        """Number of allowed keys of each query, (B, H, N)."""
        return self.allowed.sum(-1)

    def project(self, output: Tensor) -> Tensor:
        """Apply gate and output projection to heads: (B, H, N, E_v) -> (B, N, C)."""
        heads = self.layer.gate(output.to(self.layer.out_proj.weight.dtype), self.seen.query)
        joined = heads.transpose(1, 2).flatten(2)
        return self.layer.out_proj(joined)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return queries and keys, (B, H, ·, E), of a layer with the kernel exp(q · k / √E).

        Raises:
            UnsupportedError: the layer has another kernel.
        """
        query, key = self.call.query, self.layer.core.components(self.call.key)
        heads = self.weights.shape[1]
        if key.dim() == 4 and query.shape[1] == heads:
            query, key = query.float(), repeat_heads(key, heads).float()
            scores = query @ key.mT * query.shape[-1] ** -0.5
            found = masked_softmax(scores, self.allowed)
            if torch.allclose(found, self.weights.float(), atol=1e-4):
                return query, key
        raise UnsupportedError(
            f"{self.name}: {type(self.layer).__name__} does not use the kernel exp(q · k / √E), "
            "which lsh and orf approximate; remove lsh and orf"
        )


def open_call(name: str, layer: Attention, *args: Any, **kwargs: Any) -> Opened:
    """Compute the maps of a call by the reference; arguments are those of `Attention.forward`.

    Raises:
        UnsupportedError: the call has no maps, or negative weights.
        ValueError: the call uses a cache.
    """
    seen = LayerCall.of(name, layer, args, kwargs)
    with prefixed(name, NotImplementedError, to=UnsupportedError):
        weights = seen.weights()
    if float(weights.min()) < 0:
        raise UnsupportedError(
            f"{name}: {type(layer).__name__} has negative weights (heads mixed after the kernel), "
            "so its output is not a convex combination of values"
        )
    return Opened(seen, seen.call(), weights)


Heads = Callable[[Opened], Tensor]


@contextmanager
def replaced_cores(layers: Mapping[str, Attention], heads: Heads) -> Iterator[None]:
    """Compute the heads of layers, (B, H, N, E_v), by a function inside the block.

    Projections, masks and output projection are unchanged.
    """

    def forward(name: str, layer: Attention, *args: Any, **kwargs: Any) -> Tensor:
        opened = open_call(name, layer, *args, **kwargs)
        return opened.project(heads(opened))

    try:
        for name, layer in layers.items():
            vars(layer)["forward"] = partial(forward, name, layer)
        yield
    finally:
        for layer in layers.values():
            vars(layer).pop("forward", None)


@contextmanager
def checked_layers(layers: Mapping[str, Attention]) -> Iterator[None]:
    """Check inside the block that outputs are weighted means of values.

    Raises:
        UnsupportedError: they are not, for example because of another denominator or a factor.
    """

    def check(name: str, layer: Attention, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        opened = open_call(name, layer, *args, **kwargs)
        expected = opened.project(opened.output)
        real = opened.seen.real
        difference = (out - expected)[real].norm() / out[real].norm().clamp_min(1e-30)
        if not float(difference) < _TOLERANCE:
            raise UnsupportedError(
                f"{name}: the output of {type(layer).__name__} is not the mean of its values by "
                f"its weights (relative difference {float(difference):.1e})"
            )

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(check, name), with_kwargs=True))
        yield
