"""Tasks with models as released code builds them."""
