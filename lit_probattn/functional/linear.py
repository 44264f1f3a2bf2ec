"""Per-head linear attention and its mixtures (MLK)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_probattn.attention.backends import Backend, attend
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
from lit_probattn.functional.call import Common, by_head, components_of, layout_of, make_call
from lit_probattn.functional.documents import takes_documents
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


@takes_documents(has_scores=False)
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
    common = Common(attn_mask, dropout_p, is_causal, None, rng)
    call = make_call(query, key, value, layout.out, common)
    return attend(call, Linear(form, projection), backend)


@takes_documents("prior", has_scores=False)
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
    if not isinstance(key, Tensor):
        key = torch.stack(tuple(key), 2)
    if key.dim() != (5 if key_shift is None else 4):
        raise ValueError(
            f"key has shape {tuple(key.shape)}, expected (B, heads, components, positions, size), "
            "a sequence of keys, or key_shift with one key (B, heads, positions, size)"
        )
    components = key.shape[2] if key_shift is None else components_of(key_shift)
    keys = components if key_shift is None else 1
    layout = layout_of(query, key, value, enable_gqa, keys)
    kv, size = layout.key, layout.head_dim
    if prior is None:
        prior = query.new_full((components,), 1.0 / components)
    if prior.dim() == 3:
        shares = by_head("prior", prior, kv, components, value.shape[2]).expand(kv, -1, -1)
    else:
        shares = by_head("prior", prior, kv, components).expand(kv, -1)[..., None]
    if key_shift is not None:
        key_shift = by_head("key_shift", key_shift, kv, components, size).expand(kv, -1, -1)
    form = _form(FeatureMap(feature_map, feature_norm, dpfp_nu), projection, size)
    common = Common(attn_mask, dropout_p, is_causal, None, rng)
    call = make_call(query, key, value, layout.out, common)
    return attend(call, MLK(form, projection, shares, key_shift), backend)
