"""Attention on the CPU in C: random draws, and the pass over rows between two matrix products."""
