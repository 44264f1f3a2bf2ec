"""Sentences and their translations: files, tokens, dictionaries, batches counted in tokens."""
