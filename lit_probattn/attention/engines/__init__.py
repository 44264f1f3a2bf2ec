"""Engines: attention from scores in normal form, for every variant that has one."""
