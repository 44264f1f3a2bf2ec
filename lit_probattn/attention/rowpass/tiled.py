"""The one place where attention meets the tiles of the C library, `kernels/cpu/tiles.py`."""

from __future__ import annotations

from torch import Tensor

from lit_probattn.attention.draws import philox_words
from lit_probattn.attention.functional import autocast_off
from lit_probattn.attention.masks import Masks
from lit_probattn.base.memory import is_predicting
from lit_probattn.base.torch_internals import constant_in_graphs
from lit_probattn.kernels.cpu.tiles import KINDS, Inputs, Reduction, attend
from lit_probattn.randomness import STREAM_DROPOUT, STREAM_NOISE, AttentionDropout, RandomKey


@constant_in_graphs
def draws_noise() -> bool:
    """Whether tiles draw the noise that torch draws on this machine; they do so in float32."""
    if is_predicting():
        return True
    from lit_probattn.kernels.cpu import selftest

    return selftest.draws_noise()


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    dropout: AttentionDropout | None,
    *,
    reduction: Reduction,
    heads: int,
    components: int,
    coef: Tensor | None = None,
    row: Tensor | None = None,
    col: Tensor | None = None,
    noise_scale: Tensor | None = None,
    noise: tuple[RandomKey, int] | None = None,
    layers: tuple[Tensor | None, ...] = (),
    scale: float = 1.0,
) -> Tensor:
    """Attend by tiles; see `kernels.cpu.tiles.Inputs`.

    Args:
        noise: key, and position of query 0 among all tokens.
        layers: first, its bias, second; or the first, None.
    """
    draw = drawn = None
    batch, device = query.shape[0], query.device
    if dropout is not None:
        draw = philox_words(dropout.key, STREAM_DROPOUT, batch, device)
    if noise is not None:
        drawn = philox_words(noise[0], STREAM_NOISE, batch, device)
    first, first_bias, second = (*layers, None, None, None)[:3]
    call = Inputs(
        query=query,
        key=key,
        value=value,
        coef=coef,
        row=row,
        col=col,
        bias=None if masks.bias is None else masks.bias.to(query.dtype),
        noise_scale=noise_scale,
        first=first,
        first_bias=first_bias,
        second=second,
        key_mask=masks.key_mask,
        pair_mask=masks.attn_mask,
        draw=draw,
        noise=drawn,
        kind=KINDS.index(reduction),
        heads=heads,
        components=components,
        is_causal=masks.is_causal,
        threshold=0 if dropout is None else dropout.threshold,
        first_row=0 if noise is None else noise[1],
        scale=scale,
    )
    with autocast_off(query):
        return attend(call)
