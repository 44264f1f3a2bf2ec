"""Dropping components of mixtures that hardly any attention goes through."""
