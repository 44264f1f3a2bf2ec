"""Sparse and random approximations of attention in trained models."""
