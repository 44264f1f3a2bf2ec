"""Sparse and random approximations of attention, swapped into trained models."""

from lit_probattn.analysis.approximation.greedy import value_aware
from lit_probattn.analysis.approximation.kernels import kernel_weights, square_features
from lit_probattn.analysis.approximation.lsh import lsh_attention
from lit_probattn.analysis.approximation.oracles import (
    by_norm,
    nearest_value,
    sliding_window,
    value_oblivious,
)
from lit_probattn.analysis.approximation.random_features import draw_rows, random_feature_weights
from lit_probattn.analysis.approximation.witness import eliminate, nnls_witness

__all__ = [
    "by_norm",
    "draw_rows",
    "eliminate",
    "kernel_weights",
    "lsh_attention",
    "nearest_value",
    "nnls_witness",
    "random_feature_weights",
    "sliding_window",
    "square_features",
    "value_aware",
    "value_oblivious",
]
