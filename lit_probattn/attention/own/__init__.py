"""User-defined variants: everything derived from their scores, and the contract of all layers."""
