"""Matrix products of linear attention, a lower bound on the time of its layers in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lit_probattn.attention.engines.loop import device_budget
from lit_probattn.attention.linear.chunkwise import SPAN_PAIRS, chunk_length
from profiling.kernels.config import KernelsConfig, TorchProducts

Make = Callable[..., Tensor]


def linear_products(
    given: TorchProducts, config: KernelsConfig, make: Make
) -> Callable[[], list[Tensor]]:
    """Return a function that runs the matrix products of forward and backward once.

    Operands are contiguous and exist before; output and gradients are allocated by the call, and
    other results are written to existing buffers. There is no feature map, denominator, mask or
    running sum of states. The number of features F is E.
    """
    return (_of_chunks if config.is_causal else _of_sums)(given, config, make)


def _of_sums(given: TorchProducts, config: KernelsConfig, make: Make) -> Callable[[], list[Tensor]]:
    """State f^T v and its product with the queries; four products for the gradients."""
    heads, size = config.batch_size * given.num_heads, config.head_dim
    row, col, value, grad = (make(heads, config.seq_len, size) for _ in range(4))
    state, grad_state = make(heads, size, size), make(heads, size, size)

    def run() -> list[Tensor]:
        torch.bmm(col.mT, value, out=state)
        out = torch.bmm(row, state)
        torch.bmm(row.mT, grad, out=grad_state)
        grads = torch.bmm(grad, state.mT), torch.bmm(value, grad_state.mT)
        return [out, *grads, torch.bmm(col, grad_state)]

    return run


def _of_chunks(
    given: TorchProducts, config: KernelsConfig, make: Make
) -> Callable[[], list[Tensor]]:
    """Products by spans as in `causal_product`, last chunk padded; pairs and states are saved."""
    heads, size = config.batch_size * given.num_heads, config.head_dim
    chunk = min(chunk_length(size), config.seq_len)
    chunks = -(-config.seq_len // chunk)
    pairs_held = device_budget(SPAN_PAIRS, torch.device(config.device))
    per_span = min(chunks, max(1, pairs_held // (heads * chunk * chunk)))
    spans = [min(per_span, chunks - at) for at in range(0, chunks, per_span)]
    parts = [[make(count * heads, chunk, size) for _ in range(4)] for count in spans]
    held = [[make(count * heads, n, n) for n in (size, chunk)] for count in spans]
    pairs = make(per_span * heads, chunk, chunk)
    later = make(per_span * heads, size, size)

    def forward(part: list[Tensor], state: Tensor, kept: Tensor, out: Tensor) -> None:
        row, col, value, _ = part
        torch.bmm(col.mT, value, out=later[: len(row)])
        torch.bmm(row, col.mT, out=kept)
        _two(out, kept, value, row, state)

    def backward(part: list[Tensor], state: Tensor, kept: Tensor, grads: Tensor) -> None:
        row, col, value, grad = part
        here, after = pairs[: len(row)], later[: len(row)]
        torch.bmm(grad, value.mT, out=here)
        _two(grads[0], here, col, grad, state.mT)
        torch.bmm(row.mT, grad, out=after)
        _two(grads[1], here.mT, row, value, after.mT)
        _two(grads[2], kept.mT, grad, col, after)

    def run() -> list[Tensor]:
        results = [torch.empty(4, *part[0].shape) for part in parts]
        together = list(zip(parts, held, results, strict=True))
        for part, (state, kept), result in together:
            forward(part, state, kept, result[0])
        for part, (state, kept), result in reversed(together):
            backward(part, state, kept, result[1:])
        return results

    return run


def _two(out: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    """Write a b + c d."""
    torch.baddbmm(torch.bmm(a, b, out=out), c, d, out=out)
