"""`lit_probattn.swap` replaces the attention of models of other libraries."""

from lit_probattn.interop.swap.door import swap
from lit_probattn.interop.swap.report import LayerReport, Report

__all__ = ["LayerReport", "Report", "swap"]
