"""Cost of a call: multiply-adds, peak memory, time."""
