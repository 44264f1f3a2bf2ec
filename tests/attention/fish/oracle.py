"""FiSH written out head by head in float64, sharing only the drawn noise with the package."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from lit_probattn.randomness import normal_noise
from tests.attention.mgk.oracles import combine


def draw(noise, batch, maps, rows, cols):
    first = noise.first_row
    return normal_noise(
        *(noise.key, batch, maps, range(first, first + rows), range(cols)),
        torch.device("cpu"),
        torch.float64,
    )


def weighted(weights, maps):
    return sum(w * x for w, x in zip(weights, maps, strict=True))


def local_maps(maps, mixing, num_heads, last_bias=None, kind="none", draws=None):
    """Return the list of local maps of a list of global ones, each with any dimensions.

    `draws` returns noise of a number of maps, (B, count, …).
    """
    (first, *rest), s = mixing.weights, mixing.noise_scale
    rows = [first[0]] * num_heads if mixing.mixer == "shared" else list(first)
    if mixing.mixer == "relu_sum":  # the written form
        noise = [[0.0] * len(maps)] * len(rows)
        if kind != "none":
            own = 1 if kind == "local" else len(maps)
            eps = draws(len(rows) * own).unflatten(1, (len(rows), own))
            scaled = [s[k] * eps[:, :, k % own] for k in range(len(maps))]
            noise = [[x[:, u] for x in scaled] for u in range(len(rows))]
        units = [
            sum((p * (g + e)).clamp_min(0) for p, g, e in zip(row, maps, added, strict=True))
            for row, added in zip(rows, noise, strict=True)
        ]
    else:
        units = [weighted(row, maps) for row in rows]
        if kind != "none":
            eps = draws(len(rows))
            for u, row in enumerate(rows):
                c = (row * s).sum() if kind == "local" else (row * s).square().sum().sqrt()
                units[u] = units[u] + c * eps[:, u]
    for weight, bias in zip(rest, mixing.biases, strict=True):
        if mixing.mixer == "mlp":
            units = [(x if bias is None else x + bias[u]).clamp_min(0) for u, x in enumerate(units)]
        units = [weighted(row, units) for row in weight]
    return units if last_bias is None else [x + last_bias[j] for j, x in enumerate(units)]


def fish_logits(
    query, key, *, mixing, num_heads, scale_position, noise_position, noise=None, scale_ratio=1.0
):
    """Return the list of the H local logit maps, each (B, N, L)."""
    batch, num_global, rows, dim = query.shape
    cols, root = key.shape[2], dim**0.5 / scale_ratio
    kind = "none" if noise is None else noise.kind
    maps = [torch.einsum("bie,bje->bij", query[:, k], key[:, k]) for k in range(num_global)]
    if scale_position == "before":
        maps = [g / root for g in maps]
        if kind != "none" and noise_position == "raw":
            mixing = replace(mixing, noise_scale=mixing.noise_scale / root)
    if kind == "global":
        eps = draw(noise, batch, num_global, rows, cols)
        maps, kind = [g + mixing.noise_scale[k] * eps[:, k] for k, g in enumerate(maps)], "none"
    draws = partial(draw, noise, batch, rows=rows, cols=cols)
    logits = local_maps(maps, mixing, num_heads, None, kind, draws)
    return [a / root if scale_position == "after" else a for a in logits]


def fish_oracle(query, key, value, *, masks, dropout, **arguments):
    """Return the outputs of all heads, (B, H, N, E_v), from direct exponentials."""
    density = torch.stack([a.exp() for a in fish_logits(query, key, **arguments)], 1)
    return combine(density, value, masks, dropout)
