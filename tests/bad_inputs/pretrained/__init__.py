"""Files of pre-trained encoders, and trained attention, that cannot be used."""
