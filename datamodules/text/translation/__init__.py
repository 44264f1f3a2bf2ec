"""Parallel text: files, tokens, dictionaries, batches counted in tokens."""
