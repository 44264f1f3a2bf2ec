"""Stand-alone measurements: `python -m profiling study NAME`; what they share is in `study.py`."""
