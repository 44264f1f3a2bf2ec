"""Fixed head size attention: theorems as programs, parameter counts, ranks, the experiment.

Source: "Low-Rank Bottleneck in Multi-head Attention Models" (Bhojanapalli et al., 2020). Functions
about its theorems keep its convention: inputs X are (embed_dim, seq_len), attention maps P have
columns that sum to one, P[j, i] is the weight that query i gives to key j.
"""

from lit_probattn.analysis.head_size.theorem import (
    attention_map,
    least_head_size,
    least_head_size_causal,
    representing_weights,
    unreachable,
)
from lit_probattn.convert.wider_heads import embed_into_head_size

__all__ = [
    "attention_map",
    "embed_into_head_size",
    "least_head_size",
    "least_head_size_causal",
    "representing_weights",
    "unreachable",
]
