"""Backend selection, and `attend`, the entry point of attention on heads.

A variant lists its needs (`Variant.needs`, `Variant.sizes`), a call its features
(`HeadCall.features`), and an engine the features it lacks and its limits (`Engine.lacks`,
`Engine.limits`); support follows from these.

An explicit name never falls back: it raises, and the message lists the backends that support the
call. `auto` selects by the table below among the engines that support the call.
`python -m profiling kernels` repeats the measurements behind the table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.engines.cached import by_parts, reads_parts
from lit_probattn.attention.engines.table import NORMAL_FORM
from lit_probattn.attention.numerics import autocast_off
from lit_probattn.attention.variant import BACKENDS as BACKENDS
from lit_probattn.attention.variant import GPU_BACKENDS as GPU_BACKENDS
from lit_probattn.attention.variant import Backend as Backend
from lit_probattn.attention.variant import Engine, Variant, first_lack

logger = logging.getLogger("lit_probattn")


def attend(call: HeadCall, variant: Variant, backend: str = "auto", kind: str = "") -> Tensor:
    """Compute attention; (B, H, N, E_v) in the dtype of the queries.

    Args:
        call: heads, masks, draws.
        variant: the variant with its tensors.
        backend: implementation to use; one of `BACKENDS`.
        kind: row of `AUTO`. Empty means the row of the variant.

    Raises:
        ValueError: the variant does not support the call's bias, scale or cache.
        NotImplementedError: the requested backend does not support the call.
    """
    variant.check(call)
    with autocast_off(call.query):
        no_rows = variant.has_scores and call.query.shape[2] == 0
        reads = call.cache is not None and backend == "auto" and not no_rows
        if reads and reads_parts(call, variant):
            return by_parts(call, variant).to(call.query.dtype)
        name = choose(variant, backend, call, kind)
        name = "reference" if no_rows else name  # other engines have no block of zero rows
        engine = engines_of(variant)[name]
        return engine.compute(call, variant).to(call.query.dtype)


def engines_of(variant: Variant | type[Variant]) -> Mapping[str, Engine]:
    """Return all engines of a variant by name, whether or not they support its needs."""
    kind = variant if isinstance(variant, type) else type(variant)
    if not kind.has_scores:
        return variant.own_engines
    if kind.lower is Variant.lower:
        return {"reference": NORMAL_FORM["reference"], **variant.own_engines}
    return {**NORMAL_FORM, **variant.own_engines}


# `auto` selects the first from the left that the variant has and that supports the call.
# `name>n` requires n or more queries and keys, and on CUDA what was measured there: 16 bits, no
# mask but a causal one, and at most FUSED_UP_TO entries of all maps. `store` is the reference, up
# to STORE_UP_TO scores.
#
# CPU, forward and backward of a layer, one thread, head sizes 8 to 64, N from 128 to 1024: the C
# library took 0.5 to 0.9 of the time of PyTorch's fused attention for soft MGK from 128 tokens, in
# float32 and bfloat16, and 0.6 to 0.95 for softmax from 512 (up to 1.1 in bfloat16, heads of 64);
# it was slower for one query with a cache, and the fastest for everything else that it supports.
# For calls that neither supports, the reference was the fastest up to about 4 million scores, and
# two to three times slower than blocks from 16 million. If all components share one product
# (shifted), the library needs fewer products than the fused reduction over K·N keys. Concatenated
# heads (maps, by sdpa) cost G times the products of the global maps; the library took 0.25 to 1.03
# of the time of the reference from 96 to 192 tokens, for 1 to 16 samples, with and without dropout
# and noise, in float32 and bfloat16, and up to 1.1 and 1.2 at 64 and 32 tokens; for noise before
# layers and for powers 0.6 to 1.02 from 96 to 256 tokens, 0.14 to 0.19 at 1024. Maps of windows
# need memory linear in the image size, so blocks are not needed, and the position bias needs a
# gradient in training. Linear attention and MLK (chunks): at 1024 and 4096 tokens, heads of 32 and
# 64, with and without a causal mask, the library took 0.36 to 0.64 of the time of blocks for
# attention alone, and 0.77 to 0.94 for layers.
# CUDA, on an H200 in bfloat16, heads of 64 and 128, N = 1024, 4096 and 16384
# (reports/h200_202611/kernels): PyTorch's softmax attention (cuDNN) took 0.57 to 0.83 of the time
# of the kernel. In forward and backward, the kernels of MGK and sMGK took 0.16 to 0.84 of the time
# of the reduction to K·N keys, those of linear attention, MLK and linear FiSH 0.13 to 0.45 of
# blocks. Hard FiSH with 2 global heads took 0.68 and 0.74 of the time of concatenated heads at
# N = 1024, and 1.17 to 1.74 from 4096 on, with a quarter to a third of the memory. The reference is
# last also for short calls, because of its memory.
AUTO: dict[str, tuple[str, str, str]] = {
    # kind:    CPU without dropout, CPU with dropout, CUDA
    "softmax": (
        "native>512 sdpa native store blockwise reference",
        "native store blockwise reference",
        "sdpa triton blockwise reference",
    ),
    "mixture": (
        "native>128 sdpa native store blockwise reference",
        "native store blockwise reference",
        "triton sdpa blockwise reference",
    ),
    "shifted": (
        "native sdpa store blockwise reference",
        "native store blockwise reference",
        "triton sdpa blockwise reference",
    ),
    "maps": (
        "native>96 store blockwise sdpa reference",
        "native>96 store blockwise reference",
        "sdpa>2048 triton sdpa blockwise reference",
    ),
    "window": (
        "reference sdpa blockwise",
        "reference sdpa blockwise",
        "sdpa reference blockwise",
    ),
    "chunks": (
        "native blockwise reference",
        "native blockwise reference",
        "triton blockwise reference",
    ),
}
# On the meta device, for counting: no kernel would run.
COUNTED = "sdpa blockwise reference"
# Up to this many scores nothing is recomputed, in eager mode and in a recorded graph, where every
# block is a copy of its operations.
STORE_UP_TO, TRACE_UP_TO = 1 << 22, 1 << 26
# Largest head of FlashAttention and cuDNN.
FUSED_UP_TO = 256

_choices: dict[str, str] = {}


def recorded_choices() -> dict[str, str]:
    """Return the backends used in this process, the latest last: kind of call -> name."""
    return dict(_choices)


def choose(variant: Variant, requested: str, call: HeadCall, kind: str = "") -> str:
    """Return the name of the engine that computes a call.

    Args:
        variant: the variant with its numbers.
        requested: one of `BACKENDS`.
        call: the call.
        kind: row of `AUTO`. Empty means the row of the variant.

    Raises:
        ValueError: the name is unknown.
        NotImplementedError: the named backend does not exist for the variant or does not support
            the call; the message names the backends that do.
    """
    name, engines = variant.name, engines_of(variant)
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, received {requested!r}")
    if requested == "auto":
        chosen = _automatic(variant, call, AUTO[kind or variant.kind])
    elif requested not in engines:
        raise NotImplementedError(
            f"{name} has no backend {requested!r}; use one of: auto, {', '.join(engines)}"
        )
    else:
        reason = reason_against(engines[requested], call, variant)
        if reason is not None:
            reasons = {n: reason_against(engine, call, variant) for n, engine in engines.items()}
            supported = ["auto", *(n for n, against in reasons.items() if against is None)]
            raise NotImplementedError(
                f"{name}: backend {requested!r} {reason}; for this call use one of: "
                f"{', '.join(supported)}"
            )
        chosen = requested
    label = f"{name} ({call.device}, {str(call.query.dtype).removeprefix('torch.')}"
    label += ", dropout)" if call.dropout is not None else ")"
    if call.graph is None:
        if _choices.pop(label, None) != chosen:
            logger.info("attention backend: %s -> %s (requested %s)", label, chosen, requested)
        _choices[label] = chosen
    return chosen


def reason_against(engine: Engine, call: HeadCall, variant: Variant) -> str | None:
    """Return why an engine does not support a call of a variant ("cannot …"), or None."""
    needs = variant.needs() | dict.fromkeys(call.features(), "")
    reason = first_lack(needs, engine.lacks)
    if reason is not None:
        return reason
    for name, size in variant.sizes(call).items():
        if size > engine.limits.get(name, size):
            return f"supports at most {engine.limits[name]} {name}, received {size}"
    return engine.missing(call, variant)


def _automatic(variant: Variant, call: HeadCall, row: tuple[str, str, str]) -> str:
    """Return the first name in the row's order that supports the call; later ones are unchecked."""
    engines = engines_of(variant)
    order = row[2] if call.device != "cpu" else row[0 if call.dropout is None else 1]
    reasons = {}
    for word in (COUNTED if call.device == "meta" else order).split():
        name, _, least = word.partition(">")
        stores = name == "store"
        if stores:
            name = "reference"
        if name not in engines or (least and not _pays_off(variant, call, int(least))):
            continue
        reason = reason_against(engines[name], call, variant)
        if reason is not None:
            reasons[name] = reason
        elif stores:
            most = STORE_UP_TO if call.graph is None else TRACE_UP_TO
            if call.is_dynamic or call.num_scores * variant.score_maps <= most:
                return name
        else:
            return name
    told = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    raise NotImplementedError(f"{variant.name}: no backend supports this call: {told}")


def _pays_off(variant: Variant, call: HeadCall, least: int) -> bool:
    """Whether a call is like the measured ones; a dynamic number of positions is long."""
    if not call.is_dynamic and min(call.query.shape[2], call.num_keys) < least:
        return False
    masks = call.masks
    plain = masks.key_mask is None and masks.attn_mask is None and masks.bias is None
    entries = variant.sizes(call).get("entries of all global maps", 0)
    is_measured = plain and call.query.dtype.itemsize == 2 and entries <= FUSED_UP_TO
    return call.device == "cpu" or is_measured
