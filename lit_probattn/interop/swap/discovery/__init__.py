"""Where a model computes attention, and with which weights: found by one run of an example."""
