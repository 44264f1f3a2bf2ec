"""Stand-alone measurements, `python -m profiling study NAME`; shared code is in `study.py`."""
