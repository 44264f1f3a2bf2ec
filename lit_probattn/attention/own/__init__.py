"""A variant of one's own: what follows from its scores alone, and what every layer promises."""
