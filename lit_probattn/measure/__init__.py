"""What a call costs: multiply-adds, peak memory, time."""
