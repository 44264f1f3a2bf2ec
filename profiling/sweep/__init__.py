"""Grids of points: what to measure, who measures it, going on where it stopped."""
