"""Attention of every variant from heads to heads, called like `scaled_dot_product_attention`.

    from lit_probattn import functional as LF
    out = LF.mgk_attention(query, keys, value, is_causal=True, dropout_p=0.1)

Queries are (B, H, N, E), values (B, H_kv, L, E_v), the output (B, H, N, E_v). What a layer learns
beside its projections (priors, variances, mixing weights) is given. What all of them take:

    attn_mask: broadcastable to (B, H, N, L): bool, True where a pair may attend, or floats, which
        are added to the scores. A bool mask (B, 1, 1, L) hides keys, which every variant can do.
    dropout_p: probability of dropping an attention weight, whatever the mode of a module.
    is_causal: query i sees keys up to i, as in torch; with `attn_mask` both hold.
    scale: factor on products of queries and keys. None means 1/√E.
    enable_gqa: whether consecutive groups of query heads share one key and value head.
    backend: who computes it; see `lit_probattn.attention.backends`.
    rng: names the draw of dropout and noise. None draws one from torch's generator.
    cu_seqlens: bounds of packed documents, (D + 1,) integers over the B · N queries, or a
        `lit_probattn.attention.packing.Packing`: each attends to itself alone, as if it were a
        sample. Masks of pairs are refused beside it; `rng.sample_ids` are the documents', (D,).
    cu_seqlens_k: bounds of the documents' keys in cross-attention.

Departs from torch: a row that may attend to nothing gives zeros, not NaN; tensors have four
dimensions. All of them raise a ValueError where sizes or dtypes do not fit, and a
NotImplementedError where the backend cannot serve the call.
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
