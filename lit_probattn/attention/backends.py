"""Backends: what each engine lacks, why it cannot serve a call, and which one `auto` takes.

A variant says what it needs (`Variant.needs`, `Variant.sizes`), a call what it brings
(`HeadCall.features`), an engine what it lacks (`Engine.lacks`, `Engine.limits`). Who serves what
follows from these; `python -m tests.attention.backend_table` prints the table of docs/kernels.md.

An explicit name never falls back: it raises and says what would work. `auto` chooses by the table
below among the engines that serve the call. `python -m profiling kernels` measures the table's
numbers again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.draws import philox_words
from lit_probattn.base.memory import is_predicting
from lit_probattn.base.torch_internals import constant_in_graphs
from lit_probattn.randomness import STREAM_DROPOUT, RandomKey

if TYPE_CHECKING:
    from lit_probattn.attention.attend import Variant

logger = logging.getLogger("lit_probattn")

Backend = Literal["auto", "reference", "sdpa", "blockwise", "native", "triton"]

BACKENDS: tuple[str, ...] = get_args(Backend)


@dataclass(frozen=True)
class Engine:
    """One implementation of attention, for every variant that has it.

    Args:
        compute: returns (B, H, N, E_v) of a call and a variant, in at least the queries' dtype.
        lacks: features of variants and calls that it cannot serve, each with what it cannot do
            ("cannot …"); `{}` stands for the option that asks for the feature.
        limits: largest sizes, by the names of `Variant.sizes`.
        missing: says why it cannot run here ("cannot …"): device, compiler, self-test.
    """

    compute: Callable[[HeadCall, Any], Tensor]
    lacks: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    missing: Callable[[HeadCall, Any], str | None] = lambda call, variant: None

    def refusal(self, call: HeadCall, variant: Variant) -> str | None:
        """Return why it cannot serve a call of a variant ("cannot …"), or None if it can."""
        needs = variant.needs() | dict.fromkeys(call.features(), "")
        for feature, reason in self.lacks.items():
            if feature in needs:
                return reason.format(needs[feature])
        for name, size in variant.sizes(call).items():
            if size > self.limits.get(name, size):
                return f"cannot hold {size} {name}: at most {self.limits[name]}"
        return self.missing(call, variant)


# What no engine of blocks can do.
LACKS_OF_BLOCKS = {
    "transform": "cannot be transformed by torch.func (vmap, grad, jvp)",
    "dynamic": "cannot be exported for a dynamic number of positions: it counts its blocks",
}
LACKS_OF_OPERATORS = {
    "transform": "cannot be transformed by torch.func (vmap, grad, jvp)",
    "exported": "cannot be exported: it is no operation of PyTorch",
}


# What `auto` takes: the first from the left that the variant has and that serves the call.
# `name>n` is for n keys or more. `store` is the reference, up to STORE_UP_TO scores.
#
# CPU, float32, forward and backward, head sizes 8 to 64, N from 64 to 4096: of softmax and of MGK
# without dropout the fused reduction was the fastest, of everything else the C library's rows. Of
# what neither serves the reference was the fastest up to about 4 million scores, and two to three
# times slower than blocks from 16 million on. Where one product serves all components (shifted)
# the library needs fewer products than the fused reduction over K·N keys; with heads of 8 entries
# it was not faster. Concatenated heads (maps, by sdpa) cost G times the products of the global
# maps; the library took 0.5 to 0.9 of the time of blocks from 512 keys on for Hard FiSH and global
# noise, 2 global heads of 8. For 4 of 8, other mixings and local noise it was equal to blocks. Maps
# of windows take memory linear in the picture, so nothing needs blocks, and the position bias wants
# a gradient in training.
# CUDA: not measured here. Kernels come first: by count of products and exponentials they beat the
# reductions (docs/kernels.md); softmax prefers PyTorch's own fused attention where that serves. The
# reference is left out of short calls too, for its memory.
AUTO: dict[str, tuple[str, str, str]] = {
    # kind:    CPU without dropout, CPU with dropout, CUDA
    "softmax": (
        "sdpa native store blockwise reference",
        "native store blockwise reference",
        "sdpa triton blockwise reference",
    ),
    "mixture": (
        "sdpa native store blockwise reference",
        "native store blockwise reference",
        "triton sdpa blockwise reference",
    ),
    "shifted": (
        "native sdpa store blockwise reference",
        "native store blockwise reference",
        "triton sdpa blockwise reference",
    ),
    "maps": (
        "native>256 store blockwise sdpa reference",
        "native>128 store blockwise reference",
        "triton sdpa blockwise reference",
    ),
    "window": (
        "reference sdpa blockwise",
        "reference sdpa blockwise",
        "sdpa reference blockwise",
    ),
    "chunks": ("blockwise reference", "blockwise reference", "triton blockwise reference"),
}
# Counting, on the meta device: no kernel would run.
COUNTED = "sdpa blockwise reference"
# Up to this many scores nothing has to be recomputed; and the same for a graph that is recorded,
# where every block is a copy of its operations.
STORE_UP_TO, TRACE_UP_TO = 1 << 22, 1 << 26

_choices: dict[str, str] = {}


def recorded_choices() -> dict[str, str]:
    """Return every backend used in this process so far, the latest last: kind of call -> name."""
    return dict(_choices)


def choose(variant: Variant, requested: str, call: HeadCall, kind: str = "") -> str:
    """Return the name of the engine that computes a call.

    Args:
        variant: the variant with its numbers.
        requested: one of `BACKENDS`.
        call: the call.
        kind: row of `AUTO`. Empty means the variant's own.

    Raises:
        ValueError: the name is unknown.
        NotImplementedError: the named backend does not exist for the variant or cannot serve the
            call; the message names the ones that can.
    """
    name, engines = variant.name, variant.engines
    if requested not in BACKENDS:
        raise ValueError(f"unknown backend {requested!r}; expected one of {', '.join(BACKENDS)}")
    if requested == "auto":
        chosen = _automatic(variant, call, AUTO[kind or variant.kind])
    elif requested not in engines:
        raise NotImplementedError(
            f"{name} has no backend {requested!r}; use one of: auto, {', '.join(engines)}"
        )
    else:
        reason = engines[requested].refusal(call, variant)
        if reason is not None:
            serving = ["auto", *(n for n, e in engines.items() if e.refusal(call, variant) is None)]
            raise NotImplementedError(
                f"{name}: backend {requested!r} {reason}; for this call use one of: "
                f"{', '.join(serving)}"
            )
        chosen = requested
    label = f"{name} ({call.device}, {str(call.query.dtype).removeprefix('torch.')}"
    label += ", dropout)" if call.dropout is not None else ")"
    if call.graph is None:
        if _choices.pop(label, None) != chosen:
            logger.info("attention backend: %s -> %s (asked for %s)", label, chosen, requested)
        _choices[label] = chosen
    return chosen


def _automatic(variant: Variant, call: HeadCall, row: tuple[str, str, str]) -> str:
    """Return the first name in the row's order that serves the call; others are not asked."""
    order = row[2] if call.device != "cpu" else row[call.dropout is not None]
    reasons = {}
    for word in (COUNTED if call.device == "meta" else order).split():
        name, _, least = word.partition(">")
        if name == "store":
            if call.num_scores * variant.score_maps > (TRACE_UP_TO if call.graph else STORE_UP_TO):
                continue
            name = "reference"
        if name not in variant.engines or call.num_keys < int(least or 0):
            continue
        reason = variant.engines[name].refusal(call, variant)
        if reason is None:
            return name
        reasons[name] = reason
    told = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    raise NotImplementedError(f"{variant.name}: no backend serves this call: {told}")


# ---- what an engine of compiled code needs here -------------------------------------------------


@constant_in_graphs
def native_refusal(device: str) -> str | None:
    """Return why the C library cannot serve tensors on a device ("cannot …"), or None if it can."""
    if device != "cpu":
        return f"cannot run on {device}: it is for the CPU"
    if is_predicting():  # nothing would run: nothing is compiled and tested
        from lit_probattn.kernels.cpu.library import obstacle

        return obstacle()
    from lit_probattn.kernels.cpu.selftest import failure

    return failure()


def kernel_refusal(call: HeadCall, variant: Variant, query_size: int = 0) -> str | None:
    """Return why the variant's fused kernels cannot serve a call ("cannot …"), or None if they can.

    The family's self-test runs at the first call on a GPU with this dtype and these head sizes.

    Args:
        call: the call.
        variant: the variant, whose `kernel` is the family.
        query_size: size of a query head in the kernel. 0 means that of the call.
    """
    sizes = (query_size or call.query.shape[-1], call.value.shape[-1])
    return _refusal(variant.kernel, call.device, call.query.dtype, sizes)


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


def pair_arguments(call: HeadCall) -> dict[str, Any]:
    """Return masks, bias and dropout as the kernels take them."""
    masks, dropout = call.masks, call.dropout
    draw = None if dropout is None else draw_words(dropout.key, STREAM_DROPOUT, call.query)
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
