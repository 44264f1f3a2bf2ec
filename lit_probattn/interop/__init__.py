"""Our layers in other people's models."""
