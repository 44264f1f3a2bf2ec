"""Attention with fixed head size: theorems as programs, parameter counts, ranks, the experiment.

Source: "Low-Rank Bottleneck in Multi-head Attention Models" (Bhojanapalli et al., 2020). Functions
on its theorems use its convention: inputs X are (embed_dim, seq_len), columns of attention maps P
sum to one, and P[j, i] is the weight of key j for query i.
"""
