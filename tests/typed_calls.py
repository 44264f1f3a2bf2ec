"""Calls of the public interface as type checkers see them; `make lint` checks this file.

An ignored error that is not reported is itself reported (`warn_unused_ignores`).
"""

from typing import assert_type

import torch
from torch import nn

import lit_probattn
from lit_probattn.attention import Attention, LinearAttention, MGKAttention
from lit_probattn.interop.multihead import MultiheadForm
from lit_probattn.interop.swap import Report

layer = lit_probattn.create("smgk", embed_dim=8, num_heads=2, dropout=0.0)
x = torch.zeros(1, 3, 8)
model = nn.Sequential(nn.MultiheadAttention(8, 2))
multihead = lit_probattn.as_multihead_attention(layer)

assert_type(layer, Attention)
assert_type(layer(x, is_causal=True), torch.Tensor)
assert_type(MGKAttention(8, 2)(x), torch.Tensor)
assert_type(multihead, MultiheadForm)
assert_type(multihead(x, x, x), tuple[torch.Tensor, torch.Tensor | None])
assert_type(lit_probattn.list_attention(), list[str])
assert_type(lit_probattn.swap(model, "mgk", heads=0.5), tuple[nn.Sequential, Report])
assert_type(lit_probattn.__version__, str)
layer(x, causal=True)  # type: ignore[call-arg]
lit_probattn.create("smgk", "8")  # type: ignore[arg-type]

# Constructors have the fields of their records as arguments.
MGKAttention(64, num_heads=4, e_step="hard", dropout=0.1)
MGKAttention(8, 2, 4)  # type: ignore[call-arg]
MGKAttention(64, 4, e_step="loud")  # type: ignore[arg-type]
MGKAttention(64, 4, num_components="2")  # type: ignore[arg-type]
LinearAttention(64, 4, rotary_dim=2)  # type: ignore[call-arg]
