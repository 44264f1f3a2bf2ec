"""Operation counts of FiSH and linear FiSH: the paper's appendix D, extended.

Convention of the paper: multiplications and additions count separately; softmax, scaling, masks and
drawing random numbers do not count; adding noise costs 1 per global score (its product with s_k
does not count), and 2 per local score (its product with the mixed deviation c_j does); a ReLU
costs 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lit_probattn.attention.fish.mixing import Mixer, MixingBias, NoiseKind


def projection_flops(num_tokens: int, in_dim: int, out_dim: int) -> int:
    """Operations of a linear map without bias: num_tokens · out_dim (2 in_dim − 1)."""
    return num_tokens * out_dim * (2 * in_dim - 1)


def mixing_flops(
    widths: Sequence[int], mixer: Mixer, bias: MixingBias, noise: NoiseKind, num_heads: int
) -> tuple[int, int]:
    """Return operations of noise and mixing: per pair of positions, and once.

    Source: FiSH, NeurIPS 2022, appendix D (linear mixing: H(2G−1) + G for `global` noise); other
    mixers and noise kinds by the same convention.

    Args:
        widths: G, hidden widths, outputs of the last layer.
        mixer: function from global to local maps.
        bias: biases of the mixing.
        noise: kind of noise.
        num_heads: H.
    """
    g, units = widths[0], widths[1]
    pair = sum(b * (2 * a - 1) for a, b in pairwise(widths))
    if mixer == "relu_sum":
        pair += units * g  # G products, G ReLUs and G - 1 sums per unit
    elif mixer == "mlp":
        hidden = sum(widths[1:-1])
        pair += hidden + (hidden if bias != "none" else 0)
    pair += widths[-1] if bias == "all" else 0
    if noise == "global":
        return pair + g, 0
    if noise == "none":
        return pair, 0
    if mixer == "relu_sum":
        return pair + units * g, 0
    once = units * (2 * g - 1 if noise == "local" else 3 * g)
    return pair + 2 * (num_heads if mixer == "shared" else units), once


def score_flops(
    seq_len: int,
    embed_dim: int,
    head_dim: int,
    num_global_heads: int,
    per_pair: int,
    once: int = 0,
    num_keys: int | None = None,
) -> int:
    """Return operations up to the local scores (the table of appendix D).

    NL(G(2E−1) + per_pair) + (N + L)GE(2C−1) + once, L = `num_keys` or N. MHA is G = H with nothing
    to mix.
    """
    num_keys = seq_len if num_keys is None else num_keys
    maps = seq_len * num_keys * (num_global_heads * (2 * head_dim - 1) + per_pair)
    projected = projection_flops(seq_len + num_keys, embed_dim, num_global_heads * head_dim)
    return maps + projected + once


def value_flops(seq_len: int, embed_dim: int, value_dim: int, num_heads: int) -> int:
    """Return operations of values, weighted sums and output projection (section b.3)."""
    inner = num_heads * value_dim
    weighted = seq_len * inner * (2 * seq_len - 1)
    return (
        projection_flops(seq_len, embed_dim, inner)
        + weighted
        + projection_flops(seq_len, inner, embed_dim)
    )


def mixing_macs(widths: Sequence[int], mixer: Mixer, noise: NoiseKind) -> int:
    """Return multiply-adds of the mixing per pair of positions, as the reference runs it.

    The written form with `global` or no noise takes its first layer twice (positive and negative
    parts).
    """
    macs = sum(a * b for a, b in pairwise(widths))
    if mixer == "relu_sum" and noise in ("none", "global"):
        macs += widths[0] * widths[1]
    return macs


def break_even_head_dim(
    num_heads: int,
    num_global_heads: int,
    mixer: Mixer = "linear",
    noise: NoiseKind = "global",
    bias: MixingBias = "all",
) -> float:
    """Return the head size above which the N² term of FiSH costs less than that of MHA.

    Source: FiSH specification b.2, from appendix D: FiSH E > HG/(H−G).

    Args:
        num_heads: H.
        num_global_heads: G, less than H.
        mixer: `linear`, or `mlp` with one hidden layer of H.
        noise: kind of noise.
        bias: biases of `mlp`, as released `all`.

    Raises:
        ValueError: G is not below H, so that no head size breaks even.
    """
    if not 0 < num_global_heads < num_heads:
        raise ValueError(
            f"break-even needs fewer global than local heads, received num_global_heads="
            f"{num_global_heads} and num_heads={num_heads}"
        )
    linear = mixer in ("linear", "shared")
    widths = [num_global_heads, 1 if mixer == "shared" else num_heads]
    if not linear:
        widths.append(num_heads)
    per_pair, _ = mixing_flops(widths, mixer, "none" if linear else bias, noise, num_heads)
    # H(2E−1) = G(2E−1) + per_pair
    return (per_pair / (num_heads - num_global_heads) + 1) / 2


def linear_fish_cost(
    *,
    seq_len: int,
    embed_dim: int,
    key_embed_dim: int,
    head_dim: int,
    value_dim: int,
    num_heads: int,
    num_global_heads: int,
    mode: str,
    widths: Sequence[int],
    noise: bool,
    bias: bool,
) -> tuple[int, int]:
    """Return operations by the convention of appendix D, and multiply-adds in matrix products.

    The paper has no formula for linear FiSH; these are its parts: projections, states, key sums,
    noise, mixing, reading, normaliser and its division. key_global mixes N keys, and the noise,
    instead of one state; score_global reads states of width G·E.
    """
    n, e, e_v, h, g = seq_len, head_dim, value_dim, num_heads, num_global_heads
    query_heads = g if mode == "score_global" else h
    value_heads = g if mode == "kv_global" else h
    macs = n * embed_dim * (query_heads * e + h * e_v)
    macs += n * key_embed_dim * (g * e + value_heads * e_v)
    if mode == "kv_global":
        mixing = sum(a * b for a, b in pairwise(widths))
        macs += n * g * e * e_v + mixing * e * e_v + n * h * e * e_v
    elif mode == "key_global":
        macs += n * h * g * e + 2 * n * h * e * e_v
        macs += h * g * e * e_v if noise else 0
    else:
        macs += 2 * n * h * g * e * e_v
    macs += n * h * g * e if mode == "score_global" else n * h * e + h * g * e
    flops = projection_flops(n, embed_dim, query_heads * e)
    flops += projection_flops(n, key_embed_dim, g * e + value_heads * e_v)
    flops += projection_flops(n, h * e_v, embed_dim)
    cells, width = e * e_v, e
    if mode == "kv_global":
        hidden = sum(widths[1:-1])
        mixing = sum(b * (2 * a - 1) for a, b in pairwise(widths)) + hidden
        mixing += sum(widths[1:]) if bias else 0
        flops += g * cells * (2 * n - 1) + mixing * cells + (g * cells if noise else 0)
    elif mode == "key_global":
        flops += n * h * e * (2 * g - 1) + h * cells * (2 * n - 1)
        flops += h * cells * 2 * g if noise else 0
    else:
        width = g * e
        flops += n * h * width + h * width * e_v * (2 * n - 1)
        flops += h * width * e_v if noise else 0
    flops += n * h * e_v * (2 * width - 1)
    flops += g * e * (n - 1) + n * h * (2 * width - 1) + n * h * e_v
    flops += n * h * width if mode == "score_global" else h * e * (2 * g - 1)
    return flops, macs
