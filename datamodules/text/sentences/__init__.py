"""Separate sentences for language models: the one-billion-word benchmark and user text."""
