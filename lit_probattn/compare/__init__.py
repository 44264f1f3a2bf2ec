"""Experiments as tables of resumable runs: tables, protocol, runner, predictions, reports."""
