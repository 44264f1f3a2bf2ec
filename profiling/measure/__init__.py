"""Counters, timers, memory, and the rows that hold what they found."""
