"""Fused kernels of linear attention over chunks."""
