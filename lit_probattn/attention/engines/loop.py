"""Loops over blocks of positions: their ranges, their sizes by device, and recurrences over them.

Whoever loops by these functions does not ask whether memory is being predicted; they do. A
prediction runs the last three blocks, which set the peak: no block holds more than the last,
because a causal mask shows it the most keys, or a whole one comes before a smaller last one; and a
block is computed while the one before it is still held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_probattn.base.memory import device_type, is_predicting, only_shapes

_Block = TypeVar("_Block")


def device_budget(budgets: Mapping[str, int], device: torch.device) -> int:
    """Return the entry of a device: that of `cpu`, or that of `cuda` for all others."""
    return budgets["cpu" if device_type(device) == "cpu" else "cuda"]


def block_ranges(length: int, step: int) -> list[range]:
    """Return the blocks of `step` positions that a loop goes over; the last may be shorter.

    All of them, in order, but in a prediction those that set the peak: the first is then not at 0.

    Args:
        length: number of positions.
        step: positions of a block.
    """
    return _run([range(start, min(start + step, length)) for start in range(0, length, step)])


def _run(blocks: list[_Block]) -> list[_Block]:
    return blocks[-3:] if is_predicting() else blocks


def num_iterations(most: int, tensor: Tensor) -> int:
    """Return how many of `most` equal iterations over a tensor to run: all, or 3 for its shapes.

    Each holds what the third holds.
    """
    return min(most, 3) if only_shapes(tensor) else most


def scan_chunks(
    step: Callable[..., tuple[Tensor, Tensor]],
    state: Tensor,
    inputs: Sequence[Tensor],
    length: int,
) -> tuple[list[Tensor], Tensor]:
    """Run a recurrence over chunks of positions, each computed again in backward.

    Args:
        step: (state, *inputs of a chunk) -> output of its positions (B, H, n, E), state after it.
        state: before the first position.
        inputs: of all positions, (B, H, N, …).
        length: positions of a chunk.

    Returns:
        outputs that give (B, H, N, E) along the positions, and the state after the last.
    """

    def run(state: Tensor, _held: Tensor | None, *chunk: Tensor) -> tuple[Tensor, Tensor]:
        return step(state, *chunk)

    num_positions = inputs[0].shape[2]
    saves = torch.is_grad_enabled() and num_positions > length
    chunks = list(zip(*(x.split(length, 2) for x in inputs), strict=True)) if num_positions else []
    # Most is held when backward begins if a chunk's state outweighs the gradients of its inputs.
    outweighs = not saves or state.numel() >= sum(x.numel() for x in chunks[0])
    made = _run(chunks) if outweighs else chunks
    skipped = len(chunks) - len(made)
    outputs: list[Tensor] = []
    # Of chunks that a prediction skips, what they leave: outputs, and states saved for backward.
    held = state.new_empty(skipped, *state.shape) if skipped and saves else None
    for chunk in made:
        given: tuple[Any, ...] = (state, held, *chunk)
        if saves:
            out, state = checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            out, state = run(*given)
        if skipped and not outputs:
            outputs.append(out.new_empty(*out.shape[:2], skipped * length, *out.shape[3:]))
        outputs.append(out)
        held = None
    return outputs, state
