"""Files of pre-trained encoders that cannot be used."""
