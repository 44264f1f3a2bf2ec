"""Attention over blocks of queries with gradients written by hand, O(N · block) memory.

The matrix products of a block go to PyTorch, into buffers that stay in the cache. What lies between
them is a pass over rows: row and column terms, sums or maxima over components, masks, softmax and
dropout, and their gradients. It exists twice, in torch operations and in C (`kernels/cpu`):

    t_r = c_r S_r + a_ir + β_jr          S_r = query · key_r, a map of scores
    weights = dropout(softmax_j(l + bias)),  l = log Σ_r exp t_r, max_r t_r, or Σ_r c_r S_r

A block holds whole rows, so nothing of size N x N is kept and no normaliser saved: backward makes
the maps again, and δ = Σ_j weights ∘ d_weights comes from the weights that it multiplies.
"""
