"""Single sentences for language models: the one-billion-word benchmark, text of one's own."""
