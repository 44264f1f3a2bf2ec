"""Linear attention and MLK written out as float64 loops over the sums; shares nothing with them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def features(x: Tensor, name: str, nu: int, norm: str, projection) -> Tensor:
    """φ of one vector, (E,) -> (F,), by loops over the entries."""
    size = x.shape[0]
    if name == "elu":
        out = torch.where(x > 0, x + 1, x.clamp_max(0).exp())
    elif name == "relu":
        out = x.clamp_min(0)
    elif name == "dpfp":
        r = torch.cat([x, -x]).clamp_min(0)
        out = torch.stack(
            [
                r[i] * r[(i + step) % (2 * size)]
                for step in range(1, nu + 1)
                for i in range(2 * size)
            ]
        )
    else:
        scaled = x / math.sqrt(math.sqrt(size))
        out = torch.stack([(w @ scaled - scaled @ scaled / 2).exp() for w in projection])
    if norm == "sum":
        total = out.sum()
        out = out / total if total > 0 else out * 0
    return out


def linear_oracle(query, key, value, *, masks, dropout, form, projection, prior, state=None):
    """Loop over samples, heads, queries and keys, adding up numerators and denominators."""
    batch, heads, num_queries, size = query.shape
    kv_heads, num_keys = value.shape[1], value.shape[2]
    f = form.features
    out = torch.zeros(batch, heads, num_queries, value.shape[-1], dtype=torch.float64)

    def phi(x):
        return features(x, f.name, f.dpfp_nu, f.norm, projection)

    def key_features(b, h, j):
        if prior is None:
            return phi(key[b, h, j])
        shares = [prior[h, r, j if prior.shape[-1] > 1 else 0] for r in range(prior.shape[1])]
        keys = [key[b, h, r, j] for r in range(prior.shape[1])]
        if form.mix == "before":
            return phi(sum(p * k for p, k in zip(shares, keys, strict=True)))
        return sum(p * phi(k) for p, k in zip(shares, keys, strict=True))

    keep = None
    if dropout is not None:
        keep = dropout.keep(batch, kv_heads, range(1), range(num_keys), query.device)
    rows = []
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            cols = [key_features(b, kv, j) for j in range(num_keys)]
            for i in range(num_queries):
                numerator, denominator = value.new_zeros(value.shape[-1]), value.new_zeros(())
                q = phi(query[b, h, i])
                for j in range(num_keys):
                    if masks.is_causal and j > i + num_keys - num_queries:
                        continue
                    if masks.key_mask is not None and not masks.key_mask[b, j]:
                        continue
                    if masks.attn_mask is not None and not bool(
                        masks.attn_mask.expand(batch, heads, num_queries, num_keys)[b, h, i, j]
                    ):
                        continue
                    weight = (q * cols[j]).sum()
                    factor = 1.0
                    if keep is not None:
                        factor = dropout.scale if bool(keep[b, kv, 0, j]) else 0.0
                    numerator = numerator + weight * factor * value[b, kv, j]
                    denominator = denominator + weight
                if form.denominator == "sum":
                    total = denominator + form.eps
                    row = numerator / total if total > 0 else numerator * 0
                else:
                    padded = form.padded_len or math.sqrt(num_queries * num_keys)
                    row = numerator / math.sqrt(padded)
                rows.append(row / math.sqrt(size) if form.output_scale != "one" else row)
    return torch.stack(rows).view_as(out)
