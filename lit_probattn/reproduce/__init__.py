"""Published tables, one resumable command each: fits, results beside the published values."""
