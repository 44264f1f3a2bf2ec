"""Offline reinforcement learning: trajectories in D4RL's format, read, cut into segments, made."""
