"""Per-head attention of every variant, called like `scaled_dot_product_attention`.

    from lit_probattn import functional as LF
    out = LF.mgk_attention(query, keys, value, is_causal=True, dropout_p=0.1)

Queries are (B, H, N, E), values (B, H_kv, L, E_v), the output (B, H, N, E_v). Learned tensors other
than projections (priors, variances, mixing weights) are arguments. Common arguments:

    attn_mask: broadcastable to (B, H, N, L): bool, True where a pair may attend, or floats, which
        are added to the scores. A bool mask (B, 1, 1, L) masks keys, which all variants support.
    dropout_p: probability of dropping an attention weight, independent of any module's mode.
    is_causal: query i attends to keys up to i, as in torch; combined with `attn_mask`.
    scale: factor on products of queries and keys, positive. None means 1/√E.
    enable_gqa: whether groups of consecutive query heads share one key and value head.
    backend: implementation to use; see `lit_probattn.attention.backends`.
    rng: identifies the draw of dropout and noise. None draws a new key from torch's generator.
    cu_seqlens: bounds of packed documents, (D + 1,) integers over the B · N queries, or a
        `lit_probattn.attention.packing.Packing`: each attends only to itself, like a separate
        sample. Masks of pairs are not supported; `rng.sample_ids` has one id per document, (D,).
    cu_seqlens_k: bounds of the documents' keys in cross-attention.

Departs from torch: fully masked rows give zeros, not NaN; tensors have four dimensions. All
functions raise a ValueError if sizes or dtypes do not match, and a NotImplementedError if the
backend does not support the call.
"""

from lit_probattn.functional.ast import ast_attention as ast_attention
from lit_probattn.functional.fish import fish_attention as fish_attention
from lit_probattn.functional.fish import linear_fish_attention as linear_fish_attention
from lit_probattn.functional.linear import linear_attention as linear_attention
from lit_probattn.functional.linear import mlk_attention as mlk_attention
from lit_probattn.functional.linear import random_features as random_features
from lit_probattn.functional.mgk import mgk_attention as mgk_attention
from lit_probattn.functional.polynomial import polynomial_attention as polynomial_attention
from lit_probattn.functional.softmax import softmax_attention as softmax_attention
