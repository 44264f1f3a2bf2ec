"""Self-test of FiSH: output and all gradients, with noise, against float64 sums."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn.kernels.fish.operators import fish_attention
from lit_probattn.kernels.selftest import (
    HeadDims,
    Selection,
    beside,
    causal,
    in_float64,
    masked,
    random_tensor,
)
from lit_probattn.randomness import STREAM_NOISE, RandomKey, normal_noise

_BATCH, _GLOBAL, _HEADS, _UNITS, _ROWS, _KEYS = 2, 2, 4, 4, 149, 167


def plain_fish(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    second: Tensor | None,
    first_bias: Tensor | None,
    noise: Tensor | None,
    selected: Selection,
) -> Tensor:
    """Compute `fish_attention` with `noise` on the global scores, by the equation."""
    scores = query @ key.mT
    if noise is not None:
        scores = scores + noise
    local = torch.einsum("hg,bgij->bhij", first, scores)
    if second is not None and first_bias is not None:
        local = torch.relu(local + first_bias[:, None, None])
        local = torch.einsum("hu,buij->bhij", second, local)
    return selected.weights(local) @ value


def self_test(
    family: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: HeadDims,
    sizes: tuple[int, int] = (_ROWS, _KEYS),
) -> list[tuple[Tensor, Tensor]]:
    """Return outputs and gradients, paired with float64 results: `fish` linear, `gfish` two layers.

    First a causal mask with more keys than queries, in odd sizes (whole tiles and tiles at both
    edges, which have separate loops without draws), then noise, a key mask, a pair mask per head,
    and dropout.
    """
    sizes_of_call = (family == "gfish", device, dtype, head_dims, sizes)
    whole = compare(causal(*sizes, device), False, *sizes_of_call)
    return whole + compare(masked((_BATCH, _HEADS, *sizes), device), True, *sizes_of_call)


def compare(
    selected: Selection,
    noisy: bool,
    two: bool,
    device: torch.device,
    dtype: torch.dtype,
    head_dims: HeadDims,
    sizes: tuple[int, int],
) -> list[tuple[Tensor, Tensor]]:
    """Return (found, float64) of the output and every gradient; `two` layers or one."""
    (rows, keys), (head_dim, value_dim) = sizes, head_dims
    shapes = [
        (_BATCH, _GLOBAL, rows, head_dim),
        (_BATCH, _GLOBAL, keys, head_dim),
        (_BATCH, _HEADS, keys, value_dim),
        (_UNITS if two else _HEADS, _GLOBAL),
        *([(_HEADS, _UNITS), (_UNITS,)] if two else []),
        *([(_GLOBAL,)] if noisy else []),
    ]
    inputs = [
        random_tensor(*shape, seed=i, device=device, dtype=dtype) for i, shape in enumerate(shapes)
    ]
    inputs[0] = inputs[0] * head_dim**-0.5
    inputs[3:] = [x.float() for x in inputs[3:]]
    cotangent = random_tensor(
        *(_BATCH, _HEADS, rows, value_dim), seed=9, device=device, dtype=dtype
    )
    random_key = RandomKey(3, step=5)
    words = torch.tensor(random_key.philox_key(STREAM_NOISE), device=device)
    leaves, exact = [x.detach().requires_grad_() for x in inputs], in_float64(inputs)
    second, first_bias = (leaves[4], leaves[5]) if two else (None, None)
    found = fish_attention(
        *leaves[:3],
        first=leaves[3],
        first_bias=first_bias,
        second=second,
        noise_scale=leaves[-1] if noisy else None,
        noise_draw=torch.cat([words, random_key.samples(_BATCH, device)]) if noisy else None,
        **selected.options,
    )
    noise = normal_noise(
        *(random_key, _BATCH, _GLOBAL, range(rows), range(keys), device, torch.float64)
    )
    mixing = (exact[4], exact[5]) if two else (None, None)
    added = exact[-1][:, None, None] * noise if noisy else None
    truth = plain_fish(*exact[:4], *mixing, added, selected)  # type: ignore[arg-type, call-arg]
    return beside([found], [truth], leaves, exact, [cotangent])
