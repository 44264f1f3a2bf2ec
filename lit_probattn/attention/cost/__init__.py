"""What variants cost in closed form: one module per paper."""
