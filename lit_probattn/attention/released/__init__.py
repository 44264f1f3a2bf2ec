"""Variants as in the authors' code, for configurations."""
