"""Linear attention, and its mixtures of keys, in O(N)."""
