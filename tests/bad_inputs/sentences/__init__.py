"""Bad inputs of single sentences, and of figures made of them."""
