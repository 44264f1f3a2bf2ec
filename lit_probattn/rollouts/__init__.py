"""Policies in simulated environments: batched episodes, scores, videos."""
