"""Fused attention kernels in Triton: functions on tensors that know no module and no config.

Importing this package imports neither Triton nor a kernel: the attention layers import what they
need when the backend `triton` is chosen. README.md has the mathematics and says how a kernel
is added.
"""
