"""Measure FLOPs, parameters, peak memory and time of attention variants; compare with formulas."""
