"""Variants as the authors' code computes them; configurations name them."""
