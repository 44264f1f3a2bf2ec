"""What one call of the linear kernels is: sizes, chunks, states of chunks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lit_probattn.kernels.launch import Launch, Shape, choose_launch
from lit_probattn.kernels.runtime import launch, padded, unit_stride


def default_launch(shape: Shape) -> Launch:
    """Return positions per chunk (`block_q`), warps and stages where none were tuned."""
    if shape.itemsize == 4:
        return Launch(32, 32, 4, 1)
    if shape.head_dim > 64:  # shorter chunks: the state fills the registers
        return Launch(32, 32, 8, 1)
    return Launch(64, 64, 8 if shape.head_dim > 32 else 4, 2)


class LinearCall:
    """Sizes, strides and switches that all kernels of one call share."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor | None,
        norm_weight: Tensor | None,
        has_totals: bool,
        is_causal: bool,
    ) -> None:
        self.query, self.key, self.value = (unit_stride(x) for x in (query, key, value))
        self.batch, self.heads, self.rows, self.features = query.shape
        self.sources, self.width = value.shape[1], value.shape[3]
        self.weight = None if weight is None else weight.float().contiguous()
        self.norm_weight = None if norm_weight is None else norm_weight.float().contiguous()
        self.has_totals = has_totals
        self.weighted = weight is not None
        self.readers = self.heads if self.weighted else self.heads // self.sources
        width = max(padded(self.features), padded(self.width))
        shape = Shape("linear", width, 1, query.element_size())
        self.found = choose_launch(shape, query.device, default_launch)
        self.chunk = self.found.block_q
        self.chunks = max(1, math.ceil(self.rows / self.chunk))
        self.is_causal = is_causal
        self.weights = (self.weight, self.norm_weight)
        self.sizes = (self.heads, self.sources, self.rows, self.chunks)
        self.flags: dict[str, Any] = {
            "WEIGHTED": self.weighted,
            "HAS_TOTALS": has_totals,
            "F": self.features,
            "FP": padded(self.features),
            "E": self.width,
            "EP": padded(self.width),
            "T": self.chunk,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        }

    @property
    def options(self) -> dict[str, int]:
        """Warps and stages."""
        return {"num_warps": self.found.num_warps, "num_stages": self.found.num_stages}

    def input_strides(self) -> tuple[int, ...]:
        """Return three strides each of query, key and value."""
        return tuple(s for x in (self.query, self.key, self.value) for s in x.stride()[:3])

    def states(
        self, x: Tensor, y: Tensor, d: Tensor | None, readers: int, weights: tuple[Any, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of every chunk, (B, S, chunks, F, E), and the totals, (B, S, chunks, F).

        Args:
            x: features, (B, H or S, N, F).
            y: what they are multiplied with, (B, H or S, N, E).
            d: numbers that weigh `x` in the totals, (B, H, N). None means 1.
            readers: heads that read one source.
            weights: p and r.
        """
        from lit_probattn.kernels.linear.kernels import chunk_sums_kernel

        places = (self.batch, self.sources, self.chunks)
        sums = x.new_empty(*places, self.features, self.width, dtype=torch.float32)
        totals = x.new_empty(
            (*places, self.features if self.has_totals else 0), dtype=torch.float32
        )
        flags = {**self.flags, "WEIGHTED": weights[0] is not None}
        launch(
            chunk_sums_kernel,
            self.batch * self.sources * self.chunks,
            (
                *(x, y, d, *weights, sums, totals, *x.stride()[:3], *y.stride()[:3]),
                *(x.shape[1], self.sources, self.rows, self.chunks),
            ),
            {**flags, "READERS": readers, "ONES": d is None, **self.options},
        )
        return sums, totals

    def scan(self, sums: Tensor, start: Tensor | None, reverse: bool) -> Tensor:
        """Turn sums of chunks into sums before (after) each, in place; return the sum of all."""
        from lit_probattn.kernels.linear.kernels import scan_kernel

        size = math.prod(sums.shape[3:])
        end = sums.new_empty(*sums.shape[:2], *sums.shape[3:])
        block = 1024
        launch(
            scan_kernel,
            self.batch * self.sources * math.ceil(size / block),
            (sums, start, end, self.chunks, size),
            {
                "REVERSE": reverse,
                "HAS_START": start is not None,
                "TOTAL": not self.is_causal,
                "BLOCK": block,
                "num_warps": 4,
            },
        )
        return end

    def forward_states(
        self, state: Tensor | None, total: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return states and totals before every chunk, and those after all."""
        sums, totals = self.states(self.key, self.value, None, 1, (None, None))
        end = self.scan(sums, state, reverse=False)
        total_end = self.scan(totals, total, reverse=False)
        return sums, totals, end, total_end


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor in float32, its numbers in a row; None stays None."""
    return None if tensor is None else tensor.float().contiguous()
