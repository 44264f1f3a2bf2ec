"""Linear attention over chunks as PyTorch operators.

num[h, i] = Σ_s p[h, s] Σ_{j ≤ i} (query[h, i] · key[s, j]) value[s, j]
    den[h, i] = Σ_s r[h, s] Σ_{j ≤ i}  query[h, i] · key[s, j]

Saved are the inputs; states of chunks are added up again in backward. Nothing is added atomically.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
    unit_stride,
    unseen,
)


def read_sources(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    has_totals: bool = True,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return numerators and denominators of linear attention and of linear FiSH.

        num[h, i] = Σ_s p[h, s] Σ_j (query[h, i] · key[s, j]) value[s, j]
        den[h, i] = Σ_s r[h, s] Σ_j  query[h, i] · key[s, j]

    Source: MGK, ICML 2022, section 2.5, with key features Σ_r π_r φ(k_r) (one source per head);
    FiSH, NeurIPS 2022, appendix A.6 (global states mixed by p).
    Departs from the source: see `LinearAttention`, `MLKAttention`, `LinearFiSHAttention`.

    Args:
        query: features, (B, H, N, E).
        key: features, (B, S, L, E), zero where masked.
        value: (B, S, L, D).
        weight: p, (H, S). None: H/S neighbouring heads read one source each.
        norm_weight: r, (H, S); given with `weight` if `has_totals`.
        has_totals: whether denominators are wanted.
        is_causal: query i reads the keys j ≤ i + L − N, else all.

    Returns:
        num (B, H, N, D) and den (B, H, N, 1) or None, float32.

    Raises:
        ValueError: `norm_weight` is missing or superfluous.
    """
    if has_totals and (weight is None) != (norm_weight is None):
        raise ValueError(
            "weight and norm_weight are given together, received "
            f"weight={'None' if weight is None else 'a tensor'} and "
            f"norm_weight={'None' if norm_weight is None else 'a tensor'}"
        )
    num_queries, offset = query.shape[2], key.shape[2] - query.shape[2]
    state = total = None
    if is_causal and offset > 0:  # every query sees the first `offset` keys
        state, total = _sums(key[:, :, :offset], value[:, :, :offset])
        key, value = key[:, :, offset:], value[:, :, offset:]
    elif is_causal and offset < 0:  # the first queries see nothing
        query = query[:, :, -offset:]
    elif offset:  # zeros add nothing
        length = max(num_queries, key.shape[2])
        query, key, value = (F.pad(x, (0, 0, 0, length - x.shape[2])) for x in (query, key, value))
    num, den, _, _ = linear_forward(
        *(query, key, value, weight, norm_weight if has_totals else None),
        *(state, total if has_totals else None, has_totals, is_causal),
    )
    den = den[..., None] if has_totals else None
    if is_causal and offset < 0:
        num = F.pad(num, (0, 0, -offset, 0))
        den = None if den is None else F.pad(den, (0, 0, -offset, 0))
    elif offset:
        num = num[:, :, :num_queries]
        den = None if den is None else den[:, :, :num_queries]
    return num, den


def _sums(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_j key_j value_jᵀ and Σ_j key_j in float32."""
    key = key.to(torch.float32)
    return key.mT @ value.to(torch.float32), key.sum(-2)


def default_launch(shape: Shape) -> Launch:
    """Return positions per chunk (`block_q`), warps and stages where none were tuned."""
    if shape.itemsize == 4:
        return Launch(32, 32, 4, 1)
    if shape.head_dim > 64:  # shorter chunks: the state fills the registers
        return Launch(32, 32, 8, 1)
    return Launch(64, 64, 8 if shape.head_dim > 32 else 4, 2)


class LinearInputs(NamedTuple):
    """The arguments of the operator; see `read_sources`, here with as many keys as queries.

    Args:
        state: Σ key value of earlier positions, (B, S, F, E), or None.
        total: Σ key of earlier positions, (B, S, F), or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor | None
    norm_weight: Tensor | None
    state: Tensor | None
    total: Tensor | None
    has_totals: bool
    is_causal: bool


class LinearArguments(NamedTuple):
    """What all kernels of a call read; counts are `unseen`."""

    query: HeadRows
    key: HeadRows
    value: HeadRows
    weight: Tensor | None
    norm_weight: Tensor | None
    num_heads: int
    num_sources: int
    num_rows: int
    num_chunks: int
    end: None = None  # see `Pairs`


class LinearForm(NamedTuple):
    """What kernels are compiled for; `readers` is the number of heads that read one source."""

    readers: int
    has_totals: bool
    causal: bool
    features: int
    features_pad: int
    width: int
    width_pad: int
    chunk: int
    precision: str


class LinearCall:
    """Sizes, arguments and switches that all kernels of one call share."""

    def __init__(self, x: LinearInputs) -> None:
        query, key, value = (unit_stride(tensor) for tensor in x[:3])
        self.batch, heads, rows, features = query.shape
        sources, width = value.shape[1], value.shape[3]
        widths = (padded(features), padded(width))
        shape = Shape("linear", max(widths), 1, query.element_size())
        found = choose_launch(shape, query.device, default_launch)
        self.resources = found.resources
        self.num_heads, self.num_sources = heads, sources
        self.num_chunks = max(1, math.ceil(rows / found.block_q))
        self.arguments = LinearArguments(
            *(head_rows(query), head_rows(key), head_rows(value)),
            *(plain_float(x.weight), plain_float(x.norm_weight)),
            *(unseen(heads), unseen(sources), unseen(rows), unseen(self.num_chunks)),
        )
        self.form = LinearForm(
            *(heads if x.weight is not None else heads // sources, x.has_totals, x.is_causal),
            *(features, widths[0], width, widths[1], found.block_q),
            "ieee" if query.dtype == torch.float32 else "tf32",
        )

    def run(self, kernel: Any, heads: int, args: tuple[Any, ...], **constants: int) -> None:
        """Launch one program per chunk of every head (or source)."""
        programs = self.batch * heads * self.num_chunks
        launch(kernel, programs, args, {"form": self.form, **constants, **self.resources})

    def read(self, kernel: Any, args: tuple[Any, ...]) -> None:
        """Launch a kernel that reads all sources of every head."""
        sources = 1 if self.arguments.weight is None else self.num_sources
        self.run(kernel, self.num_heads, (self.arguments, *args), SOURCES=sources)

    def states(
        self,
        x: HeadRows,
        y: HeadRows,
        starts: tuple[Tensor | None, Tensor | None],
        gradients: Tensor | None = None,
        backward: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return states and totals before every chunk, and those after all.

        Args:
            x: features, (B, H or S, N, F).
            y: what they are multiplied with, (B, H or S, N, E).
            starts: state and total to begin with.
            gradients: numbers that weigh `x` in the totals, (B, H, N). None means 1.
            backward: whether x and y belong to heads, which weights map to sources, and the sums
                go from the last chunk to the first.
        """
        from lit_probattn.kernels.linear import kernels

        call, form = self.arguments, self.form
        places = (self.batch, self.num_sources, self.num_chunks, form.features)
        sums = x.base.new_empty(*places, form.width, dtype=torch.float32)
        features = form.features if form.has_totals else 0
        totals = x.base.new_empty(*places[:3], features, dtype=torch.float32)
        weights = (call.weight, call.norm_weight) if backward else (None, None)
        args = (x, y, gradients, *weights, sums, totals, call, x.base.shape[1])
        readers = form.readers if backward else 1
        self.run(kernels.chunk_sums_kernel, self.num_sources, args, READERS=readers)
        ends = []
        for parts, start in zip((sums, totals), starts, strict=True):
            size, block = math.prod(parts.shape[3:]), 1024
            ends.append(parts.new_empty(*parts.shape[:2], *parts.shape[3:]))
            launch(
                *(kernels.scan_kernel, self.batch * self.num_sources * math.ceil(size / block)),
                (parts, plain_float(start), ends[-1], self.num_chunks, size),
                {"REVERSE": backward, "TOTAL": not form.causal, "BLOCK": block, "num_warps": 4},
            )
        return sums, totals, *ends


def _new_outputs(x: LinearInputs) -> tuple[Tensor, ...]:
    """Return room for num (B, H, N, E), den (B, H, N) and the sums over all keys; float32."""
    (batch, sources, _, width), features = x.value.shape, x.query.shape[3]
    num = x.query.new_empty(*x.query.shape[:3], width, dtype=torch.float32)
    den = num.new_empty(num.shape[:3] if x.has_totals else (0,))
    end = num.new_empty(batch, sources, features, width)
    return num, den, end, num.new_empty(batch, sources, features if x.has_totals else 0)


def _forward(x: LinearInputs) -> tuple[Tensor, ...]:
    """Return numerators, denominators, and the sums over all keys."""
    from lit_probattn.kernels.linear.kernels import read_kernel

    call = LinearCall(x)
    sums, totals, *ends = call.states(call.arguments.key, call.arguments.value, (x.state, x.total))
    num, den, _, _ = _new_outputs(x)
    call.read(read_kernel, (sums, totals, num, den))
    return num, den, *ends


def _backward(
    x: LinearInputs,
    grad_num: Tensor | None,
    grad_den: Tensor | None,
    grad_end: Tensor | None,
    grad_total: Tensor | None,
    skipped: list[str],
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value, weight, norm_weight, state and total."""
    from lit_probattn.kernels.linear import kernels

    call = LinearCall(x)
    arguments = call.arguments
    sums, totals, _, _ = call.states(arguments.key, arguments.value, (x.state, x.total))
    if grad_num is None:
        grad_num = x.query.new_zeros(*x.query.shape[:3], x.value.shape[3], dtype=torch.float32)
    grad_num = grad_num.float().contiguous()
    if not x.has_totals:
        grad_den = grad_total = None
    elif grad_den is None:
        grad_den = grad_num.new_zeros(grad_num.shape[:3])
    grad_den = plain_float(grad_den)
    points = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in x[:3]]
    weighted = call.num_sources if x.weight is not None else 0
    slots = (*grad_num.shape[:2], call.num_chunks, 2, weighted)
    parts = grad_num.new_empty(slots) if x.has_totals else grad_num.new_zeros(slots)
    call.read(kernels.query_gradient_kernel, (sums, totals, grad_num, grad_den, points[0], parts))
    sums, totals, start, total_start = call.states(
        arguments.query, head_rows(grad_num), (grad_end, grad_total), grad_den, backward=True
    )
    args = (arguments, sums, totals, grad_num, grad_den, *points[1:])
    call.run(kernels.key_gradient_kernel, call.num_sources, args)
    found = parts.double().sum((0, 2)).float()  # (H, 2, S)
    small = (found[:, 0].clone(), found[:, 1].clone(), start, total_start)
    given = (x.weight, x.norm_weight, x.state, x.total)
    none = (grad_num.new_empty(0) for _ in given)
    return *points, *(
        b if tensor is None else a for a, b, tensor in zip(small, none, given, strict=True)
    )


def _flops(x: Any, backward: bool) -> int:
    """Return FLOPs of the O(N) form: writing all sources into states, and all heads reading them.

    Pairs within chunks, whose length is a matter of tuning, are not counted.
    """
    batch, heads, rows, features = x.query
    work = 2 * batch * rows * features * (x.value[3] + x.has_totals)
    write, read = work * x.value[1], work * heads * (1 if x.weight is None else x.value[1])
    return 3 * write + 2 * read if backward else write + read


linear_forward = define_operators(
    ("linear_forward", "linear_backward"),
    LinearInputs,
    _forward,
    _backward,
    new_outputs=_new_outputs,
    gradients=("query", "key", "value", "weight", "norm_weight", "state", "total"),
    flops=_flops,
    has_normaliser=False,
)
