"""What the operators of `mixture.py` and `mixed.py` have in common.

A graph of `torch.compile` holds each of them whole: fake forms give shapes, and backward is an
operator too. Elsewhere the same functions run below an `autograd.Function`, which knows its draws
by their key; a graph knows the words that the key gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_probattn.attention.draws import philox_words
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.rowpass.terms import RowTerms
from lit_probattn.kernels.operator import define_operators
from lit_probattn.randomness import STREAM_DROPOUT, AttentionDropout, RandomKey

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class DrawnKey(RandomKey):
    """A key of which the words for one purpose are known, and nothing else."""

    words: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, words: Tensor) -> DrawnKey:
        """Return the key of what `draws.philox_words` returns, (2 + B,)."""
        first, second = words[:2].tolist()
        return cls(0, sample_ids=words[2:], words=(first, second))

    def philox_key(self, stream: int) -> tuple[int, int]:
        """Return the words."""
        return self.words


class PairCall(NamedTuple):
    """Masks and dropout as an operator takes them; `draw` is what `philox_words` returns."""

    key_mask: Tensor | None
    pair_mask: Tensor | None
    draw: Tensor | None
    is_causal: bool
    heads: int
    threshold: int

    @classmethod
    def of(cls, terms: RowTerms, batch: int, device: torch.device) -> PairCall:
        """Return what an operator needs of the terms besides tensors with gradients."""
        masks, dropout = terms.masks, terms.dropout
        draw = None
        if dropout is not None:
            draw = philox_words(dropout.key, STREAM_DROPOUT, batch, device)
        return cls(
            masks.key_mask,
            masks.attn_mask,
            draw,
            masks.is_causal,
            terms.num_heads,
            0 if dropout is None else dropout.threshold,
        )


def row_terms(call: Any, **terms: Any) -> RowTerms:
    """Return the terms of an operator's inputs; `terms` are those of the kind of attention."""
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    masks = Masks(queries, keys, call.key_mask, call.pair_mask, call.is_causal, call.bias)
    found = RowTerms(masks, None, call.heads, coef=call.coef, **terms)
    if call.draw is None:
        return found
    key = DrawnKey.of(call.draw)
    dropout = AttentionDropout((call.threshold + 32768) / 65536, key)
    return replace(found, dropout=dropout, samples=key.sample_ids)


def define_row_operator(
    name: str,
    inputs: type[Any],
    forward: Callable[[Any], Tensor],
    backward: Callable[[Any, Sequence[Tensor | None], Sequence[bool], Tensor], Gradients],
    *,
    gradients: tuple[str, ...],
) -> Any:
    """Define an operator that returns (B·H, N, E_v), and its backward; return the first.

    Args:
        name: behind `lit_probattn::`.
        inputs: see `define_operators`.
        forward: returns the output.
        backward: takes the inputs, those that `gradients` names, which of them need a gradient, and
            the gradient of the output; returns the gradients.
        gradients: names of the inputs that have gradients.
    """

    def room(call: Any) -> tuple[Tensor, ...]:
        value = call.value
        return (value.new_empty(value.shape[0], call.query.shape[-2], value.shape[-1]),)

    def run_backward(call: Any, grad: Tensor, skipped: Sequence[str]) -> tuple[Tensor, ...]:
        tensors = [getattr(call, name) for name in gradients]
        needs = [
            x is not None and name not in skipped
            for name, x in zip(gradients, tensors, strict=True)
        ]
        found = backward(call, tensors, needs, grad)
        return tuple(call.query.new_empty(0) if x is None else x.contiguous() for x in found)

    return define_operators(
        (name, f"{name}_backward"),
        inputs,
        lambda call: (forward(call),),
        run_backward,
        new_outputs=room,
        gradients=gradients,
        optional=tuple((name,) for name in gradients),
        flops=None,
        has_normaliser=False,
        num_outputs=1,
        dtype=None,
    )
