"""Which implementation computes a call: the names, what `auto` chooses, and the record of choices.

An explicit name never falls back: it raises and says what would work. `auto` chooses by the table
below among the implementations that serve the call. `python -m profiling kernels` measures the
table's numbers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from lit_probattn.attention.draws import philox_words
from lit_probattn.attention.functional import Heads
from lit_probattn.base.graphs import Graph
from lit_probattn.base.memory import is_predicting
from lit_probattn.base.torch_internals import constant_in_graphs
from lit_probattn.randomness import STREAM_DROPOUT, RandomKey

Backend = Literal["auto", "reference", "sdpa", "blockwise", "native", "triton"]

BACKENDS: tuple[str, ...] = get_args(Backend)


logger = logging.getLogger("lit_probattn")


# Computes (B, H, N, E_v), in at least the dtype of the queries.
BackendFunction = Callable[[Heads, Any], Tensor]


@dataclass(frozen=True)
class Call:
    """What the choice may depend on.

    Args:
        device: device type, `cpu` or `cuda`.
        dtype: dtype of query, key and value.
        num_scores: score maps that the reference would store, B · H · N · L (times components).
        num_keys: L.
        dropout: attention dropout is active.
        bias_needs_grad: an additive bias needs a gradient.
        attn_mask: pairs are masked.
        recurrent: the call continues from a state instead of cached keys.
        graph: who records the call into a graph; see `base.graphs.written`.
        dynamic: the graph is for any number of positions, so that nothing can count blocks.
        row_operators: graphs of torch.compile hold the passes over rows as operators.
        transformed: a transform of `torch.func` sees the call.
    """

    device: str
    dtype: torch.dtype
    num_scores: int
    num_keys: int
    dropout: bool
    bias_needs_grad: bool
    attn_mask: bool = False
    recurrent: bool = False
    graph: Graph | None = None
    dynamic: bool = False
    row_operators: bool = False
    transformed: bool = False


# Says why an implementation cannot serve a call ("cannot …"), or None if it can.
Refusal = Callable[[str, Call], str | None]


@dataclass(frozen=True)
class AutoRule:
    """What `auto` chooses on one type of device.

    Args:
        order: names, best first; the first that serves the call is taken.
        store_up_to: up to this many scores the materialising reference is taken in place of
            `blockwise`: nothing has to be recomputed.
        native_from: calls with fewer keys pass over `native`; without and with dropout.
        trace_up_to: the same as `store_up_to` for a graph that is recorded, where every block is
            a copy of its operations.
    """

    order: tuple[str, ...]
    store_up_to: int = 0
    native_from: tuple[float, float] = (0, 0)
    trace_up_to: int = 0


# CPU, float32, forward and backward, head sizes 8 to 64, N from 64 to 4096: of softmax and of MGK
# without dropout the fused reduction was the fastest, of everything else the C library's rows
# (sMGK, FiSH and the polynomial kernel have rules of their own). Of what it does not serve the
# reference was the fastest up to about 4 million scores, and two to three times slower than blocks
# from 16 million on.
# CUDA: not measured here. Kernels come first: by count of products and exponentials they beat the
# reductions (docs/kernels.md); softmax prefers PyTorch's own fused attention where that serves. The
# reference is left out of short calls too, for its memory.
AUTO_RULES = {
    "cpu": AutoRule(
        ("sdpa", "native", "blockwise", "reference"),
        store_up_to=1 << 22,
        trace_up_to=1 << 26,
    ),
    "cuda": AutoRule(("triton", "sdpa", "blockwise", "reference")),
    "meta": AutoRule(("sdpa", "blockwise", "reference")),  # counting: no kernel would run
}
# Choice of `auto` for windows. Maps of windows take memory linear in the picture, so nothing needs
# blocks; and the position bias wants a gradient in training, which the fused reduction lacks.
WINDOW_RULES = {
    "cpu": AutoRule(("reference", "sdpa", "blockwise")),
    "cuda": AutoRule(("sdpa", "reference", "blockwise")),
}

_choices: dict[str, str] = {}


def recorded_choices() -> dict[str, str]:
    """Return every backend used in this process so far, the latest last: kind of call -> name."""
    return dict(_choices)


def choose_backend(
    variant: str,
    requested: str,
    available: Mapping[str, BackendFunction],
    unsupported: Refusal,
    call: Call,
    rules: Mapping[str, AutoRule] = AUTO_RULES,
) -> str:
    """Return the name of the implementation that computes a call.

    Args:
        variant: name of the variant, for messages.
        requested: one of `BACKENDS`.
        available: the variant's implementations by name.
        unsupported: says why an implementation cannot serve a call, or None if it can.
        call: what the choice may depend on.
        rules: what `auto` chooses on each type of device.

    Raises:
        ValueError: the name is unknown.
        NotImplementedError: the named backend does not exist for the variant or cannot serve the
            call; the message names the ones that can.
    """

    def refusal(name: str, call: Call) -> str | None:
        return recording_refusal(name, call) or unsupported(name, call)

    if requested not in BACKENDS:
        raise ValueError(f"unknown backend {requested!r}; expected one of {', '.join(BACKENDS)}")
    if requested == "auto":
        rule = rules.get(call.device, rules["cuda"])
        chosen = _automatic(variant, available, refusal, call, rule)
    elif requested not in available:
        raise NotImplementedError(
            f"{variant} has no backend {requested!r}; use one of: auto, {', '.join(available)}"
        )
    else:
        reason = refusal(requested, call)
        if reason is not None:
            serving = ["auto", *(name for name in available if refusal(name, call) is None)]
            raise NotImplementedError(
                f"{variant}: backend {requested!r} {reason}; for this call use one of: "
                f"{', '.join(serving)}"
            )
        chosen = requested
    label = f"{variant} ({call.device}, {str(call.dtype).removeprefix('torch.')}"
    label += ", dropout)" if call.dropout else ")"
    if call.graph is None:
        if _choices.pop(label, None) != chosen:
            logger.info("attention backend: %s -> %s (asked for %s)", label, chosen, requested)
        _choices[label] = chosen
    return chosen


def _automatic(
    variant: str,
    available: Mapping[str, BackendFunction],
    unsupported: Refusal,
    call: Call,
    rule: AutoRule,
) -> str:
    """Return the first name in the rule's order that serves the call; others are not asked."""
    reasons = {}
    store_up_to = rule.store_up_to if call.graph is None else rule.trace_up_to
    native_from = rule.native_from[1 if call.dropout else 0]
    for name in (name for name in rule.order if name in available):
        reason = recording_refusal(name, call)
        if reason is None and name == "native" and call.num_keys < native_from:
            continue
        reason = reason or unsupported(name, call)
        if reason is not None:
            reasons[name] = reason
        elif name != "blockwise" or call.num_scores > store_up_to:
            return name
        elif "reference" in available and unsupported("reference", call) is None:
            return "reference"
        else:
            return name
    told = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    raise NotImplementedError(f"{variant}: no backend serves this call: {told}")


def pair_arguments(given: Heads) -> dict[str, Any]:
    """Return masks, bias and dropout as the kernels take them."""
    masks, dropout = given.masks, given.dropout
    draw = None if dropout is None else draw_words(dropout.key, STREAM_DROPOUT, given.query)
    return {
        "bias": masks.bias,
        "key_mask": masks.key_mask,
        "pair_mask": masks.attn_mask,
        "is_causal": masks.is_causal,
        "draw": draw,
        "threshold": 0 if dropout is None else dropout.threshold,
    }


def draw_words(key: RandomKey, stream: int, like: Tensor) -> Tensor:
    """Return what a kernel draws a stream of a batch from, (2 + B,) int64, where `like` is."""
    return philox_words(key, stream, like.shape[0], like.device)


def recording_refusal(backend: str, call: Call) -> str | None:
    """Say why a backend cannot be recorded or transformed ("cannot …"), or None if it can."""
    if call.transformed and backend != "reference":
        return "cannot be transformed by torch.func (vmap, grad, jvp)"
    if call.graph == "exported" and backend in ("native", "triton"):
        return "cannot be exported: it is no operation of PyTorch"
    if call.dynamic and backend == "blockwise":
        return "cannot be exported for a dynamic number of positions: it counts its blocks"
    if call.graph == "compiled" and backend == "native" and not call.row_operators:
        return "cannot be compiled: its scores are no operator of a graph"
    return None


class Refusing(Protocol):
    """What `common_refusal` reads of a core."""

    @property
    def kernel(self) -> str: ...  # noqa: D102

    refused: dict[str, str]
    layout: Any


def common_refusal(core: Refusing, backend: str, call: Call) -> str | None:
    """Say why a backend cannot serve a call of a variant with one softmax per head, or None."""
    if backend in core.refused:
        return core.refused[backend]
    if backend == "sdpa" and call.dropout:
        return "cannot draw the counter-based attention dropout"
    if backend == "sdpa" and call.bias_needs_grad:
        return "cannot give a gradient to the additive bias without storing all scores"
    if backend == "native":
        return native_refusal(call.device)
    if backend == "triton":
        sizes = (core.layout.head_dim, core.layout.value_head_dim)
        return kernel_refusal(core.kernel, call, *sizes, bias_gradient=True)
    return None


@constant_in_graphs
def native_refusal(device: str) -> str | None:
    """Say why the C library cannot serve tensors on a device ("cannot …"), or None if it can."""
    if device != "cpu":
        return f"cannot run on {device}: it is for the CPU"
    if is_predicting():  # nothing would run: nothing is compiled and tested
        from lit_probattn.kernels.cpu.library import obstacle

        return obstacle()
    from lit_probattn.kernels.cpu.selftest import failure

    return failure()


def kernel_refusal(
    family: str, call: Call, *head_dims: int, bias_gradient: bool = False
) -> str | None:
    """Say why the fused kernel of a family cannot serve a call ("cannot …"), or None if it can.

    Args:
        family: the kernel, `dense/softmax` and the like; its self-test runs at the first call on
            a GPU with this dtype and these head sizes.
        call: what the choice may depend on.
        head_dims: sizes of query and value heads.
        bias_gradient: whether the kernel gives an additive bias its gradient.
    """
    if call.recurrent:
        return "cannot continue from a state"
    if call.bias_needs_grad and not bias_gradient:
        return "cannot give a gradient to the additive bias"
    return _refusal(family, call.device, call.dtype, (head_dims[0], head_dims[-1]))


@constant_in_graphs
def _refusal(
    family: str, device: str, dtype: torch.dtype, head_dims: tuple[int, int]
) -> str | None:
    from lit_probattn.kernels.runtime import refusal
    from lit_probattn.kernels.selftest import failure

    reason = refusal(device, dtype, *head_dims)
    if reason is None and device == "cuda" and not is_predicting():
        reason = failure(family, dtype, head_dims)
    return reason
