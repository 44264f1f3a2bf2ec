"""Weights to begin a training with."""
