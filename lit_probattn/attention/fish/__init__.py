"""FiSHformer: local heads mixed from global score maps, or from global states."""
