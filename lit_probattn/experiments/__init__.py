"""Shared code of experiments: runner, launcher, expectations and verdicts, report pages."""
