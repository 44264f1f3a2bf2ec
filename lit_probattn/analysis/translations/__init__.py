"""Comparison of trained translation models: decoding, scores with intervals, report."""
