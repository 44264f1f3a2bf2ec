"""Measure FLOPs, parameters, peak memory and time of attention variants beside the formulas."""
