"""Offline reinforcement learning: trajectories in D4RL's format, segments, toy data."""
