"""Trained translation models side by side: decoding, scores with intervals, report."""
