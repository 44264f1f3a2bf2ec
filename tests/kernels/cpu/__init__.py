"""The CPU path in C."""
