"""Removal of mixture components with negligible attention."""
