"""Encoders of time series."""
