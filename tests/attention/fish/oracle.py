"""FiSH written out head by head in float64, sharing only the drawn noise with the package."""

from __future__ import annotations

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


def fish_logits(
    query, key, *, mixing, num_heads, scale_position, noise_position, noise=None, scale_ratio=1.0
):
    """Return the list of the H local logit maps, each (B, N, L)."""
    batch, num_global, rows, dim = query.shape
    cols, root = key.shape[2], dim**0.5 / scale_ratio
    kind = "none" if noise is None else noise.kind
    s = mixing.noise_scale
    maps = []
    for k in range(num_global):
        g = torch.einsum("bie,bje->bij", query[:, k], key[:, k])
        if scale_position == "before":
            g = g / root
        maps.append(g)
    if kind != "none" and scale_position == "before" and noise_position == "raw":
        s = s / root
    if kind == "global":
        eps = draw(noise, batch, num_global, rows, cols)
        maps = [g + s[k] * eps[:, k] for k, g in enumerate(maps)]
    first = mixing.weights[0]
    units = first.shape[0]
    logits = []
    if mixing.mixer in ("linear", "shared"):
        if kind in ("local", "local_global"):
            eps = draw(noise, batch, num_heads, rows, cols)
        for j in range(num_heads):
            p = first[0] if mixing.mixer == "shared" else first[j]
            a = sum(p[k] * maps[k] for k in range(num_global))
            if kind == "local":
                a = a + sum(p[k] * s[k] for k in range(num_global)) * eps[:, j]
            elif kind == "local_global":
                a = a + sum((p[k] * s[k]) ** 2 for k in range(num_global)).sqrt() * eps[:, j]
            logits.append(a)
    elif mixing.mixer == "mlp":
        if kind in ("local", "local_global"):
            eps = draw(noise, batch, units, rows, cols)
        hidden = []
        for u in range(units):
            z = sum(first[u, k] * maps[k] for k in range(num_global))
            if kind == "local":
                z = z + sum(first[u, k] * s[k] for k in range(num_global)) * eps[:, u]
            elif kind == "local_global":
                z = z + sum((first[u, k] * s[k]) ** 2 for k in range(num_global)).sqrt() * eps[:, u]
            hidden.append(z)
        for weight, bias in zip(mixing.weights[1:], mixing.biases, strict=True):
            active = [
                (z if bias is None else z + bias[u]).clamp_min(0) for u, z in enumerate(hidden)
            ]
            hidden = [sum(row[u] * h for u, h in enumerate(active)) for row in weight]
        logits = hidden
    else:  # the written form
        if kind == "local":
            eps = draw(noise, batch, units, rows, cols)[:, :, None].expand(
                -1, -1, num_global, -1, -1
            )
        elif kind == "local_global":
            eps = draw(noise, batch, units * num_global, rows, cols)
            eps = eps.unflatten(1, (units, num_global))
        sums = []
        for j in range(units):
            terms = []
            for k in range(num_global):
                noisy = maps[k]
                if kind in ("local", "local_global"):
                    noisy = noisy + s[k] * eps[:, j, k]
                terms.append((first[j, k] * noisy).clamp_min(0))
            sums.append(sum(terms))
        logits = [sum(row[j] * u for j, u in enumerate(sums)) for row in mixing.weights[1]]
    return [a / root if scale_position == "after" else a for a in logits]


def fish_oracle(query, key, value, *, masks, dropout, **arguments):
    """Return the outputs of all heads, (B, H, N, E_v), from direct exponentials."""
    density = torch.stack([a.exp() for a in fish_logits(query, key, **arguments)], 1)
    return combine(density, value, masks, dropout)
