"""Stand-alone sub-commands of `lit-probattn`, listed in `lit_probattn.__main__`."""
