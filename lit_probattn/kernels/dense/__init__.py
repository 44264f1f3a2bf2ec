"""Fused kernels of softmax attention and of mixtures of Gaussian keys."""
