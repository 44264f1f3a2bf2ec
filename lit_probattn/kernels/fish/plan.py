"""What one call of the FiSH kernels is: sizes, head groups, launch configurations, arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_probattn.kernels.runtime import (
    Launch,
    Shape,
    choose_launch,
    is_recording,
    launch,
    padded,
    target_capability,
    unit_stride,
)

# Registers of a thread that tiles may fill; the rest goes to addresses and what the compiler keeps.
# Before Hopper all operands of a product pass through registers.
_BUDGET = {
    80: {"forward": 236, "grad_query": 260, "grad_key": 245, "grad_bias": 220},
    90: {"forward": 256, "grad_query": 280, "grad_key": 245, "grad_bias": 240},
}
# Bytes of shared memory that the tiles of a program may take.
_SHARED = {80: 156 << 10, 90: 216 << 10}
# With fewer rows than 16 per warp two warps share rows, and part of a tile is held twice.
_SHARED_ROWS = {"forward": 0.75, "grad_key": 0.6, "crowded": 0.6}
# Most local heads of one program, and most columns of their accumulators together.
MOST_HEADS, MOST_COLUMNS = 4, 256
# Tile sizes (queries, keys) and warps of 16-bit kernels, best first.
_TILES = {
    "forward": (
        *((128, 64, 8), (128, 32, 8), (128, 16, 8)),
        *((64, 32, 8), (64, 16, 8), (64, 16, 4)),
    ),
    "grad_query": ((64, 32, 8), (64, 16, 8)),
    "grad_key": ((64, 64, 4), (32, 128, 8), (32, 64, 4), (32, 64, 8), (16, 64, 4), (16, 64, 8)),
    "grad_bias": ((64, 64, 8), (64, 32, 8), (32, 32, 4)),
}


@dataclass(frozen=True)
class Plan:
    """How one kernel covers a call.

    Args:
        group: local heads of one program.
        num_groups: programs that share a tile.
        launch: tile sizes, warps and stages.
    """

    group: int
    num_groups: int
    launch: Launch


@dataclass(frozen=True)
class Heads:
    """What the choice of a plan depends on.

    Args:
        num_global: G.
        num_heads: H.
        head_dim: padded width of the widest head.
        units: hidden units of a two-layer mixing, or 0.
        noise: kind of noise.
        itemsize: bytes of an entry of query.
    """

    num_global: int
    num_heads: int
    head_dim: int
    units: int
    noise: int
    itemsize: int

    def slots(self, group: int) -> int:
        """Sums that one program of the key pass makes for weights and noise scales."""
        units, maps = self.units, self.num_global
        if units == 0:
            return group * maps + (0, maps, group)[self.noise]
        return units * group + units * maps + units + (0, maps, units)[self.noise]

    def shared_bytes(self, group: int, found: Launch) -> int:
        """Estimate the shared memory of a forward program: queries, and keys and values twice."""
        columns = found.block_q * self.num_global
        columns += 2 * found.block_k * (self.num_global + group)
        return columns * self.head_dim * self.itemsize

    def registers(self, kernel: str, group: int, found: Launch) -> float:
        """Estimate the registers per thread of a program; fitted to compiled kernels."""
        threads = 32 * found.num_warps
        tile = found.block_q * found.block_k / threads
        maps = self.num_global
        noise = (0, maps, 6 if self.units == 0 else min(4, self.units))[self.noise]
        local = group + 1 if self.units else 0
        if kernel == "forward":
            sums = group * self.head_dim * found.block_q / threads
            return sums + (maps + noise + local + 2) * tile + 8 * (maps + group) + 4 * group
        local += group if self.units else 0
        tiles = (2 * maps + noise + local + 3) * tile
        if kernel == "grad_query":
            sums = maps * self.head_dim * found.block_q / threads
            return sums + tiles + 12 * (maps + 2 * group) + 2 * group
        if kernel == "grad_key":
            sums = (maps + group) * self.head_dim * found.block_k / threads
            return sums + tiles + self.slots(group)
        return (maps + noise + local + group + 3) * tile + 12 * (maps + group)


def head_groups(heads: Heads) -> list[int]:
    """Return the head groups to try, largest first.

    Several groups that draw noise per head hold a power of two: noise comes in fours.
    """
    most = max(1, min(MOST_HEADS, MOST_COLUMNS // heads.head_dim))
    if heads.num_heads <= most:
        groups = [heads.num_heads]
    elif heads.noise == 2 and heads.units == 0:
        groups = [1 << (most.bit_length() - 1)]
    else:
        groups = [-(-heads.num_heads // -(-heads.num_heads // most))]  # groups of even size
    return groups + [g for g in (4, 2, 1) if g < groups[0]]


def make_plan(kernel: str, heads: Heads, device: torch.device) -> Plan:
    """Return how a kernel covers a call: the largest head group with a tile that fits, or one head.

    Larger groups compute the global maps fewer times. Tuned tables change the tile, not the group.
    """
    capability = 90 if target_capability(device) >= 90 else 80
    options = [Launch(q, k, warps, 2) for q, k, warps in _TILES[kernel]]
    groups = head_groups(heads)
    compiled = device.type == "cuda" or is_recording()
    if heads.itemsize == 4 and compiled:  # IEEE products run on ordinary units, out of registers
        options, groups = [Launch(32, 32, 8, 1)], [1]
    group, default = groups[-1], options[-1]
    for candidate in groups:
        fits = [o for o in options if _fits(kernel, heads, candidate, o, capability)]
        if fits:
            group, default = candidate, fits[0]
            break
    name = f"fish_{heads.units}_{heads.noise}_{group}_{kernel}"
    shape = Shape(name, heads.head_dim, heads.num_global, heads.itemsize)
    found = choose_launch(shape, device, lambda _: default)
    return Plan(group, -(-heads.num_heads // group), found)


def _fits(kernel: str, heads: Heads, group: int, found: Launch, capability: int) -> bool:
    budget: float = _BUDGET[capability][kernel]
    if kernel == "forward" and heads.shared_bytes(group, found) > _SHARED[capability]:
        return False
    if kernel == "forward":  # wider key tiles keep more addresses
        budget -= 0.4 * group * found.block_k if capability < 90 else found.block_k // 64 * 8
        if heads.head_dim >= 128 and found.block_q >= 128 and (heads.noise or heads.units):
            return False
    if heads.units:
        budget -= 16
    if kernel == "grad_key" and group > 2 and found.block_q < 32:
        return False  # two groups with larger tiles make fewer addresses
    rows = {"forward": found.block_q, "grad_key": found.block_k}.get(kernel)
    if rows is not None and rows < 16 * found.num_warps:
        wide = heads.num_global * heads.head_dim >= 256
        crowded = heads.units > 0 or heads.noise == 2 or (heads.noise == 1 and wide)
        budget *= _SHARED_ROWS["crowded" if crowded or capability < 90 else kernel]
    return heads.registers(kernel, group, found) <= budget


class FishCall:
    """Sizes, strides and switches that the forward and backward kernels share.

    The arguments are those of the operator; `out` is the output or its gradient.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: Tensor,
        bias_1: Tensor | None,
        second: Tensor | None,
        scale: Tensor | None,
        noise_draw: Tensor | None,
        drop_draw: Tensor | None,
        key_mask: Tensor | None,
        pair_mask: Tensor | None,
        bias: Tensor | None,
        is_causal: bool,
        noise: int,
        first_row: int,
        on_global: float,
        threshold: int,
    ) -> None:
        self.query, self.key, self.value = (unit_stride(x) for x in (query, key, value))
        self.batch, self.num_global, self.num_rows, head_dim = query.shape
        self.num_heads, self.num_cols, value_dim = value.shape[1:]
        self.noise = noise
        self.units = 0 if second is None else second.shape[1]
        width = max(padded(head_dim), padded(value_dim))
        self.heads = Heads(
            *(self.num_global, self.num_heads, width, self.units, noise, query.element_size())
        )
        small = [None if x is None else x.contiguous() for x in (first, bias_1, second, scale)]
        masks = [None if x is None else x.view(torch.uint8) for x in (key_mask, pair_mask)]
        key_mask = None if masks[0] is None else masks[0].contiguous()
        pointers = (*small, noise_draw, drop_draw, key_mask, masks[1], bias)
        # Kernels move pointers before the switches say whether they are read: any tensor will do.
        self.pointers = tuple(query if x is None else x for x in pointers)
        self.pair_strides = (*_pair_strides(masks[1]), *_pair_strides(bias))
        self.numbers = (
            *(self.num_rows, self.num_cols),
            *(self.num_cols - self.num_rows, first_row, float(on_global), threshold),
            *(65536 / (32768 - threshold), self.batch),
        )
        pair_heads = 0 if pair_mask is None else (1 if pair_mask.shape[1] == 1 else 2)
        self.flags: dict[str, Any] = {
            "G": self.num_global,
            "U": self.units,
            "E": head_dim,
            "EP": padded(head_dim),
            "D": value_dim,
            "DP": padded(value_dim),
            "NOISE": noise,
            "HAS_B1": bias_1 is not None,
            "CAUSAL": is_causal,
            "HAS_KEY_MASK": key_mask is not None,
            "PAIR_MASK": pair_heads,
            "HAS_BIAS": bias is not None,
            "DROPOUT": drop_draw is not None,
        }

    def plan(self, kernel: str) -> Plan:
        """Return how a kernel covers this call."""
        return make_plan(kernel, self.heads, self.query.device)

    def run(
        self,
        kernel: Any,
        plan: Plan,
        num_tiles: int,
        tensors: tuple[Tensor, ...],
        out: Tensor,
        *numbers: int,
        **constants: Any,
    ) -> None:
        """Launch one program per tile of each sample and head group.

        Args:
            kernel: the kernel.
            plan: how it covers the call.
            num_tiles: tiles of one sample (or of one bias) and group.
            tensors: what the kernel reads or writes, after query, key and value.
            out: the output, or its gradient, whose strides the kernel takes.
            numbers: what this kernel takes after the shared numbers.
            constants: what this kernel takes beside the shared switches.
        """
        strides = [s for x in (self.query, self.key, self.value, out) for s in x.stride()[:3]]
        launch(
            kernel,
            num_tiles * plan.num_groups,
            (
                *(self.query, self.key, self.value, *tensors, *self.pointers),
                *(*strides, *self.pair_strides, self.num_heads, plan.num_groups),
                *(*self.numbers, *numbers),
            ),
            {
                **self.flags,
                **constants,
                "HG": plan.group,
                "ALIGNED": plan.num_groups == 1 or plan.group % 4 == 0,
                "BLOCK_Q": plan.launch.block_q,
                "BLOCK_K": plan.launch.block_k,
                "num_warps": plan.launch.num_warps,
                "num_stages": plan.launch.num_stages,
            },
        )

    def tiles(self, size: int, block: int) -> int:
        """Return how many tiles of `block` all samples have."""
        return math.ceil(size / block) * self.batch


def _pair_strides(tensor: Tensor | None) -> tuple[int, ...]:
    """Return the four strides, 0 where the tensor is broadcast or absent."""
    if tensor is None:
        return (0, 0, 0, 0)
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(0 if size == 1 else stride for size, stride in pairs)
