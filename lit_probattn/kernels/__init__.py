"""Fused attention kernels in Triton: functions of tensors, independent of modules and configs.

Importing this package imports neither Triton nor a kernel: attention layers import them if the
backend `triton` is selected. README.md contains the mathematics and explains how to add a kernel.
"""
