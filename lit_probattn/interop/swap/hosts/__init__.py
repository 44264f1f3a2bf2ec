"""Libraries whose attention layers can be swapped."""
