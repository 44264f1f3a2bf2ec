"""Transformer-MGK and -sMGK: keys that are mixtures of Gaussians."""
