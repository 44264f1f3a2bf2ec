"""Questions about texts, and texts with labels."""
