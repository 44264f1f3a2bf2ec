"""Costs by FiSH, NeurIPS 2022, appendix D, and of linear FiSH by the same rule.

Operations of a layer, forward, with N tokens, G global and H local heads of size E, width C:

    scores of MHA      N²H(2E−1) + 2NHE(2C−1)
    scores of FiSH     N²(G(2E−1) + pair) + 2NGE(2C−1) + once
    values, output     NHE_v(2C−1) + NHE_v(2N−1) + NC(2HE_v−1)
    pair               linear  H(2G−1) + G, the last G for `global` noise; others: `mixing_flops`

so that the total for FiSH is N²(2HE + 2GE + 2HG − H) + N(4(H+G)EC − 2(H+G)E − C).

Convention of the paper: multiplications and additions count separately; softmax, scaling, masks and
random draws do not count; adding noise costs 1 per global score (its product with s_k does not
count), and 2 per local score (its product with the mixed deviation c_j counts); a ReLU costs 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lit_probattn.attention.cost.counting import Cost, Sizes, product_flops


class Mixing(NamedTuple):
    """Properties of a head mixing that its cost depends on.

    Args:
        widths: G, hidden widths, and outputs of the last layer.
        mixer: `linear`, `shared`, `mlp` or `relu_sum`.
        bias: layers with biases: `none`, `hidden` or `all`.
        noise: kind of noise on the maps.
    """

    widths: Sequence[int]
    mixer: str
    bias: str = "none"
    noise: str = "none"


# ---- layers -------------------------------------------------------------------------------------


def fish(sizes: Sizes, mixing: Mixing, *, draws_noise: bool = True) -> Cost:
    """Return the cost of FiSH, MiSH or GFiSH: scores by appendix D, values, output projection.

    The break-even head size is returned for the mixings in appendix D; projections always cost
    less.

    Args:
        sizes: sizes of layer and sequence.
        mixing: the mixing, with its kind of noise, which the paper's operations include.
        draws_noise: whether the counted call draws it.
    """
    n, c, e, e_v, h, g = *_letters(sizes), mixing.widths[0]
    per_pair, once = mixing_flops(mixing, h)
    plain = mixing.mixer != "relu_sum" and list(mixing.widths[1:-1]) in ([], [h])
    break_even = break_even_head_dim(h, g, *mixing[1:]) if plain and g < h else None
    flops = score_flops(n, c, e, g, per_pair, once, key_embed_dim=sizes.c_key)
    run = mixing if draws_noise else mixing._replace(noise="none")
    return Cost(
        paper_flops=flops + value_flops(n, c, e_v, h, sizes.c_key),
        macs=sizes.projection_macs + n * n * (g * e + mixing_macs(run) + h * e_v),
        num_parameters=sizes.num_parameters,
        break_even_head_dim=break_even,
    )


def mixed_heads(sizes: Sizes, mixing: Mixing) -> Cost:
    """Return the cost of mixing queries or keys, which does not reduce the N² term.

    Same as MHA, except for the projection of G heads and their mixing, once per position and entry;
    up to the local scores N²H(2E−1) + NE·per_entry + N(H_q + H_k)E(2C−1).
    """
    n, c, e, e_v, h = _letters(sizes)
    per_entry, _ = mixing_flops(mixing, h)
    flops = product_flops(n, c, sizes.heads.query * e)
    flops += product_flops(n, sizes.c_key, sizes.heads.key * e)
    flops += n * n * h * (2 * e - 1) + n * e * per_entry
    return Cost(
        paper_flops=flops + value_flops(n, c, e_v, h, sizes.c_key),
        macs=sizes.projection_macs + n * e * mixing_macs(mixing) + n * n * h * (e + e_v),
        num_parameters=sizes.num_parameters,
    )


def linear_fish(sizes: Sizes, mixing: Mixing) -> Cost:
    """Return the cost of LFiSH or GLFiSH, the O(N) form without a causal mask.

    Multiply-adds: NC(HE + GE + GE_v + HE_v) + NGEE_v + HGEE_v (GLFiSH: its two layers) + NHEE_v +
    NHE + GHE. The paper has no formula; `paper_flops` counts these parts by the convention of its
    appendix D.
    """
    n, c, e, e_v, h = _letters(sizes)
    widths, cells, g = mixing.widths, e * e_v, mixing.widths[0]
    macs = sizes.projection_macs
    macs += n * g * cells + sum(a * b for a, b in pairwise(widths)) * cells + n * h * cells
    macs += n * h * e + h * g * e
    flops = product_flops(n, c, h * e)
    flops += product_flops(n, sizes.c_key, g * e + g * e_v)
    flops += product_flops(n, h * e_v, c)
    per_cell = sum(b * (2 * a - 1) for a, b in pairwise(widths)) + sum(widths[1:-1])
    per_cell += sum(widths[1:]) if mixing.bias == "all" else 0
    flops += g * product_flops(e, n, e_v) + per_cell * cells
    flops += g * cells if mixing.noise != "none" else 0
    flops += h * product_flops(n, e, e_v)
    flops += g * e * (n - 1) + n * h * (2 * e - 1) + n * h * e_v
    flops += h * e * (2 * g - 1)
    return Cost(flops, macs, sizes.num_parameters)


def _letters(sizes: Sizes) -> tuple[int, int, int, int, int]:
    return sizes.n, sizes.c, sizes.e, sizes.e_v, sizes.h


# ---- parts of the appendix ----------------------------------------------------------------------


def mixing_flops(mixing: Mixing, num_heads: int) -> tuple[int, int]:
    """Return operations of noise and mixing, per pair of positions and once.

    Source: FiSH, NeurIPS 2022, appendix D (linear mixing: H(2G−1) + G for `global` noise); other
    mixers and noise kinds by the same convention.
    """
    widths, mixer, bias, noise = mixing
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
    key_embed_dim: int | None = None,
) -> int:
    """Return operations up to the local scores (the table of appendix D).

    NL(G(2E−1) + per_pair) + (N + L)GE(2C−1) + once, L = `num_keys` or N, with the width
    `key_embed_dim` instead of C for keys. MHA is G = H without mixing.
    """
    num_keys = seq_len if num_keys is None else num_keys
    maps = seq_len * num_keys * (num_global_heads * (2 * head_dim - 1) + per_pair)
    width = num_global_heads * head_dim
    projected = product_flops(seq_len, embed_dim, width)
    projected += product_flops(num_keys, key_embed_dim or embed_dim, width)
    return maps + projected + once


def value_flops(
    seq_len: int, embed_dim: int, value_dim: int, num_heads: int, key_embed_dim: int
) -> int:
    """Return operations of values, weighted sums and output projection."""
    inner = num_heads * value_dim
    projected = product_flops(seq_len, key_embed_dim, inner)
    projected += product_flops(seq_len, inner, embed_dim)
    return projected + seq_len * inner * (2 * seq_len - 1)


def mixing_macs(mixing: Mixing) -> int:
    """Return multiply-adds of the mixing per pair of positions in the reference.

    The written form with `global` or no noise computes its first layer twice (positive and negative
    parts).
    """
    widths = mixing.widths
    macs = sum(a * b for a, b in pairwise(widths))
    if mixing.mixer == "relu_sum" and mixing.noise in ("none", "global"):
        macs += widths[0] * widths[1]
    return macs


def break_even_head_dim(
    num_heads: int,
    num_global_heads: int,
    mixer: str = "linear",
    bias: str = "all",
    noise: str = "global",
) -> float:
    """Return the head size above which the N² term of FiSH costs less than the N² term of MHA.

    Source: FiSH, NeurIPS 2022, from appendix D: FiSH E > HG/(H−G).

    Args:
        num_heads: H.
        num_global_heads: G, less than H.
        mixer: `mlp` has one hidden layer of H.
        bias: biases of `mlp`, `all` as released.
        noise: kind of noise.

    Raises:
        ValueError: G is not below H, so that no head size breaks even.
    """
    if not 0 < num_global_heads < num_heads:
        raise ValueError(
            "break-even needs fewer global than local heads, received "
            f"num_global_heads={num_global_heads} and num_heads={num_heads}"
        )
    linear = mixer in ("linear", "shared")
    widths = [num_global_heads, 1 if mixer == "shared" else num_heads]
    if not linear:
        widths.append(num_heads)
    mixing = Mixing(widths, mixer, "none" if linear else bias, noise)
    per_pair, _ = mixing_flops(mixing, num_heads)
    # H(2E−1) = G(2E−1) + per_pair
    return (per_pair / (num_heads - num_global_heads) + 1) / 2
