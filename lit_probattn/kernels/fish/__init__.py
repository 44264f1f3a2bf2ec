"""Fused kernels of FiSH: local heads mixed from global score maps."""
