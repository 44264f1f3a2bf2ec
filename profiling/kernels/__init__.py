"""The fused kernels measured: parity, speed, compilation, tuning."""
