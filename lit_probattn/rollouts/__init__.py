"""Policies in simulated environments: episodes in batches, scores, pictures that move."""
