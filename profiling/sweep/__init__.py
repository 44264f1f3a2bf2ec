"""Sweeps over grids of points: configuration, plan, measurement and resuming."""
