"""Loops over blocks of positions: ranges, sizes by device, and recurrences.

Callers of these functions need not check whether memory is being predicted. A prediction runs only
the last three blocks, which set the peak: no block needs more memory than the last one (a causal
mask allows it the most keys) or the whole block before a smaller last one; and a block is computed
while the previous one is still in memory.
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
    """Return the entry of a device: `cpu`, or `cuda` for all others."""
    return budgets["cpu" if device_type(device) == "cpu" else "cuda"]


def block_ranges(length: int, step: int) -> list[range]:
    """Return the blocks of `step` positions that a loop runs; the last may be shorter.

    While predicting memory, only the blocks that set the peak, so the first may not start at 0.

    Args:
        length: number of positions.
        step: positions of a block.
    """
    return _run([range(start, min(start + step, length)) for start in range(0, length, step)])


def _run(blocks: list[_Block]) -> list[_Block]:
    return blocks[-3:] if is_predicting() else blocks


def num_iterations(most: int, tensor: Tensor) -> int:
    """Return how many of `most` equal iterations over a tensor to run: all, or 3 for shapes only.

    Each iteration needs as much memory as the third.
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
        step: (state, *inputs of a chunk) -> output of its positions (B, H, n, E), next state.
        state: state before the first position.
        inputs: inputs of all positions, (B, H, N, …).
        length: positions of a chunk.

    Returns:
        Outputs whose concatenation is (B, H, N, E), and the state after the last position.
    """

    def run(state: Tensor, _held: Tensor | None, *chunk: Tensor) -> tuple[Tensor, Tensor]:
        return step(state, *chunk)

    num_positions = inputs[0].shape[2]
    saves = torch.is_grad_enabled() and num_positions > length
    chunks = list(zip(*(x.split(length, 2) for x in inputs), strict=True)) if num_positions else []
    # The peak is at the start of backward if a chunk's state outweighs its inputs' gradients.
    outweighs = not saves or state.numel() >= sum(x.numel() for x in chunks[0])
    made = _run(chunks) if outweighs else chunks
    skipped = len(chunks) - len(made)
    outputs: list[Tensor] = []
    # Tensors that skipped chunks of a prediction leave: outputs, and states saved for backward.
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
