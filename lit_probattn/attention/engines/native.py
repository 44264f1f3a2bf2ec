"""Attention by the C library for CPUs: tiles that fit in its cache, `kernels/cpu/tiles.c`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall, pair_arguments
from lit_probattn.attention.numerics import compute_dtype, repeat_heads
from lit_probattn.attention.variant import Layers, MapFunction, Power, Scores, Variant

# Most heads whose scores a tile holds, for functions of maps and noise per head; as in tiles.c.
MOST_HEADS = 16


def by_tiles(call: HeadCall, scores: Scores) -> Tensor:
    """Attend by tiles, (B, H, N, E_v); see `kernels.cpu.tiles.Inputs`."""
    from lit_probattn.kernels.cpu.tiles import KINDS, Inputs, attend

    query, bias = scores.query, call.masks.bias
    form, coef = _form(scores, call.value.shape[1]), scores.coef
    layers = form if isinstance(form, Layers) else None
    power = form if isinstance(form, Power) else None
    kind = "layers" if layers else "power" if power else scores.reduce
    noise = scores.noise if layers is None else layers.noise
    key, heads = scores.key, query.shape[1]
    if scores.shares_maps:
        key, heads = key[:, :, 0][:, None], call.value.shape[1]
    pairs = pair_arguments(call)
    pairs["bias"] = None if bias is None else bias.to(compute_dtype(query))
    if coef is not None:
        coef = None if layers is not None else repeat_heads(coef[None], heads)[0]
    return attend(
        Inputs(
            query=query,
            key=key,
            value=call.value,
            coef=coef,
            row=scores.row,
            col=scores.col,
            noise_scale=None if noise is None else noise.scale,
            first=None if layers is None else layers.first,
            first_bias=None if layers is None else layers.bias,
            second=None if layers is None else layers.second,
            noise=None if noise is None else noise.draws.words(query),
            kind=KINDS.index(kind),
            heads=heads,
            components=1 if layers is not None else scores.num_components,
            unit_noise=layers is not None and noise is not None and noise.per_head,
            degree=0 if power is None else power.degree,
            first_row=0 if noise is None else noise.draws.first_row,
            scale=scores.scale,
            **pairs,
        )
    )


def _form(scores: Scores, num_heads: int) -> Layers | Power | None:
    """Return the function of maps: a power, two layers, or one layer whose units have noise.

    Each of these units is a head: weights and a scale that all heads share are repeated.
    """
    if isinstance(scores.reduce, MapFunction):
        return scores.reduce.form
    noise = scores.noise
    if scores.coef is None or noise is None or not noise.per_head:
        return None
    scale = noise.scale.expand(num_heads)
    return Layers(scores.coef.expand(num_heads, -1), None, None, replace(noise, scale=scale))


def must_convert(call: HeadCall) -> bool:
    """Whether heads are converted to the dtype of scores: all but bfloat16 with hardware products.

    Heads in bfloat16 keep scores, sums, terms and the mixing of maps in float32. Weights and the
    gradients of maps are rounded once before their products, as in PyTorch's kernel.
    """
    from lit_probattn.kernels.cpu.selftest import multiplies_low

    same = call.query.dtype == call.key.dtype == call.value.dtype == torch.bfloat16
    return not (same and multiplies_low())


def missing_library(call: HeadCall, variant: Variant) -> str | None:
    """Return why the library does not support a call: device, compiler, or limits of tiles."""
    from lit_probattn.kernels.cpu.selftest import can_draw_noise

    refusal = native_refusal(call.device)
    if refusal is not None:
        return refusal
    needs = variant.needs()
    drawn = next((needs[n] for n in ("map noise", "head noise") if n in needs), None)
    if drawn is None and "function" not in needs:
        return None
    per_head = ("function" in needs and "power" not in needs) or "head noise" in needs
    if per_head and call.value.shape[1] > MOST_HEADS:
        return f"supports at most {MOST_HEADS} heads here, received {call.value.shape[1]}"
    if drawn is None:
        return None
    dtype = compute_dtype(call.query)
    if dtype != torch.float32:
        return f"cannot draw noise in {str(dtype).removeprefix('torch.')} ({drawn})"
    if not can_draw_noise():
        return f"cannot draw the noise of PyTorch on this processor ({drawn})"
    return None


def native_refusal(device: str) -> str | None:
    """Return why the C library does not support a device ("cannot …"), or None."""
    if device != "cpu":
        return f"cannot run on {device}: it is for the CPU"
    from lit_probattn.kernels.cpu.selftest import refusal

    return refusal()
