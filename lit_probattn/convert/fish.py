"""Convert trained softmax heads to FiSH: local heads mixed from fewer global heads.

    mixing    the H old bilinear forms as rows of an H × d² matrix, truncated to rank G: the mixing
              weights are its first G left singular vectors, p, and global form g is Σ_h p_gh A_h
    keys      each global form truncated to rank E, weighted by the second moment of the inputs
    values    local head h keeps those of old head h, refitted to the outputs of its new map

With G = H and large enough heads, the conversion is exact: the mixing starts as the identity, and
the global forms are the old forms.

The conversion has no noise; the layer draws noise in further training.
"""

from __future__ import annotations

import copy

import torch

from lit_probattn.attention import FiSHAttention, SoftmaxAttention
from lit_probattn.convert.layer import (
    LayerErrors,
    LayerInputs,
    augment,
    check_layer,
    head_forms,
    output_error,
    set_head_rows,
    set_values,
    split,
)
from lit_probattn.interop.algebra import (
    form_products,
    second_moment,
    shared_query_factors,
    symmetric_roots,
)


@torch.no_grad()
def convert_to_fish(
    old: SoftmaxAttention,
    *,
    num_global_heads: int | None = None,
    inputs: LayerInputs | None = None,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
) -> tuple[FiSHAttention, LayerErrors]:
    """Convert a softmax layer of H heads into a FiSH layer of H local and G global heads.

    Args:
        old: the trained layer, with dot-product scores and as many key/value heads as query heads.
        num_global_heads: G. None uses half the heads.
        inputs: inputs of the layer. None converts from the weights alone.
        head_dim: size of a global head. None uses E.
        value_head_dim: size of a value head. None uses the old size.

    Raises:
        ValueError: G is not between 1 and H, the layer is not plain softmax attention, or the
            inputs have no real token.
    """
    check_layer(old)
    dtype = old.query_proj.weight.dtype
    mode, old = old.training, copy.deepcopy(old).to(torch.float64).eval()
    fit, test, held_out = split(inputs)
    moment = None if fit is None else second_moment(augment(fit.x[fit.real], old))
    new = FiSHAttention(
        old.embed_dim,
        old.num_heads,
        num_global_heads=num_global_heads,
        head_dim=old.head_dim if head_dim is None else head_dim,
        value_head_dim=old.value_head_dim if value_head_dim is None else value_head_dim,
        bias=old.use_bias,
        dropout=old.dropout,
        backend=old.backend,
    ).to(old.query_proj.weight)
    new.eval()
    query, key = head_forms(old)
    root = None if moment is None else symmetric_roots(moment)[0]
    wide, long = (x if root is None else x @ root for x in (query, key))
    products = form_products(wide[None], long)
    order = torch.linalg.eigh(products).eigenvectors.flip(1)[:, : new.num_global_heads]  # (H, G)
    if new.num_global_heads == old.num_heads:
        order = torch.eye(old.num_heads).to(order)
    new.core.mixing.weights[0].copy_(order)
    kept, scale = 0.0, (new.head_dim / old.head_dim) ** 0.5
    for index, mixed in enumerate(order.unbind(1)):
        left = (scale * mixed[:, None, None] * query).flatten(0, 1)[None]
        factors = shared_query_factors(left, key.flatten(0, 1)[None], new.head_dim, moment)
        set_head_rows(new.query_proj, index, factors.query)
        set_head_rows(new.key_proj, index, factors.keys[0])
        kept += factors.kept / scale**2
    set_values(old, new, [[head] for head in range(old.num_heads)], fit)
    total = float(products.diagonal().sum())
    errors = LayerErrors(
        groups=[[head] for head in range(old.num_heads)],
        logit_error=max(0.0, 1.0 - kept / total) ** 0.5 if total > 0 else 0.0,
        output_error=None if test is None else output_error(old, new, test),
        held_out=held_out,
    )
    return new.to(dtype).train(mode), errors
