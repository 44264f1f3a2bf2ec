"""Measurements of the fused kernels: parity, speed, compilation, tuning."""
