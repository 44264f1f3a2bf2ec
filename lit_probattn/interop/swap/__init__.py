"""Attention layers of other people's models become ours: `lit_probattn.swap`."""

from lit_probattn.interop.swap.door import swap
from lit_probattn.interop.swap.report import LayerReport, Report

__all__ = ["LayerReport", "Report", "swap"]
