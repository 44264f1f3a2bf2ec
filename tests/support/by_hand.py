"""Parts of transformers written out, for the oracles of whole models."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F


def layer_norm(x, norm):
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, 1e-5)


def attend(layer, query, tokens, hidden):
    """Softmax attention head by head, queries and keys from two inputs; `hidden` pairs are True."""
    outputs, size = [], layer.head_dim
    projections = (layer.query_proj, query), (layer.key_proj, tokens), (layer.value_proj, tokens)
    for h in range(layer.num_heads):
        rows = slice(h * size, (h + 1) * size)
        q, k, v = (
            F.linear(x, p.weight[rows], None if p.bias is None else p.bias[rows])
            for p, x in projections
        )
        score = torch.einsum("bie,bje->bij", q, k) / math.sqrt(size)
        outputs.append(score.masked_fill(hidden, float("-inf")).softmax(-1) @ v)
    return F.linear(torch.cat(outputs, -1), layer.out_proj.weight, layer.out_proj.bias)


def mlp(layer, x, activation):
    inner = activation(F.linear(x, layer.fc1.weight, layer.fc1.bias))
    return F.linear(inner, layer.fc2.weight, layer.fc2.bias)
