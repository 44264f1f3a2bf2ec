"""Reference and blockwise attention derived from the hooks of a layer.

    scores = reference_scores(query, key, …)                        (B, M, N, L)
    weights = mix_weights(normalise(scores + bias, …), …)           (B, H, N, L)
    output = gate(dropout(weights) @ value, x)

`normalise`, by default the softmax over the keys, maps the rows of each head. `mix_weights` maps
the weights of a pair over heads. Both may read query, key and `query_side(x)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core
from lit_probattn.attention.draws import keep_pairs
from lit_probattn.attention.engines.blocks import block_length
from lit_probattn.attention.engines.loop import block_ranges
from lit_probattn.attention.engines.table import LACKS_OF_BLOCKS
from lit_probattn.attention.masks import Block, span
from lit_probattn.attention.numerics import (
    biased,
    grouped_values,
    masked_softmax,
    repeat_heads,
)
from lit_probattn.attention.variant import Engine, Variant
from lit_probattn.base.graphs import written
from lit_probattn.base.torch_internals import in_backward, with_tensors

__all__ = ["DerivedCore", "OwnScores", "OwnVariant", "OwnWeights", "takes_positions"]

# From queries (B, H, N, E) and keys (B, H, L, E) to scores (B, M, N, L); two optional arguments are
# the positions of queries (N,) and of keys (L,).
OwnScores = Callable[..., Tensor]
# From scores or weights (B, M, N, L), and optionally query, key and side, to weights.
OwnWeights = Callable[..., Tensor]


def _num_arguments(function: Callable[..., Tensor]) -> int:
    named = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    return sum(p.kind in named for p in inspect.signature(function).parameters.values())


def takes_positions(scores: OwnScores) -> bool:
    """Whether scores take positions of queries and keys as additional arguments."""
    return _num_arguments(scores) >= 4


@dataclass(frozen=True)
class Parts:
    """Inputs of the hooks in one block: rows of the queries, and the keys they may attend to.

    Args:
        query: (B, H, n, E).
        key: (B, H_kv, l, E), the first l keys.
        side: (B, …, n, S), or None if the layer has no `query_side`.
    """

    query: Tensor
    key: Tensor
    side: Tensor | None

    @classmethod
    def of(cls, call: HeadCall) -> Parts:
        """Return the inputs of a call in one block."""
        return cls(call.query, call.key, call.side)

    def beside(self, hook: OwnWeights) -> list[Tensor]:
        """Return the further arguments of a hook: query, key and side, or fewer."""
        keys = repeat_heads(self.key, self.query.shape[1])
        given = [self.query, keys, *([] if self.side is None else [self.side])]
        return given[: _num_arguments(hook) - 1]


def block_scores(variant: OwnVariant, call: HeadCall, block: Block, parts: Parts) -> Tensor:
    """Return the scores of a block, each query head with its key head, (B, M, n, l).

    Raises:
        ValueError: `reference_scores` returns another shape.
    """
    query, rows, first = parts.query, block.rows, call.first_row
    places: tuple[Tensor, ...] = ()
    if variant.positions:
        at = torch.arange(rows.start + first, rows.stop + first, device=query.device)
        places = at, torch.arange(parts.key.shape[-2], device=query.device)
    found = variant.function(query, repeat_heads(parts.key, query.shape[1]), *places)
    heads = None if variant.has_hooks else query.shape[1]
    return _checked("reference_scores", found, heads, parts)


def block_weights(variant: OwnVariant, call: HeadCall, block: Block, parts: Parts) -> Tensor:
    """Return the weights of a block before dropout, (B, H, n, l).

    Masked pairs have zero weight after each hook; `normalise` receives the lowest number for them,
    and zeros in fully masked rows, so that hooks need not handle masks.

    Raises:
        ValueError: a hook returns another shape.
    """
    rows, cols = block.rows, block.cols
    scores = biased(block_scores(variant, call, block, parts), call.masks, rows, cols)
    allowed = call.masks.allowed(rows, cols, scores.device)
    if not variant.has_hooks:
        return masked_softmax(scores, allowed)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    hidden, last = scores == float("-inf"), "reference_scores"
    if variant.normaliser is None:
        weights = masked_softmax(scores, None)
    else:
        last, empty = "normalise", hidden.all(-1, keepdim=True)
        # Finite, so that a factor on the scores has a gradient.
        lowest = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        given = parts.beside(variant.normaliser)
        weights = variant.normaliser(lowest.masked_fill(empty, 0.0), *given)
        _checked(last, weights, scores.shape[1], parts)
        weights = weights.masked_fill(hidden, 0.0)
    if variant.mixer is not None:
        last, weights = "mix_weights", variant.mixer(weights, *parts.beside(variant.mixer))
        weights = weights.masked_fill(hidden.all(1, keepdim=True), 0.0)
    return _checked(last, weights, variant.num_heads or None, parts)


def _checked(hook: str, found: Tensor, heads: int | None, parts: Parts) -> Tensor:
    sizes = parts.query.shape[0], parts.query.shape[2], parts.key.shape[-2]
    shape = tuple(found.shape)
    wanted = (sizes[0], heads or (shape[1] if len(shape) > 1 else 1), *sizes[1:])
    if shape != wanted:
        raise ValueError(
            f"{hook} returned shape {shape}, expected (batch, heads, queries, keys) = {wanted}"
        )
    return found


def _attend(
    variant: OwnVariant,
    call: HeadCall,
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    side: Tensor | None,
    *_: Tensor,
) -> Tensor:
    """Return the output of a block, (B, H, n, E_v); further tensors are only saved."""
    weights, dropout = block_weights(variant, call, block, Parts(query, key, side)), call.dropout
    if dropout is not None:
        batch, heads = weights.shape[:2]
        keep = keep_pairs(dropout, batch, heads, block.rows, block.cols, weights.device)
        weights = weights * keep * dropout.scale
    return grouped_values(weights, value)


def stored(call: HeadCall, variant: OwnVariant) -> Tensor:
    """Compute all pairs at once, as in the equation."""
    call = call.precise()
    block = Block(call.masks.all_rows, call.masks.all_cols)
    return _attend(variant, call, block, call.query, call.key, call.value, call.side)


def _held(variant: OwnVariant) -> Callable[..., Tensor]:
    """Return a caller of functions (function, *tensors) that keeps parameters for backward.

    Backward recomputes blocks after `torch.func.functional_call` has restored the parameters. A
    graph contains them as inputs. Buffers that a forward pass assigns remain assigned.
    """
    layer = getattr(variant.function, "__self__", None)
    if written() is not None or not isinstance(layer, nn.Module):
        return lambda function, *tensors: function(*tensors)
    held: dict[str, Tensor] = dict(layer.named_parameters(remove_duplicate=False))
    held |= layer.named_buffers(remove_duplicate=False)

    def call(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        with with_tensors(layer, held) if in_backward() else nullcontext():
            return function(*tensors)

    return call


def in_blocks(call: HeadCall, variant: OwnVariant) -> Tensor:
    """Compute blocks of queries, which backward recomputes; O(N · block) memory."""
    call = call.precise()
    query, masks, side = call.query, call.masks, call.side
    heads = max(query.shape[1], variant.num_heads)
    length = block_length(query.shape[0] * heads * masks.num_keys, masks.num_queries, query.device)
    blocks = block_ranges(masks.num_queries, length)
    saved = masks.boolean if masks.bias is None else [*masks.boolean, masks.bias]
    hold = _held(variant)
    outs: list[Tensor] = []
    for rows in blocks:
        cols = masks.visible_keys(rows)
        of_keys = (x[:, :, : cols.stop] for x in (call.key, call.value))
        of_side = None if side is None else side[..., rows.start : rows.stop, :]
        parts = (query[:, :, rows.start : rows.stop], *of_keys, of_side, *saved)
        run = partial(hold, partial(_attend, variant, call, Block(rows, cols)))
        out = checkpoint(run, *parts, use_reentrant=False, preserve_rng_state=False)
        if rows.start and not outs:  # rows of skipped blocks in a prediction of memory
            outs.append(out.new_empty(*out.shape[:2], rows.start, out.shape[-1]))
        outs.append(out)
    return torch.cat(outs, -2)


@dataclass(frozen=True)
class OwnVariant(Variant):
    """A variant that is defined by its hooks.

    Args:
        function: from queries and keys to scores.
        name: name for messages.
        pairwise: whether a row of weights depends only on its query, the keys and their positions;
            if not, there are no blocks.
        positions: whether the function takes positions.
        normaliser: from scores to weights; None means the softmax.
        mixer: from weights to weights, over heads.
        mixes_heads: whether weights of a head depend on scores of others, each of which is masked.
        has_side: whether hooks read `query_side`.
        num_heads: heads of the weights; 0 means the heads of the query.
    """

    takes_scale: ClassVar[bool] = False
    own_engines: ClassVar[Mapping[str, Engine]] = {
        "reference": Engine(stored),
        "blockwise": Engine(
            in_blocks,
            lacks={
                **LACKS_OF_BLOCKS,
                "all pairs": "cannot split the scores of {}: pairwise is False",
            },
        ),
    }

    function: OwnScores
    name: str = "own variant"  # type: ignore[misc]
    pairwise: bool = True
    positions: bool = False
    normaliser: OwnWeights | None = None
    mixer: OwnWeights | None = None
    mixes_heads: bool = False
    has_side: bool = False
    num_heads: int = 0

    @property
    def has_hooks(self) -> bool:
        """Whether the weights are more than a softmax of the scores."""
        return self.normaliser is not None or self.mixer is not None

    def scores(self, call: HeadCall) -> Tensor:
        """Return the scores of a call, (B, M, N, L)."""
        block = Block(span(0, call.query.shape[2]), span(0, call.num_keys))
        return block_scores(self, call, block, Parts.of(call))

    def weights(self, call: HeadCall) -> Tensor:
        """Return the weights that multiply the values, (B, H, N, L), without dropout."""
        call = call.precise()
        block = Block(call.masks.all_rows, call.masks.all_cols)
        return block_weights(self, call, block, Parts.of(call))

    def needs(self) -> dict[str, str]:
        """Return the features that Python functions and scores of all pairs require."""
        after = {"normalise": self.normaliser, "mix_weights": self.mixer}
        defined = ", ".join(name for name, hook in after.items() if hook is not None)
        found = {"own scores": "reference_scores"}
        found |= {"own weights": defined} if defined else {}
        return found if self.pairwise else {**found, "all pairs": self.name}

    def check(self, call: HeadCall) -> None:
        """Raise for a scale, masks per head if heads are mixed, and a missing side."""
        if call.scale is not None:
            raise ValueError(
                f"{self.name} does not support scale={call.scale}: its scores include one"
            )
        if self.has_side and call.side is None:
            raise ValueError(
                f"{self.name} reads the input of its layer (query_side): call the layer, not its "
                "core"
            )
        pairs = call.masks.attn_mask
        if self.mixes_heads and pairs is not None and pairs.shape[1] > 1:
            raise ValueError(
                f"{self.name} mixes heads after masking, expected one attn_mask for all heads, "
                f"received {pairs.shape[1]} heads"
            )


class DerivedCore(Core):
    """The core of a layer that defines scores; the layer owns the parameters."""

    makes = OwnVariant

    options_class = OwnVariant

    def make_parameters(self, options: OwnVariant) -> None:
        """Store the variant, which is the same for every call."""
        self.knows_positions, self._variant = options.positions, options
        self.takes_padding = options.pairwise

    @property
    def name(self) -> str:
        """The name of the layer's class."""
        return self._variant.name

    def variant(self, call: HeadCall) -> OwnVariant:
        """Return the variant."""
        return self._variant
