"""Sparse and random approximations of attention, swapped into trained models."""
