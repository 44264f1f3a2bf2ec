"""One module per study of trained models; the list is in `lit_probattn.analysis.registry`."""
