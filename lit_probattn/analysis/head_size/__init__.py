"""Fixed head size attention: theorems as programs, parameter counts, ranks, the experiment.

Source: "Low-Rank Bottleneck in Multi-head Attention Models" (Bhojanapalli et al., 2020). Functions
about its theorems keep its convention: inputs X are (embed_dim, seq_len), attention maps P have
columns that sum to one, P[j, i] is the weight that query i gives to key j.
"""
