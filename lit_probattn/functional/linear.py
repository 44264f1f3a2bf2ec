"""Per-head linear attention and its mixtures (MLK)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_probattn.attention.backends import Backend
from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.linear.features import (
    FeatureMap,
    FeatureName,
    FeatureNorm,
    check_feature_map,
    default_num_features,
    orthogonal_projection,
)
from lit_probattn.attention.linear.functions import MLK, Linear, LinearForm
from lit_probattn.attention.packing import Packing
from lit_probattn.functional.call import attend_heads, by_component, layout_of, mixture_of
from lit_probattn.randomness import RandomKey


def random_features(head_dim: int, num_features: int | None = None) -> Tensor:
    """Draw the random features of `feature_map="favor"` from torch's generator, (F, E).

    Source: Choromanski et al., 2021, section 3: orthogonal in groups of E, each row N(0, I).

    Args:
        head_dim: E.
        num_features: F. None means E ln E.
    """
    count = default_num_features(head_dim) if num_features is None else num_features
    normals = torch.randn(count, 2, head_dim, dtype=torch.float64)
    return orthogonal_projection(normals).to(torch.get_default_dtype())


def _form(features: FeatureMap, projection: Tensor | None, size: int) -> LinearForm:
    """Return the checked form of a feature map."""
    favor = features.name == "favor"
    check_feature_map(features, size)
    if features.dpfp_nu != 1 and features.name != "dpfp":
        raise ValueError(
            f"dpfp_nu={features.dpfp_nu} is for feature_map=dpfp, received "
            f"feature_map={features.name}"
        )
    if favor != (projection is not None):
        raise ValueError(
            "feature_map=favor, and no other, needs projection=random_features(head_dim), "
            f"received feature_map={features.name} and projection="
            f"{None if projection is None else tuple(projection.shape)}"
        )
    if projection is not None and projection.shape[1:] != (size,):
        raise ValueError(
            f"projection has shape {tuple(projection.shape)}, expected (features, {size})"
        )
    return LinearForm(features)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    feature_map: FeatureName = "elu",
    projection: Tensor | None = None,
    dpfp_nu: int = 1,
    feature_norm: FeatureNorm = "none",
    backend: Backend = "auto",
    rng: RandomKey | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Compute attention with a feature map φ instead of the softmax, in O(N).

    Source: Katharopoulos et al., 2020, Eq. (4):
        out[i] = Σ_j φ(query[i]) · φ(key[j]) value[j] / Σ_j φ(query[i]) · φ(key[j])
    Departs from the source: dropout drops whole values, because there are no pairs. There are no
    scores: no scale, no float masks; a mask of pairs requires backend="reference".

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        value: (B, H_kv, L, E_v).
        feature_map: `elu` (elu(x) + 1), `relu`, `dpfp` or `favor`.
        projection: random features of `favor`, (F, E); see `random_features`.
        dpfp_nu: ν of `dpfp`.
        feature_norm: `sum` divides features by their sum.

    For other arguments and errors see `lit_probattn.functional`.

    Returns:
        (B, H, N, E_v).
    """
    layout = layout_of(query, key, value, enable_gqa)
    form = _form(FeatureMap(feature_map, feature_norm, dpfp_nu), projection, layout.head_dim)
    variant = Linear(form, projection)
    given = attn_mask, dropout_p, is_causal, None, backend, rng, cu_seqlens, cu_seqlens_k
    return attend_heads(query, key, value, layout.out, lambda _: variant, *given, has_scores=False)


def mlk_attention(
    query: Tensor,
    key: Tensor | Sequence[Tensor],
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    prior: Tensor | None = None,
    key_shift: Tensor | None = None,
    feature_map: FeatureName = "elu",
    projection: Tensor | None = None,
    dpfp_nu: int = 1,
    feature_norm: FeatureNorm = "none",
    backend: Backend = "auto",
    rng: RandomKey | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Compute attention with a feature map, and keys that are mixtures of K components, in O(N).

    Source: MGK, ICML 2022, section 2.4:
        out[i] = φ(query[i])ᵀ Σ_j Σ_r π_r φ(key[j, r]) value[j]ᵀ
               / φ(query[i])ᵀ Σ_j Σ_r π_r φ(key[j, r])
    Departs from the source: see `linear_attention`.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, K, L, E), or K tensors (B, H_kv, L, E); with `key_shift` one key,
            (B, H_kv, L, E), for key[j, r] = key[j] + b_r.
        value: (B, H_kv, L, E_v).
        prior: π, (K,), (H_kv, K) or (H_kv, K, L), not negative. None means equal priors.
        key_shift: b, (K, E) or (H_kv, K, E).
        feature_map: this and the next three: see `linear_attention`.

    For other arguments and errors see `lit_probattn.functional`.

    Returns:
        (B, H, N, E_v).
    """
    layout, key, shift, components = mixture_of(query, key, value, key_shift, enable_gqa)
    shares = query.new_full((components,), 1.0 / components) if prior is None else prior
    form = _form(FeatureMap(feature_map, feature_norm, dpfp_nu), projection, layout.head_dim)

    def variant(call: HeadCall) -> MLK:
        sizes = layout.key, components, call, cu_seqlens is not None
        return MLK(form, projection, by_component("prior", shares, *sizes), shift)

    given = attn_mask, dropout_p, is_causal, None, backend, rng, cu_seqlens, cu_seqlens_k
    return attend_heads(query, key, value, layout.out, variant, *given, has_scores=False)
