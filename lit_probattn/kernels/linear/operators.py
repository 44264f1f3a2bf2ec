"""Linear attention over chunks as PyTorch operators.

num[h, i] = Σ_s p[h, s] Σ_{j ≤ i} (F[h, i] · f[s, j]) value[s, j]
    den[h, i] = Σ_s r[h, s] Σ_{j ≤ i}  F[h, i] · f[s, j]
    out = factor · num / (den + eps)

where F = φ(query) and f = Σ_r π_r φ(key_r) are computed inside the kernels. The inputs and den are
saved; backward recomputes states of segments. Kernels use no atomics.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lit_probattn.kernels.operator import define_operators
from lit_probattn.kernels.runtime import (
    HeadRows,
    Launch,
    Shape,
    choose_launch,
    head_rows,
    launch,
    padded,
    plain_float,
    target_capability,
    unit_stride,
    unseen,
)

Features = Literal["none", "elu", "relu"]
_FEATURES: dict[str, int] = {"none": 0, "elu": 1, "relu": 2}


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    features: Features = "none",
    normed: bool = False,
    prior: Tensor | None = None,
    shift: Tensor | None = None,
    mix_before: bool = False,
    weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    state: Tensor | None = None,
    key_mask: Tensor | None = None,
    keep: Tensor | None = None,
    has_totals: bool = True,
    divides: bool = True,
    eps: float = 0.0,
    factor: float = 1.0,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return linear attention, its mixtures or linear FiSH, with the denominators.

        num[h, i] = Σ_s p[h, s] Σ_j (φ(query[h, i]) · f[s, j]) value[s, j]
        den[h, i] = Σ_s r[h, s] Σ_j  φ(query[h, i]) · f[s, j]
        f[s, j] = Σ_r π[s, r] φ(key[s, r, j] + shift[s, r])
        out = factor · num / (den + eps), 0 if den is 0

    Source: MGK, ICML 2022, section 2.4 (one source per head); FiSH, NeurIPS 2022, appendix A.6
    (global states mixed by p).
    Departs from the source: see `LinearAttention`, `MLKAttention`, `LinearFiSHAttention`.

    Args:
        query: (B, H, N, E).
        key: (B, S, L, E), or (B, S, K, L, E) if components have separate keys.
        value: (B, S, L, D).
        features: φ; `none` means that queries and keys are features.
        normed: whether features are divided by their sum (0 stays 0).
        prior: π, (S, K, 1 or L). None means one component.
        shift: (S, K, E); requires a prior.
        mix_before: whether components are mixed before φ.
        weight: p, (H, S). None: H/S adjacent heads share one source.
        norm_weight: r, (H, S); required with `weight`.
        state: Σ f valueᵀ of earlier positions, (B, S, E, D), which does not contribute to den.
        key_mask: real keys, (B, L) bool.
        keep: factors of values, (B, S, L) float32, without gradient.
        has_totals: whether to compute denominators.
        divides: whether to divide by them. Otherwise den has no gradient, and `out` is float32 if
            `has_totals`, for further computation.
        eps: added to den.
        factor: factor of the output.
        is_causal: query i uses the keys j ≤ i + L - N; otherwise all.

    Returns:
        out (B, H, N, D) and den (B, H, N) float32, which has no gradient, or None.

    Raises:
        ValueError: `norm_weight` is missing or unexpected; `divides` without `has_totals`.
    """
    if (weight is None) != (norm_weight is None):
        raise ValueError(
            "weight and norm_weight require each other, received "
            f"weight={'None' if weight is None else 'a tensor'} and "
            f"norm_weight={'None' if norm_weight is None else 'a tensor'}"
        )
    if divides and not has_totals:
        raise ValueError("divides=True needs has_totals=True, received has_totals=False")
    dtype = query.dtype
    tensors = (query, key.to(dtype), value.to(dtype), prior, shift, weight, norm_weight, state)
    call = (*tensors, key_mask, keep, _FEATURES[features], normed, mix_before)
    out, den = linear_forward(*call, has_totals, divides, eps, factor, is_causal)
    return out, den if has_totals else None


def default_launch(shape: Shape, capability: int = 90) -> Launch:
    """Return positions per chunk (`block_q`) and per segment (`block_k`), warps and stages.

    Longer segments store fewer states, but the state of a program must fit into registers: not with
    wide heads, and not in backward if heads mix sources (`num_tiles` 2). Before Hopper, operands of
    products are in registers, which then hold chunks of 32.
    """
    if shape.itemsize == 4:
        return Launch(32, 32, 8, 1)
    backward, old = shape.kernel.endswith("backward"), capability < 90
    if shape.head_dim > 64:
        chunk = 32 if old and backward else 64
        return Launch(chunk, chunk, 8, 1)
    if backward and shape.num_tiles > 1:
        return Launch(64, 64, 8 if shape.head_dim > 32 else 4, 1)
    if old:
        return Launch(32, 256, 4, 1)
    return Launch(32 if backward else 64, 256, 8 if shape.head_dim > 32 else 4, 1)


def state_columns(width: int, mixes: bool, capability: int = 90) -> int:
    """Return the number of columns of a state of this width per step of a backward program.

    Args:
        mixes: whether heads mix sources.
    """
    return min(width, 16 if mixes and capability < 90 else 32)


class LinearInputs(NamedTuple):
    """The arguments of the operator; see `linear_attention`.

    Args:
        features: 0 none, 1 elu, 2 relu.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    prior: Tensor | None
    shift: Tensor | None
    weight: Tensor | None
    norm_weight: Tensor | None
    state: Tensor | None
    key_mask: Tensor | None
    keep: Tensor | None
    features: int
    normed: bool
    mix_before: bool
    has_totals: bool
    divides: bool
    eps: float
    factor: float
    is_causal: bool


class LinearArguments(NamedTuple):
    """Arguments of all kernels of a call; counts are `unseen`.

    Args:
        query_start: position of query 0; `key_start` is the position of key 0.
    """

    query: HeadRows
    key: HeadRows
    value: HeadRows
    prior: Tensor | None
    shift: Tensor | None
    weight: Tensor | None
    norm_weight: Tensor | None
    key_mask: Tensor | None
    keep: Tensor | None
    num_heads: int
    num_sources: int
    num_queries: int
    num_keys: int
    query_start: int
    key_start: int
    num_chunks: int
    num_segments: int
    eps: float
    factor: float
    end: None = None  # see `Pairs`


class LinearForm(NamedTuple):
    """Compile-time properties of the kernels.

    Args:
        readers: heads that share one source.
        totals: whether sums of features are stored with states; backward needs them to divide.
        prior_rows: whether priors depend on positions.
        chunk: positions per tile.
        segment: positions per program, a multiple of `chunk`.
        columns: columns of values and states per step of backward, if segments are one chunk.
    """

    readers: int
    totals: bool
    divides: bool
    causal: bool
    features: int
    normed: bool
    mix_before: bool
    components: int
    prior_rows: bool
    key_dim: int
    key_pad: int
    value_dim: int
    value_pad: int
    chunk: int
    segment: int
    columns: int
    precision: str


class LinearCall:
    """Sizes, arguments and options that all kernels of a call share."""

    def __init__(self, x: LinearInputs, backward: bool) -> None:
        query, key, value = (unit_stride(tensor) for tensor in x[:3])
        self.batch, self.num_heads, rows, features = query.shape
        self.num_sources, cols, width = value.shape[1:]
        widths = (padded(features), padded(width))
        weighted, kernel = x.weight is not None, f"linear_{'backward' if backward else 'forward'}"
        shape = Shape(kernel, max(widths), 1 + weighted, query.element_size())
        capability = target_capability(query.device)
        default = partial(default_launch, capability=capability)
        found = choose_launch(shape, query.device, default)
        self.resources, chunk = found.resources, found.block_q
        # Gradients of weights need the state of every source before every chunk.
        segment = chunk if weighted and backward else max(1, found.block_k // chunk) * chunk
        self.num_chunks = max(1, math.ceil(max(rows, cols) / chunk))
        self.num_segments = math.ceil(self.num_chunks * chunk / segment)
        offset = cols - rows if x.is_causal else 0
        mask = None if x.key_mask is None else x.key_mask.view(torch.uint8).contiguous()
        counts = (self.num_heads, self.num_sources, rows, cols, max(0, offset), max(0, -offset))
        found_arguments: tuple[Any, ...] = (
            *(head_rows(query), head_rows(key), head_rows(value)),
            *(plain_float(tensor) for tensor in x[3:7]),
            *(mask, plain_float(x.keep)),
            *(unseen(count) for count in (*counts, self.num_chunks, self.num_segments)),
            *(float(x.eps), float(x.factor)),
        )
        self.arguments = LinearArguments(*found_arguments)
        self.form = LinearForm(
            readers=self.num_heads // (1 if weighted else self.num_sources),
            totals=x.divides if backward else x.has_totals,
            divides=x.divides,
            causal=x.is_causal,
            features=x.features,
            normed=x.normed,
            mix_before=x.mix_before,
            components=1 if x.prior is None else x.prior.shape[1],
            prior_rows=x.prior is not None and x.prior.shape[2] > 1,
            key_dim=features,
            key_pad=widths[0],
            value_dim=width,
            value_pad=widths[1],
            chunk=chunk,
            segment=segment,
            columns=widths[1]
            if segment > chunk
            else state_columns(widths[1], weighted, capability),
            precision="ieee" if query.dtype == torch.float32 else "tf32",
        )

    @property
    def sources(self) -> int:
        """Number of sources per head."""
        return 1 if self.arguments.weight is None else self.num_sources

    def run(self, kernel: Any, heads: int, args: tuple[Any, ...], **constants: int) -> None:
        """Launch one program per segment of every head (or source)."""
        launch(
            *(kernel, self.batch * heads * self.num_segments, (self.arguments, *args)),
            {"form": self.form, **constants, **self.resources},
        )

    def new_sums(self, heads: int) -> Tensor:
        """Return buffers for states and totals of all segments."""
        size = self.form.key_dim * (self.form.value_dim + self.form.totals)
        places = (self.batch, heads, self.num_segments, size)
        return self.arguments.query.base.new_empty(places, dtype=torch.float32)

    def states(self, start: Tensor | None) -> Tensor:
        """Return states and totals before every segment, or the total if not causal."""
        from lit_probattn.kernels.linear.kernels import chunk_sums_kernel

        sums = self.new_sums(self.num_sources)
        self.run(chunk_sums_kernel, self.num_sources, (sums,))
        return self.scan(sums, start, None, False)

    def scan(self, sums: Tensor, start: Tensor | None, end: Tensor | None, later: bool) -> Tensor:
        """Return running sums; with `later`, of later segments, summed from heads to sources."""
        from lit_probattn.kernels.linear.kernels import scan_kernel

        segments = self.num_segments if self.form.causal else 1
        out = sums.new_empty(self.batch, self.num_sources, segments, sums.shape[-1])
        weights = (self.arguments.weight, self.arguments.norm_weight) if later else (None, None)
        cells, size, block = self.form.key_dim * self.form.value_dim, sums.shape[-1], 256
        launch(
            *(scan_kernel, self.batch * self.num_sources * math.ceil(size / block)),
            (
                *(sums, out, plain_float(start), end, *weights),
                *(self.num_segments, self.num_sources, cells, size),
            ),
            {
                **{"READERS": self.form.readers if later else 1, "REVERSE": later},
                **{"TOTAL": not self.form.causal, "BLOCK": block, "num_warps": 4},
            },
        )
        return out


def _new_outputs(x: LinearInputs) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, N, D) in memory order (B, N, H, D), for merging; and (B, H, N)."""
    batch, heads, rows, _ = x.query.shape
    dtype = torch.float32 if x.has_totals and not x.divides else x.query.dtype
    out = x.query.new_empty(batch, rows, heads, x.value.shape[3], dtype=dtype).transpose(1, 2)
    den = x.query.new_empty(out.shape[:3] if x.has_totals else (0,), dtype=torch.float32)
    return out, den


def _forward(x: LinearInputs) -> tuple[Tensor, Tensor]:
    from lit_probattn.kernels.linear.kernels import read_kernel

    call = LinearCall(x, backward=False)
    states = call.states(x.state)
    out, den = _new_outputs(x)
    args = (states, head_rows(out), den)
    call.run(read_kernel, call.num_heads, args, SOURCES=call.sources)
    return out, den


def _backward(
    x: LinearInputs, grad_out: Tensor, out: Tensor, den: Tensor, skipped: list[str]
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value, prior, shift, weight, norm_weight and state."""
    from lit_probattn.kernels.linear import kernels

    call = LinearCall(x, backward=True)
    states = call.states(x.state)
    grad = head_rows(unit_stride(grad_out))
    dden, later = torch.empty_like(den), call.new_sums(call.num_heads)
    points = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in x[:3]]
    weighted = 0 if x.weight is None else call.num_sources
    places = (call.batch, call.num_heads, call.num_segments, 2, weighted)
    slots = later.new_empty(places) if x.divides else later.new_zeros(places)
    args: tuple[Any, ...] = (states, grad, den, points[0], dden, later, slots)
    call.run(kernels.query_gradient_kernel, call.num_heads, args, SOURCES=call.sources)

    given = (x.prior, x.shift, x.weight, x.norm_weight, x.state)
    small = [den.new_empty(0 if tensor is None else tensor.shape) for tensor in given]
    states = call.scan(later, None, None if x.state is None else small[4], True)
    prior = _prior_parts(x, call)
    size = 0 if x.shift is None else call.form.components * call.form.key_dim
    shift = prior.new_empty(call.batch, call.num_sources, call.num_chunks, size)
    args = (states, grad, den, dden, *points[1:], prior, shift)
    call.run(kernels.key_gradient_kernel, call.num_sources, args)
    if x.prior is not None:
        _add_parts((prior, shift), small[:2])
    if x.weight is not None:
        _add_parts((slots[:, :, :, 0], slots[:, :, :, 1]), small[2:4])
    return *points, *small


def _prior_parts(x: LinearInputs, call: LinearCall) -> Tensor:
    """Return buffers for the gradients of priors, (B, S, parts, numbers)."""
    form = call.form
    shape = (call.num_chunks, 0 if x.prior is None else form.components)
    if form.prior_rows:
        shape = (1, form.components * x.value.shape[2])
    return x.query.new_empty(call.batch, call.num_sources, *shape, dtype=torch.float32)


def _add_parts(parts: tuple[Tensor, Tensor], found: list[Tensor]) -> None:
    """Write the sums of two tensors (B, places, parts, size) over samples and parts."""
    from lit_probattn.kernels.linear.kernels import add_parts_kernel

    args: list[Any] = []
    programs, block = 0, 16
    for tensor, out in zip(parts, found, strict=True):
        args += [tensor, out, tensor.shape[2], tensor.shape[3], tensor.stride(2)]
        programs += tensor.shape[1] * math.ceil(tensor.shape[3] / block)
    args += parts[0].shape[:2]
    options = {"PARTS": 128, "BLOCK": block, "num_warps": 4}
    launch(add_parts_kernel, programs, tuple(args), options)


def _flops(x: Any, backward: bool) -> int:
    """Return FLOPs of the O(N) form: all sources write states, and all heads read one.

    Pairs within chunks, whose length is tuned, and mixing are not counted.
    """
    batch, heads, rows, features = x.query
    work = 2 * batch * features * (x.value[3] + x.has_totals)
    write, read = work * x.value[1] * x.value[2], work * heads * rows
    return 3 * write + 2 * read if backward else write + read


linear_forward = define_operators(
    ("linear_forward", "linear_backward"),
    LinearInputs,
    _forward,
    _backward,
    new_outputs=_new_outputs,
    gradients=("query", "key", "value", "prior", "shift", "weight", "norm_weight", "state"),
    flops=_flops,
)
