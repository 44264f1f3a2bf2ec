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

    `widths` are G, hidden widths, and outputs of the last layer.
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


def mixed_head_flops(
    seq_len: int,
    embed_dim: int,
    head_dim: int,
    num_query_heads: int,
    num_key_heads: int,
    per_entry: int,
    num_heads: int,
) -> int:
    """Return operations up to the local scores where queries or keys are mixed.

    N²H(2E−1) + NE·per_entry + N(H_q + H_k)E(2C−1).
    """
    heads = num_query_heads + num_key_heads
    projected = projection_flops(seq_len, embed_dim, heads * head_dim)
    maps = seq_len * seq_len * num_heads * (2 * head_dim - 1)
    return maps + seq_len * head_dim * per_entry + projected


def value_flops(seq_len: int, embed_dim: int, value_dim: int, num_heads: int) -> int:
    """Return operations of values, weighted sums and output projection ."""
    inner = num_heads * value_dim
    projected = projection_flops(seq_len, embed_dim, inner)
    projected += projection_flops(seq_len, inner, embed_dim)
    return projected + seq_len * inner * (2 * seq_len - 1)


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

    Source: FiSH, NeurIPS 2022, from appendix D: FiSH E > HG/(H−G).

    Args:
        num_heads: H.
        num_global_heads: G, less than H.
        mixer: `mlp` has one hidden layer of H.
        noise: kind of noise.
        bias: of `mlp`, as released `all`.

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
