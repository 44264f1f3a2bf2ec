"""`python -m profiling kernels --model`: predicted cost of each kernel, from counted work.

The first measurement (reports/h200_202611/kernels) gave ratios 1.04 to 2.0 times as large. The
model uses the recorded launches of a call, so it depends on the launch configurations. A kernel
that loops over pairs has, per pair, products of two tiles in shared memory, products whose left
tile is computed in registers, exponentials, and ordinary operations. One unit is one matrix product
of a head, 2 E FLOP per pair:

    4096 FLOP, 16 exponentials, 128 operations per clock and multiprocessor of Hopper:
    an exponential is 128 / E units, an operation 16 / E;
    a product of shared tiles with n columns takes max(n / 2, 16 + n / 4) clocks, n / 2 at the
    full rate (published latencies): 1.5 times as long for n = 32, 2.5 for 16;
    a tile of fewer than 16 rows per warp is computed 16 warps / rows times.

Ordinary operations either overlap with the products or add to them; both times are given. Loads,
synchronisation, causal edges and stalls of a single program per multiprocessor are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lit_probattn.attention import Attention, FiSHAttention, MGKAttention, SoftmaxAttention
from lit_probattn.kernels.runtime import Launched, recording
from profiling.kernels.cases import Case
from profiling.kernels.parity import heads_and_gradients, make_inputs

HEAD_DIMS = (64, 128)
BASELINE = "softmax, 8 heads"
_LAYERS: Mapping[str, tuple[type[Attention], dict[str, Any]]] = {
    BASELINE: (SoftmaxAttention, {"num_heads": 8}),
    "MGK soft, 4 heads": (MGKAttention, {"num_heads": 4}),
    "MGK hard, 4 heads": (MGKAttention, {"num_heads": 4, "e_step": "hard"}),
    "sMGK, 4 heads": (MGKAttention, {"num_heads": 4, "shifted_keys": True}),
    "FiSH hard, 2 of 8": (
        FiSHAttention,
        {"num_heads": 8, "num_global_heads": 2, "noise": "none"},
    ),
    "FiSH hard, 4 of 8": (
        FiSHAttention,
        {"num_heads": 8, "num_global_heads": 4, "noise": "none"},
    ),
}
_LENGTH = 256
# The fraction of the tensor cores' rate that PyTorch's attention reaches, including exponentials.
# Up to FLASH_WIDTH, cuDNN and FlashAttention reached 0.47 to 0.75 on an H200 (heads of 128 and 256,
# N = 4096 and 16384). Above it, where memory-efficient kernels use only instructions of Ampere, the
# number is assumed.
FLASH_WIDTH, RATES = 256, (0.5, 0.2)


@dataclass(frozen=True)
class Work:
    """Work of a kernel per pair of a query and a key, summed over the heads of a sample.

    Args:
        shared: number of products of tiles in shared memory.
        columns: columns of the tiles of these products.
        fed: number of products whose left tile is computed in registers.
        exponentials: number of exponentials.
        operations: number of ordinary float32 operations.
        repeats: how often everything except `fed` is computed.
    """

    kernel: str
    shared: float
    columns: int
    fed: float
    exponentials: float
    operations: float
    repeats: float = 1.0


@dataclass(frozen=True)
class Units:
    """Time of matrix products, exponentials and ordinary operations, in units."""

    matrix: float
    exponentials: float
    operations: float

    @property
    def hidden(self) -> float:
        """Time if ordinary operations overlap with the others."""
        return self.matrix + self.exponentials

    @property
    def total(self) -> float:
        """Time without overlap."""
        return self.hidden + self.operations

    def __add__(self, other: Units) -> Units:
        return Units(
            self.matrix + other.matrix,
            self.exponentials + other.exponentials,
            self.operations + other.operations,
        )


def narrow_factor(columns: int) -> float:
    """Return the slow-down of a product of shared tiles with this number of columns."""
    return max(1.0, (16 + columns / 4) / (columns / 2))


def units(work: Work, head_dim: int) -> Units:
    """Return the time of a kernel."""
    return Units(
        work.shared * narrow_factor(work.columns) * work.repeats + work.fed,
        work.exponentials * work.repeats * 128 / head_dim,
        work.operations * work.repeats * 16 / head_dim,
    )


def work_of(launched: Launched) -> Work | None:
    """Return the work of a launch; None if it does not loop over pairs."""
    name, options = launched.kernel.__name__, launched.options
    if "form" not in options or "BLOCK_K" not in options:
        return None
    rows, columns = options["BLOCK_Q"], options["BLOCK_K"]
    if "key" in name:  # tiles are transposed
        rows, columns = columns, rows
    repeats = max(1.0, 16 * options["num_warps"] / rows)
    count = _fish if name.startswith("fish") else _dense
    return Work(name, *count(name, launched, columns), repeats)


_Counts = tuple[float, int, float, float, float]


def _dense(name: str, launched: Launched, columns: int) -> _Counts:
    """Count softmax and mixtures: K components, P products."""
    call, form, options = launched.args[0], launched.options["form"], launched.options
    k, products, heads = form.components, form.products, call.num_heads // 2
    row, col = call.row is not None, call.col is not None
    exponentials = 1 if form.factored or form.hard else k
    # A score needs one multiply-add with its scale and key term, and one addition of a row's term.
    scores = 1 + k if form.factored else k * (1 + row)
    if form.plain:  # the scale is part of the subtraction
        scores = 0
    if form.hard:  # the maximum and its index
        scores += 3 * (k - 1)
    if "forward" in name:
        shared, fed = products, 1
        # Running maximum, its subtraction per exponential, sum, half a conversion.
        operations = scores + k + exponentials + (exponentials - 1) + 1.5
        operations += 1 - k if form.factored or form.hard else 0
    else:
        keys, values = options.get("KEYS", True), options.get("VALUES", False)
        shared, fed = products + keys, (products if keys else 0) + values
        # Subtraction of the normaliser, and dP − δ; per product a multiplication and a conversion.
        operations = scores + exponentials + (1 + 1.5 * k if keys else 0) + 0.5 * values
        operations += k if keys and (row or col) else 0  # sums for terms
        if form.hard:
            operations += k
    return heads * shared, columns, heads * fed, heads * exponentials, heads * operations


def _fish(name: str, launched: Launched, columns: int) -> _Counts:
    """Count FiSH with linear mixing: G maps per head group, H heads."""
    call, form, options = launched.args[0], launched.options["form"], launched.options
    maps, groups, heads = form.maps, call.num_groups // 2, call.num_heads // 2
    # Per group: the factor of its maps; per head: mixing, exponent. One loop for all tiles adds two
    # comparisons per group and a selection per head; programs over keys have them at causal edges.
    shared, fed = float(groups * maps), 0.0
    operations = float(groups * maps + heads * (maps + 1))
    if not form.parts and "key" not in name:
        operations += 2 * groups + heads
    if "forward" in name:
        fed += heads
        operations += heads * 3.5
    else:
        keys, values = options.get("KEYS", True), options.get("VALUES", False)
        shared += heads * keys
        fed += groups * maps * keys + heads * values
        # dP − δ, product with the weight, contribution to each map; half a conversion per product.
        operations += heads * (2 + maps) * keys + 0.5 * (groups * maps * keys + heads * values)
        if options.get("SLOTS", 0):
            operations += 2 * heads * maps
    return shared, columns, fed, float(heads), operations


def recorded(
    layer_type: type[Attention], options: Mapping[str, Any], head_dim: int
) -> tuple[list[Launched], list[Launched]]:
    """Return the launches of a forward and a backward pass in bfloat16."""
    torch.manual_seed(0)
    layer = layer_type(head_dim, head_dim=head_dim, **options)
    case = Case("", layer_type)
    inputs = make_inputs(layer, case, _LENGTH, _LENGTH, torch.bfloat16, seed=0, clear=False)
    with recording() as launches:
        heads_and_gradients(layer, "triton", inputs, torch.bfloat16)
    first = next(i for i, x in enumerate(launches) if "forward" in x.kernel.__name__) + 1
    return launches[:first], launches[first:]


def predicted(launches: Sequence[Launched], head_dim: int) -> Units:
    """Return the time of the launches that loop over pairs."""
    found = (work_of(launched) for launched in launches)
    return sum((units(x, head_dim) for x in found if x is not None), Units(0.0, 0.0, 0.0))


def ratio_rows(head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[dict[str, object]]:
    """Yield a row per variant and head size: units, ratios to softmax, launches."""
    for head_dim in head_dims:
        base: list[Units] = []
        for name, (layer_type, options) in _LAYERS.items():
            passes = recorded(layer_type, options, head_dim)
            forward, backward = (predicted(launches, head_dim) for launches in passes)
            found = [forward, backward, forward + backward]
            base = base or found
            yield {
                "attention": name,
                "head_dim": head_dim,
                "units": f"{found[2].hidden:.0f} – {found[2].total:.0f}",
                **{
                    label: f"{ours.hidden / theirs.hidden:.2f} – {ours.total / theirs.total:.2f}"
                    for label, ours, theirs in zip(
                        ("forward", "backward", "both"), found, base, strict=True
                    )
                },
                "launches": f"{len(passes[0])} + {len(passes[1])}",
                "tiles": ", ".join(_tiles(x) for x in (*passes[0], *passes[1]) if work_of(x)),
            }


def _tiles(launched: Launched) -> str:
    options = launched.options
    return f"{options['BLOCK_Q']}x{options['BLOCK_K']}x{options['num_warps']}"


def concatenated_units(num_global: int, num_heads: int, head_dim: int) -> float:
    """Return the time of both passes of hard FiSH by PyTorch's softmax over concatenated heads.

    Queries and keys have size G E: G + 1 products of a head in forward, 3 G + 2 in backward.
    """
    rate = RATES[num_global * head_dim > FLASH_WIDTH]
    return num_heads * (4 * num_global + 3) / rate


def fish_rows(head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[dict[str, object]]:
    """Yield the predicted cost of both implementations of hard FiSH, and the faster one."""
    for head_dim in head_dims:
        for name, (layer_type, options) in _LAYERS.items():
            if layer_type is FiSHAttention:
                sizes = options["num_global_heads"], options["num_heads"], head_dim
                other, ours = concatenated_units(*sizes), fish_units(*sizes)
                full = sizes[1] * (4 * sizes[0] + 3)
                yield {
                    "attention": name,
                    "head_dim": head_dim,
                    "kernels": f"{ours.hidden:.0f} – {ours.total:.0f}",
                    "concatenated": f"{other:.0f}",
                    "even at a rate of": f"{full / ours.total:.2f} – {full / ours.hidden:.2f}",
                    "faster": fastest(*sizes),
                }


def fish_units(num_global: int, num_heads: int, head_dim: int) -> Units:
    """Return the time of both passes of the hard FiSH kernels."""
    options = {"num_heads": num_heads, "num_global_heads": num_global, "noise": "none"}
    forward, backward = recorded(FiSHAttention, options, head_dim)
    return predicted((*forward, *backward), head_dim)


def fastest(num_global: int, num_heads: int, head_dim: int) -> str:
    """Return the backend that should be fastest for hard FiSH: `triton` or `sdpa`."""
    ours = fish_units(num_global, num_heads, head_dim)
    middle = (ours.hidden + ours.total) / 2
    other = concatenated_units(num_global, num_heads, head_dim)
    return "triton" if middle <= other else "sdpa"
