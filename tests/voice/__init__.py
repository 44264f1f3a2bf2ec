"""The language of pages, docstrings, help texts and messages, sampled and counted."""
