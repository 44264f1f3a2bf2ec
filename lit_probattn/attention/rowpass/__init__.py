"""Where attention meets the C library of the CPU (`kernels/cpu`).

`tiled.py` hands over whole calls: maps, mixtures or sums of them, masks, dropout, noise.
`native.py` computes the rows of a block, softmax and dropout, of scores that `blockwise.py` makes.
"""
