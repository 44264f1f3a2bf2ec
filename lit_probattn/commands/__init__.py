"""Sub-commands of `lit-probattn` that stand on their own; `lit_probattn.__main__` names them."""
