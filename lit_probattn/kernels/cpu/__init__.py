"""Attention on the CPU in C: random draws, and attention by tiles."""
