"""Rows of measurements, and work in several processes."""
