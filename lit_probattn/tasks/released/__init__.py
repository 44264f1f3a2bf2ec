"""Tasks with the models of the released code."""
