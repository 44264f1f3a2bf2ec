"""The plan of a FiSH call: sizes, head groups, launch configurations, arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_probattn.kernels.runtime import (
    HeadRows,
    Launch,
    Pairs,
    Shape,
    choose_launch,
    head_rows,
    is_recording,
    launch,
    make_pairs,
    padded,
    target_capability,
    unit_stride,
    unseen,
)

# Registers per thread available to tiles; addresses and the compiler need the rest.
# Before Hopper all operands of a product pass through registers.
_BUDGET = {
    80: {"forward": 236, "query": 260, "key": 245, "value": 245, "bias": 220},
    90: {"forward": 256, "query": 305, "key": 262, "value": 245, "bias": 240},
}
_DROPOUT = 40  # registers for drawing keep decisions
_DROPOUT_BESIDE_NOISE = 16, 2.8  # the same with noise: constant, and per element of a tile
_NOISE_OF_KEYS = 12  # additional registers for the noise of dK before Hopper
# Bytes of shared memory available to the tiles of a program.
_SHARED = {80: 156 << 10, 90: 216 << 10}
# Most local heads per program, and most columns of all their accumulators.
MOST_HEADS, MOST_COLUMNS = 4, 256
# Tile sizes (queries, keys) and warps of 16-bit kernels, best first. The tile that stays in a
# program has 16 rows per warp: with fewer, two warps compute the same scores and weights.
_KEY_TILES = ((64, 64, 4), (32, 128, 8), (32, 64, 4), (16, 128, 8), (16, 64, 4))
_TILES = {
    "forward": ((128, 64, 8), (128, 32, 8), (128, 16, 8), (64, 32, 4), (64, 16, 4)),
    "grad_query": ((128, 32, 8), (64, 32, 4), (128, 16, 8), (64, 16, 4)),
    "grad_key": _KEY_TILES,
    "grad_value": _KEY_TILES,
    "grad_key_value": _KEY_TILES,
    "grad_bias": ((64, 64, 4), (64, 32, 4), (64, 16, 4)),
}


@dataclass(frozen=True)
class Plan:
    """Partition of a call: `num_groups` programs of `group` local heads share a tile.

    Args:
        fits: whether its estimated registers suffice.
        parts: see `has_parts`.
        late: see `is_late`.
    """

    group: int
    num_groups: int
    launch: Launch
    fits: bool = True
    parts: bool = False
    late: bool = True


@dataclass(frozen=True)
class Heads:
    """Inputs for the choice of a plan.

    Args:
        head_dim: padded size of the largest head.
        units: hidden units of a two-layer mixing, or 0.
        noise: see `FishInputs`.
        itemsize: bytes of an element of query.
        dropout: whether keep decisions are drawn.
        causal: whether the call is causal.
        padding: whether there is a key mask.
    """

    num_global: int
    num_heads: int
    head_dim: int
    units: int
    noise: int
    itemsize: int
    dropout: bool = False
    causal: bool = False
    padding: bool = False

    @property
    def draws(self) -> str:
        """Draws per pair, see `Shape`."""
        return "_".join(["noise"] * (self.noise > 0) + ["dropout"] * self.dropout)

    def slots(self, group: int) -> int:
        """Number of sums for weights and noise scales per program of the key kernel."""
        units, maps = self.units, self.num_global
        if units == 0:
            return group * maps + (0, maps, group)[self.noise]
        return units * group + units * maps + units + (0, maps, units)[self.noise]

    def shared_bytes(self, group: int, found: Launch) -> int:
        """Estimate the shared memory of a forward program: queries, and keys and values twice."""
        columns = found.block_q * self.num_global
        columns += 2 * found.block_k * (self.num_global + group)
        return columns * self.head_dim * self.itemsize

    def shared_bytes_of_keys(self, found: Launch) -> int:
        """Estimate the shared memory of a program of keys: keys, queries and grad_out of a head."""
        columns = found.block_k * self.num_global + found.block_q * (self.num_global + 1)
        return columns * self.head_dim * self.itemsize

    def registers_of_dropout(self, found: Launch) -> float:
        """Estimate the registers per thread for keep decisions."""
        if not self.dropout or not self.noise:
            return _DROPOUT * self.dropout
        fixed, per_entry = _DROPOUT_BESIDE_NOISE
        return fixed + per_entry * found.block_q * found.block_k / (32 * found.num_warps)

    def registers(self, kernel: str, group: int, found: Launch) -> float:
        """Estimate the registers per thread of a program, fitted to compiled kernels."""
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
        if kernel == "grad_bias":
            return (maps + noise + local + group + 3) * tile + 12 * (maps + group)
        wide = (maps if "key" in kernel else 0) + (group if "value" in kernel else 0)
        sums = wide * self.head_dim * found.block_k / threads
        if kernel == "grad_value":  # tiles of 64 queries need more addresses
            more = 8 * (found.block_q >= 64) + 4 * (group - 1) * (self.noise > 0 and self.dropout)
            return sums + (maps + noise + local + 2) * tile + 8 * (maps + group) + more
        return sums + tiles + 12 * (maps + 2 * group) + self.slots(group)


def head_groups(heads: Heads) -> list[int]:
    """Return the head groups to try, largest first.

    If there are several groups with noise per head, their size is a power of two, because noise is
    drawn in fours.
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
    """Return the plan of a kernel: the largest head group with a tile that fits, or one head.

    Larger groups compute the global maps fewer times. Tuned tables change the tile, not the group.
    """
    capability = 90 if target_capability(device) >= 90 else 80
    of_queries = kernel in ("forward", "grad_query")
    # With both draws, three stages need fewer registers than two.
    stages = 3 if of_queries and heads.draws == "noise_dropout" and capability >= 90 else 2
    options = [Launch(q, k, warps, stages) for q, k, warps in _TILES[kernel]]
    groups = head_groups(heads)
    compiled = device.type == "cuda" or is_recording()
    if heads.itemsize == 4 and compiled:  # IEEE products use no tensor cores but registers
        options, groups = [Launch(32, 32, 8, 1)], [1]
    group, default, fitting = groups[-1], _last(heads, groups[-1], options, capability), []
    for group in groups:
        fitting = [o for o in options if _fits(kernel, heads, group, o, capability)]
        if fitting:
            default = fitting[0]
            break
    name = f"fish_{heads.units}_{heads.noise}_{group}_{kernel}"
    shape = Shape(name, heads.head_dim, heads.num_global, heads.itemsize, heads.draws)
    found = choose_launch(shape, device, lambda _: default)
    parts = capability >= 90 and has_parts(kernel, heads, group)
    switches = bool(fitting), parts, is_late(kernel, heads)
    return Plan(group, -(-heads.num_heads // group), found, *switches)


def _last(heads: Heads, group: int, options: list[Launch], capability: int) -> Launch:
    """Return the launch if none fits: eight warps, if memory suffices, spill less than four."""
    found = min(options, key=lambda option: (-option.num_warps, option.block_q * option.block_k))
    stays, moves = max(found.block_q, found.block_k), min(found.block_q, found.block_k)
    rows = (stays + found.num_stages * moves) * (heads.num_global + group)
    has_room = rows * heads.head_dim * heads.itemsize <= _SHARED[capability]
    return found if has_room else options[-1]


def _fits(kernel: str, heads: Heads, group: int, found: Launch, capability: int) -> bool:
    kind = kernel.split("_")[1] if "grad" in kernel else "forward"
    budget: float = _BUDGET[capability][kind]
    if kernel == "forward" and heads.shared_bytes(group, found) > _SHARED[capability]:
        return False
    of_keys = kernel in ("grad_key", "grad_value", "grad_key_value")
    if of_keys and heads.shared_bytes_of_keys(found) > _SHARED[capability]:
        return False
    if kernel == "forward":  # wider key tiles need more addresses
        budget -= 0.4 * group * found.block_k if capability < 90 else found.block_k // 64 * 8
    units = 64 if kernel == "grad_query" else 16
    budget -= units * (heads.units > 0) + heads.registers_of_dropout(found)
    budget -= _NOISE_OF_KEYS * (kernel == "grad_key" and heads.noise > 0 and capability < 90)
    return heads.registers(kernel, group, found) <= budget


def has_parts(kernel: str, heads: Heads, group: int) -> bool:
    """Return whether tiles without edges have a separate loop without position checks.

    Only if both loops were compiled for Hopper and have no spills (kernels/README.md). With draws
    or a second layer, the checks cost little and one loop is used.
    """
    if heads.draws or heads.units or heads.itemsize != 2 or heads.head_dim < 32:
        return False
    few = heads.num_global <= 2
    if kernel == "forward":
        light = few and heads.causal and not heads.padding
        return light or (heads.num_global <= 4 and group <= 2)
    return kernel == "grad_key" and few


def is_late(kernel: str, heads: Heads) -> bool:
    """Return whether programs of keys exclude masked keys at their end instead of at every pair.

    Not if the sums for keys exceed the registers anyway, and would spill more.
    """
    return kernel == "grad_value" or heads.num_global <= 2 or heads.head_dim <= 64


class FishInputs(NamedTuple):
    """The arguments of the operator; see `fish_attention`.

    Args:
        noise: 0 none, 1 per global map, 2 per local head or hidden unit.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    first: Tensor
    bias_1: Tensor | None
    second: Tensor | None
    scale: Tensor | None
    noise_draw: Tensor | None
    draw: Tensor | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    pair_mask: Tensor | None
    bias: Tensor | None
    is_causal: bool
    noise: int
    first_row: int
    on_global: float
    threshold: int


class FishArguments(NamedTuple):
    """Arguments of all FiSH kernels of a call, counts `unseen`; the plan has the group count."""

    query: HeadRows
    key: HeadRows
    value: HeadRows
    first: Tensor
    bias_1: Tensor | None
    second: Tensor | None
    scale: Tensor | None
    noise_draw: Tensor | None
    pairs: Pairs
    num_batch: int
    num_heads: int
    num_groups: int
    first_row: int
    on_global: float
    end: None = None  # see `Pairs`


class FishForm(NamedTuple):
    """Compile-time properties of FiSH kernels.

    Args:
        units: U, or 0 for a linear mixing.
        group: local heads per program.
        aligned: whether every group starts at a multiple of four heads, or there is only one.
        mask_per_head: whether the pair mask differs between heads.
        hoist: whether offsets of loads stay in registers over a loop: forward then spills, backward
            spills less.
        parts: whether tiles without edges have a separate loop, see `has_parts`.
        late: see `is_late`.
    """

    maps: int
    units: int
    group: int
    noise: int
    aligned: bool
    causal: bool
    mask_per_head: bool
    hoist: bool
    parts: bool
    late: bool
    key_dim: int
    key_pad: int
    value_dim: int
    value_pad: int


class FishCall:
    """Sizes, arguments and options that forward and backward kernels share."""

    def __init__(self, x: FishInputs) -> None:
        query, key, value = (unit_stride(tensor) for tensor in x[:3])
        batch, maps, self.num_rows, head_dim = query.shape
        _, num_heads, self.num_cols, value_dim = value.shape
        units = 0 if x.second is None else x.second.shape[1]
        widths = (padded(head_dim), padded(value_dim))
        sizes = (maps, num_heads, max(widths), units, x.noise, query.element_size())
        kinds = (x.draw is not None, x.is_causal, x.key_mask is not None)
        self.heads = Heads(*sizes, *kinds)
        bias_1, second, scale = (
            None if tensor is None else tensor.contiguous()
            for tensor in (x.bias_1, x.second, x.scale)
        )
        self.arguments = FishArguments(
            *(head_rows(query), head_rows(key), head_rows(value)),
            first=x.first.contiguous(),
            bias_1=bias_1,
            second=second,
            scale=scale,
            noise_draw=x.noise_draw,
            pairs=make_pairs(self.num_rows, self.num_cols, x),
            num_batch=unseen(batch),
            num_heads=unseen(num_heads),
            num_groups=unseen(1),
            first_row=unseen(x.first_row),
            on_global=float(x.on_global),
        )
        per_head = x.pair_mask is not None and x.pair_mask.shape[1] > 1
        self.form = FishForm(
            *(maps, units, 1, x.noise, True, x.is_causal, per_head, True, False, True),
            *(head_dim, widths[0], value_dim, widths[1]),
        )

    def plan(self, kernel: str) -> Plan:
        """Return the plan of a kernel for this call."""
        return make_plan(kernel, self.heads, self.arguments.query.base.device)

    def key_passes(self) -> tuple[str, ...]:
        """Return the passes over tiles of keys: one launch for all gradients, or one each."""
        together = self.plan("grad_key_value")
        apart = min(self.plan("grad_key").group, self.plan("grad_value").group)
        if apart > together.group or (not together.fits and self.heads.itemsize < 4):
            return ("grad_key", "grad_value")
        return ("grad_key_value",)

    def run(
        self,
        kernel: Any,
        plan: Plan,
        num_tiles: int,
        args: tuple[Any, ...],
        hoist: bool = True,
        **constants: int,
    ) -> None:
        """Launch one program per tile and head group.

        Args:
            num_tiles: tiles of all samples (or of all biases).
            args: arguments of the kernel after the shared arguments.
            hoist: see `FishForm`.
            constants: additional compile-time arguments.
        """
        aligned = plan.num_groups == 1 or plan.group % 4 == 0
        form = self.form._replace(group=plan.group, aligned=aligned, hoist=hoist)
        launch(
            kernel,
            num_tiles * plan.num_groups,
            (self.arguments._replace(num_groups=unseen(plan.num_groups)), *args),
            {
                "form": form._replace(parts=plan.parts, late=plan.late),
                **constants,
                **plan.launch.options,
            },
        )
