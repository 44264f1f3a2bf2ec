"""Linear attention over chunks as PyTorch operators: calls, launches, fakes, autograd, FLOPs.

num[h, i] = Σ_s p[h, s] Σ_{j ≤ i} (query[h, i] · key[s, j]) value[s, j]
    den[h, i] = Σ_s r[h, s] Σ_{j ≤ i}  query[h, i] · key[s, j]

Saved are the inputs; states of chunks are added up again in backward. Nothing is added atomically.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from lit_probattn.kernels.runtime import Launch, Shape, choose_launch, launch, padded, unit_stride


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


@torch.library.custom_op("lit_probattn::linear_forward", mutates_args=())
def linear_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    norm_weight: Tensor | None,
    state: Tensor | None,
    total: Tensor | None,
    has_totals: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return num (B, H, N, E), den (B, H, N), and the sums over all keys; float32.

    Args:
        query: features, (B, H, N, F).
        key: features, (B, S, N, F).
        value: (B, S, N, E).
        weight: p, (H, S). None: H/S neighbouring heads read one source each, with weight 1.
        norm_weight: r, (H, S); given with `weight` if `has_totals`.
        state: Σ key value of earlier positions, (B, S, F, E). None means none.
        total: Σ key of earlier positions, (B, S, F).
        has_totals: whether den is wanted; empty otherwise.
        is_causal: whether query i reads keys j ≤ i, or all.
    """
    from lit_probattn.kernels.linear.kernels import read_kernel

    call = LinearCall(query, key, value, weight, norm_weight, has_totals, is_causal)
    sums, totals, end, total_end = call.forward_states(contiguous(state), contiguous(total))
    num, den = _new_outputs(query, value, has_totals)
    launch(
        read_kernel,
        call.batch * call.heads * call.chunks,
        (
            *(call.query, call.key, call.value, *call.weights, sums, totals, num, den),
            *(*call.input_strides(), *call.sizes),
        ),
        {
            **call.flags,
            "SOURCES": call.sources if call.weighted else 1,
            "GROUP": call.readers,
            "INTRA": is_causal,
            **call.options,
        },
    )
    return num, den, end, total_end


def _new_outputs(query: Tensor, value: Tensor, has_totals: bool) -> tuple[Tensor, Tensor]:
    num = query.new_empty(*query.shape[:3], value.shape[3], dtype=torch.float32)
    den = query.new_empty(query.shape[:3] if has_totals else (0,), dtype=torch.float32)
    return num, den


@linear_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Any,
    norm_weight: Any,
    state: Any,
    total: Any,
    has_totals: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num, den = _new_outputs(query, value, has_totals)
    batch, sources, _, width = value.shape
    features = query.shape[3]
    end = num.new_empty(batch, sources, features, width)
    return num, den, end, num.new_empty(batch, sources, features if has_totals else 0)


@torch.library.custom_op("lit_probattn::linear_backward", mutates_args=())
def linear_backward(
    grad_num: Tensor,
    grad_den: Tensor | None,
    grad_end: Tensor | None,
    grad_total: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    norm_weight: Tensor | None,
    state: Tensor | None,
    total: Tensor | None,
    has_totals: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, weight, norm_weight, state and total.

    Those of weights that do not exist are empty.
    """
    from lit_probattn.kernels.linear.kernels import key_gradient_kernel, query_gradient_kernel

    call = LinearCall(query, key, value, weight, norm_weight, has_totals, is_causal)
    sums, totals, _, _ = call.forward_states(contiguous(state), contiguous(total))
    grad_num = grad_num.float().contiguous()
    grad_den = contiguous(grad_den)
    if has_totals and grad_den is None:
        grad_den = grad_num.new_zeros(grad_num.shape[:3])
    heads = (*query.shape[:3],)
    grad_query = query.new_empty(*heads, call.features)
    slots = (call.batch, call.heads, call.chunks, 2, call.sources if call.weighted else 0)
    parts = grad_num.new_zeros(slots) if not has_totals else grad_num.new_empty(slots)
    common = (
        *(call.query, call.key, call.value, *call.weights),
        *(sums, totals, grad_num, grad_den),
    )
    flags = {**call.flags, "INTRA": is_causal, **call.options}
    launch(
        query_gradient_kernel,
        call.batch * call.heads * call.chunks,
        (*common, grad_query, parts, *call.input_strides(), *call.sizes),
        {**flags, "SOURCES": call.sources if call.weighted else 1, "GROUP": call.readers},
    )
    sums, totals = call.states(call.query, grad_num, grad_den, call.readers, call.weights)
    start = call.scan(sums, contiguous(grad_end), reverse=True)
    total_start = call.scan(totals, contiguous(grad_total), reverse=True)
    grad_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    grad_value = torch.empty_like(value, memory_format=torch.contiguous_format)
    common = (*common[:5], sums, totals, grad_num, grad_den)
    launch(
        key_gradient_kernel,
        call.batch * call.sources * call.chunks,
        (*common, grad_key, grad_value, *call.input_strides(), *call.sizes),
        {**flags, "READERS": call.readers},
    )
    found = parts.double().sum((0, 2)).float()  # (H, 2, S)
    weights = [found[:, i].clone() for i in range(2)]
    if not has_totals:
        weights[1] = weights[1][:, :0].clone()
    return grad_query, grad_key, grad_value, weights[0], weights[1], start, total_start


@linear_backward.register_fake
def _(
    grad_num: Tensor,
    grad_den: Any,
    grad_end: Any,
    grad_total: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Any,
    norm_weight: Any,
    state: Any,
    total: Any,
    has_totals: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, sources, _, width = value.shape
    heads, features = query.shape[1], query.shape[3]
    count = sources if weight is not None else 0

    def new(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    return (
        *(query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)),
        *(new(heads, count), new(heads, count if has_totals else 0)),
        *(new(batch, sources, features, width), new(batch, sources, features * has_totals)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.switches = inputs[7:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    if all(g is None for g in grads):
        return (None,) * 9
    query, key, value, *rest = ctx.saved_tensors
    grad_num, grad_den, grad_end, grad_total = grads
    if grad_num is None:
        grad_num = query.new_zeros(*query.shape[:3], value.shape[3], dtype=torch.float32)
    has_totals = ctx.switches[0]
    found = linear_backward(
        *(grad_num, grad_den if has_totals else None),
        *(grad_end, grad_total if has_totals else None),
        *(query, key, value, *rest, *ctx.switches),
    )
    inputs = (query, key, value, *rest)
    result: list[Any] = []
    for needed, grad, tensor in zip(ctx.needs_input_grad, found, inputs, strict=False):
        result.append(grad.to(tensor.dtype) if needed else None)
    return (*result, None, None)


linear_forward.register_autograd(_backward, setup_context=_setup_context)


def _products(query: Any, value: Any, has_totals: bool) -> tuple[int, int]:
    """Return FLOPs of writing all sources into states, and of all heads reading them."""
    batch, heads, rows, features = query
    width = value[3] + has_totals
    return 2 * batch * value[
        1
    ] * rows * features * width, 2 * batch * heads * rows * features * width


@register_flop_formula(torch.ops.lit_probattn.linear_forward)
def _forward_flops(
    query: Any, key: Any, value: Any, weight: Any, norm_weight: Any, state: Any, total: Any,
    has_totals: bool, *args: Any, **_: Any,
) -> int:  # fmt: skip
    """2 FLOPs per multiply-add of the O(N) form: writing states and reading them.

    Pairs within chunks, whose length is a matter of tuning, are not counted.
    """
    write, read = _products(query, value, has_totals)
    return write + read * (1 if weight is None else value[1])


@register_flop_formula(torch.ops.lit_probattn.linear_backward)
def _backward_flops(
    grad_num: Any, grad_den: Any, grad_end: Any, grad_total: Any, query: Any, key: Any, value: Any,
    weight: Any, norm_weight: Any, state: Any, total: Any, has_totals: bool, *args: Any, **_: Any,
) -> int:  # fmt: skip
    """States again, and two products for every one of forward."""
    write, read = _products(query, value, has_totals)
    return 3 * write + 2 * read * (1 if weight is None else value[1])
