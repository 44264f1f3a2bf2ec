"""What a host is: a library whose attention layers we find, read, exchange and try."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_probattn.attention.call import HeadLayout
from lit_probattn.attention.core import Core
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.interop.swap.settings import Settings
from lit_probattn.interop.weights import HeadWeights, RotaryPairs

# Batch and tokens of the random input that errors are measured on.
PROBE = (2, 16)


@dataclass(frozen=True)
class Place:
    """A layer in a model.

    Args:
        name: its name in the model.
        module: the layer.
        parent: the module that holds it; the layer itself where it is the whole model.
        model: the model.
    """

    name: str
    module: nn.Module
    parent: nn.Module
    model: nn.Module


@dataclass(frozen=True)
class Sizes:
    """What is known of a layer before its weights are read.

    Args:
        num_heads: H.
        num_kv_heads: H_kv.
        head_dim: E, of queries and keys.
        value_head_dim: E_v.
        rotary: how rotated entries of a head are paired. None means nothing is rotated.
        fixed_heads: why the number of heads cannot change; empty if it can.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    rotary: RotaryPairs | None = None
    fixed_heads: str = ""

    def layout(self, settings: Settings) -> HeadLayout:
        """Return the heads after the swap."""
        heads, kv = (n // settings.group_size for n in (self.num_heads, self.num_kv_heads))
        sizes = (heads, kv, kv, heads, self.head_dim, self.value_head_dim)
        return HeadLayout(*sizes, keys_per_head=settings.keys_per_head)


class Host(ABC):
    """Knows the attention layers of one library."""

    name: str

    @abstractmethod
    def claims(self, place: Place) -> bool:
        """Whether this is an attention layer of the library, one that can be swapped or not."""

    @abstractmethod
    def sizes(self, place: Place) -> Sizes:
        """Return the layer's sizes; changes nothing.

        Raises:
            UnsupportedError: the layer does something that a swap would lose.
        """

    @abstractmethod
    def read(self, place: Place, sizes: Sizes) -> HeadWeights:
        """Return the layer's weights."""

    @abstractmethod
    def put(
        self, place: Place, weights: HeadWeights, core: Core, settings: Settings
    ) -> nn.Module | None:
        """Return what is to stand in the layer's place, or exchange its parts and return None."""

    @abstractmethod
    def probe(self, place: Place) -> Tensor:
        """Return what the layer makes of a random input, behind its output projection."""

    def owned(self, place: Place) -> list[nn.Module]:
        """Return the modules that a swap changes, for counting parameters."""
        return [place.module]

    def finish(self, model: nn.Module) -> None:  # noqa: B027
        """Do what the whole model needs after layers were exchanged; most need nothing."""


def plain_linear(name: str, module: object) -> nn.Linear:
    """Return a projection if it is an ordinary linear layer.

    Raises:
        UnsupportedError: it is not: quantised, wrapped by an adapter, missing.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return module
    raise UnsupportedError(f"{name} is {type(module).__name__}, expected torch.nn.Linear")


def replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another wherever a model holds it."""
    names = [name for name, m in model.named_modules(remove_duplicate=False) if m is old]
    for name in names:
        holder, _, own = name.rpartition(".")
        setattr(model.get_submodule(holder), own, new)


def random_input(like: Tensor, width: int, tokens: int = PROBE[1], seed: int = 0) -> Tensor:
    """Return standard normal tokens (B, N, width) in the dtype of a weight, always the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(PROBE[0], tokens, width, generator=generator).to(like)
