"""Attention whose keys are mixtures of Gaussians: its backends as pure functions.

The layer that owns projections, shifts, priors and variances is in `layer.py`. Cached keys cost one
product per pair where shifts allow it. With τ = 1/σ²:

    s_ijr = τ_r query[i] · key[j, r] − (τ_r / 2) ‖query[i]‖² + β_jr
    β_jr = log π_jr − (1 − λ) (τ_r / 2) ‖key[j, r]‖² [− (E / 2) log σ²_r]

with λ = 0, or the weight at which keys' norms are put back (`norm_weight`), and for shifted keys
query · (key + b_r) = query · key + query · b_r, whatever the number of components.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lit_probattn.attention.backends import pair_arguments
from lit_probattn.attention.blockwise import Axis, Block, blockwise_attention
from lit_probattn.attention.functional import (
    Heads,
    compute_dtype,
    first_maximum,
    grouped_scores,
    log_sum_exp,
    reference_output,
    repeat_heads,
    repeat_rows,
    split_precision,
    squared_distance,
)
from lit_probattn.attention.rowpass.mixture import mixture_attention
from lit_probattn.attention.sdpa import fused_attention

Score = Literal["gaussian", "dot"]


@dataclass(frozen=True)
class MGKArguments:
    """What attention to mixtures of Gaussians needs besides heads and masks.

    Args:
        log_prior: log π, (H_prior, K, 1 or L). None means no prior.
        variance: σ², (H_prior, K).
        include_log_det: whether to add the determinant; see `component_scores`.
        equal_variance: known to be the same for all components of a head, which lets faster forms
            drop the query's norm.
        hard: maximum instead of sum over components.
        key_shift: b_r, (H_prior, K, E), where the backend takes keys before shifting.
        row_eps: added to the sum over keys (released language-modelling code: 1e-6), by the
            reference only.
        norm_weight: λ, (), of Gaussian scores; see `component_scores`. None means 0.
    """

    log_prior: Tensor | None
    variance: Tensor
    score: Score = "gaussian"
    include_log_det: bool = False
    equal_variance: bool = False
    hard: bool = False
    key_shift: Tensor | None = None
    row_eps: float = 0.0
    norm_weight: Tensor | None = None


def component_scores(query: Tensor, key: Tensor, arguments: MGKArguments) -> Tensor:
    """Return s_ijr, the log-score of component r of key j for query i; (B, H, K, N, L).

    Source: MGK, ICML 2022, Eq. (3), (6), (7):
        gaussian:  s_ijr = log π_jr − ‖query[i] − key[j, r]‖² / (2 σ²_r) [− (E/2) log σ²_r]
        dot:       s_ijr = log π_jr + query[i] · key[j, r] / σ²_r        [− (E/2) log σ²_r]
    Departs from the source: the determinant in brackets is an option (the paper drops it); with a
    weight λ the Gaussian score gains λ ‖key[j, r]‖² / (2 σ²_r), so that 1 gives the dot product, up
    to −‖query[i]‖² / (2 σ²_r), and 0 the paper's score.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E), H_key a divisor of H.
        arguments: prior, variances, and which of the forms.
    """
    heads, log_prior = query.shape[1], arguments.log_prior
    key, query = repeat_heads(key, heads), query[:, :, None]
    sigma2 = repeat_rows(arguments.variance, heads)[None, :, :, None, None]
    if arguments.score == "gaussian":
        result = -squared_distance(query, key) / (2.0 * sigma2)
        if arguments.norm_weight is not None:
            result = result + _kept_norms(key, arguments.norm_weight)[..., None, :] / sigma2
    else:
        result = query @ key.mT / sigma2
    if log_prior is not None:
        result = result + repeat_rows(log_prior, heads)[None, :, :, None, :]
    if arguments.include_log_det:
        result = result - (query.shape[-1] / 2.0) * sigma2.log()
    return result


def mgk_scores(query: Tensor, key: Tensor, arguments: MGKArguments) -> Tensor:
    """Return l_ij = logsumexp_r s_ijr, or max_r s_ijr when hard; (B, H, N, L)."""
    components = component_scores(query, key, arguments)
    return first_maximum(components.unbind(2)) if arguments.hard else components.logsumexp(2)


def mgk_reference(given: Heads, arguments: MGKArguments) -> Tensor:
    """Attend to keys that are Gaussian mixtures, by the equation.

    Source: MGK, ICML 2022, Eq. (7); hard E-step, section 2.3:
        attn_weights[i, j] ∝ Σ_r exp(s_ijr)      or      ∝ max_r exp(s_ijr)
    Departs from the source: sums of exponentials in log space.
    """
    query, key, value, masks, dropout = given.precise()
    scores = mgk_scores(query, key, replace(arguments, variance=arguments.variance.to(query.dtype)))
    return reference_output(scores, value, masks, dropout, arguments.row_eps)


def expand_to_dot(query: Tensor, key: Tensor, arguments: MGKArguments) -> tuple[Tensor, Tensor]:
    """Return vectors whose plain dot product is s_ijr up to a constant of the row.

    With τ = 1/σ² the query becomes [q, 1, ‖q‖²] and the key [τ k, β, −(τ − τ_ref)/2], where
    β = log π − (1 − λ) τ‖k‖²/2 [− (E/2) log σ²]. The last coordinate is dropped when σ² is the same
    for all components. In low precision each scalar coordinate is split into parts, and norms are
    those of the rounded vectors.

    Returns:
        query (B, H, N, E') and key (B, H_key or H, K, L, E').
    """
    dtype, low = compute_dtype(query), query.dtype
    log_prior, variance = arguments.log_prior, arguments.variance
    heads = max(key.shape[1], variance.shape[0])
    key = repeat_heads(key, heads).to(dtype)
    query = query.to(dtype)
    precision = repeat_rows(1.0 / variance.to(dtype), heads)[None, :, :, None, None]
    offset = torch.zeros((), dtype=dtype, device=key.device)
    if arguments.score == "gaussian":
        if arguments.norm_weight is not None:
            offset = _kept_norms(key, arguments.norm_weight)[..., None] * precision
        centre = key.detach().mean((2, 3), keepdim=True)
        key, query = key - centre, query - repeat_heads(centre[:, :, 0], query.shape[1])
    query, scaled = query.to(low), (key * precision).to(low)
    if log_prior is not None:
        offset = offset + repeat_rows(log_prior.to(dtype), heads)[None, ..., None]
    if arguments.include_log_det:
        offset = offset + (query.shape[-1] / 2.0) * precision.log()
    if arguments.score == "gaussian":
        norm = scaled.to(dtype).square().sum(-1, keepdim=True)
        offset = offset - norm / (2.0 * precision)
    offset = offset.expand(*scaled.shape[:-1], 1)
    key_parts = split_precision(offset, low)
    query_parts = [torch.ones_like(query[..., :1])] * len(key_parts)
    if arguments.score == "gaussian" and not arguments.equal_variance:
        difference = (precision - precision[:, :, :1].detach()) * -0.5
        squares = query.to(dtype).square().sum(-1, keepdim=True)
        for a, b in _product_parts(squares, difference, low):
            query_parts.append(a)
            key_parts.append(b.expand(*scaled.shape[:-1], 1))
    return torch.cat([query, *query_parts], -1), torch.cat([scaled, *key_parts], -1)


def _kept_norms(key: Tensor, weight: Tensor) -> Tensor:
    """Return λ‖k‖²/2 of keys that are not centred, (B, H, K, L)."""
    return weight.to(key.dtype) / 2.0 * key.square().sum(-1)


def _product_parts(a: Tensor, b: Tensor, low: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of low-precision tensors whose products sum to a·b."""
    a_parts, b_parts = split_precision(a, low), split_precision(b, low)
    count = len(a_parts)
    return [(a_parts[i], b_parts[j]) for i in range(count) for j in range(count) if i + j < count]


def mgk_sdpa(given: Heads, arguments: MGKArguments) -> Tensor:
    """Return the same as softmax attention over K·L keys, by PyTorch's fused attention.

    Exact for the soft E-step: Σ_r exp(s_ijr) v_j is a sum over the pairs (j, r), each with its own
    key and the value of its position.
    """
    query, key, value, masks, _ = given
    query, key = expand_to_dot(query, key, arguments)
    components = key.shape[2]
    flat_key = key.transpose(2, 3).flatten(2, 3)
    flat_value = repeat_heads(value, key.shape[1]).repeat_interleave(components, 2)
    return fused_attention(
        query, flat_key, flat_value, masks=masks, scale=1.0, keys_per_position=components
    )


def mgk_blockwise(given: Heads, arguments: MGKArguments) -> Tensor:
    """Return the same block by block: hard and soft, with dropout, O(N · block) memory."""
    query, key, value, masks, dropout = given.precise()
    # Hard inference compares components, so it too may drop what all components of a row share.
    query, key = expand_to_dot(query, key, arguments)

    def scores(_: Block, rows: Tensor, *cols: Tensor) -> Tensor:
        components = [grouped_scores(rows, component) for component in cols]
        return first_maximum(components) if arguments.hard else log_sum_exp(components)

    keys = key.unbind(2)
    axes: list[Axis] = ["col"] * len(keys)
    return blockwise_attention(scores, (query, *keys), ["row", *axes], value, masks, dropout)


def mgk_native(given: Heads, arguments: MGKArguments) -> Tensor:
    """Return the same as `mgk_blockwise`, with the rows of a block in C.

    Keys are unshifted, (B, H_key, L, E), where the arguments have shifts: then one product per pair
    serves all components. With c the mean key, k' = k − c and q' = q − c,

        s_ijr = τ_r q'·k'_jr + a_ir + β_jr,   a_ir = τ_r q'·b_r − (τ_r − τ_1) ‖q'‖²/2

    where the norms that λ puts back are those of keys that are not centred.
    """
    query, key, value, masks, dropout = given.precise()
    dtype, heads, shift = query.dtype, query.shape[1], arguments.key_shift
    gaussian = arguments.score == "gaussian"
    precision = repeat_rows(1.0 / arguments.variance.to(dtype), heads)  # (H, K)
    key = repeat_heads(key if shift is None else key[:, :, None], heads)  # (B, H, K or 1, L, E)
    shift = None if shift is None else repeat_rows(shift.to(dtype), heads)  # (H, K, E)
    kept = None
    if gaussian and arguments.norm_weight is not None:
        whole = key if shift is None else key + shift[:, :, None]
        kept = _kept_norms(whole, arguments.norm_weight)
    if gaussian:
        centre = key.detach().mean((2, 3), keepdim=True)
        key, query = key - centre, query - centre[:, :, 0]
    offset = query.new_zeros(1)
    if arguments.log_prior is not None:
        offset = repeat_rows(arguments.log_prior.to(dtype), heads)
    if arguments.include_log_det:
        offset = offset + (query.shape[-1] / 2.0) * precision.log()[:, :, None]
    row: Tensor | None = None
    if gaussian:
        norm = key.square().sum(-1)  # (B, H, K or 1, L)
        if shift is not None:
            cross = 2.0 * (shift @ key[:, :, 0].mT)
            norm = norm + cross + shift.square().sum(-1)[:, :, None]
        if kept is not None:
            norm = norm - 2.0 * kept
        offset = offset - norm * precision[:, :, None] / 2.0
        if not arguments.equal_variance:
            difference = (precision - precision[:, :1].detach()) * -0.5
            row = query.square().sum(-1)[..., None] * difference[:, None]
    if shift is not None:
        moved = query @ (shift * precision[..., None]).mT
        row = moved if row is None else row + moved
    components, length = precision.shape[1], key.shape[3]
    col = offset.expand(query.shape[0], heads, components, length)
    coef: Tensor | None = None
    if shift is None:
        key = key * precision[:, :, None, None]
    elif arguments.equal_variance:
        key = key * precision[:, :1, None, None]
    else:
        coef = precision
    return mixture_attention(
        query,
        key,
        value,
        masks,
        dropout,
        coef=coef,
        row=row,
        col=col,
        hard=arguments.hard,
    )


def key_offsets(key: Tensor, arguments: MGKArguments) -> Tensor:
    """Return β_jr, (B, H_key, K, L), in at least float32.

    Args:
        key: every component's keys, (B, H_key, K, L, E), as they are stored (rounded).
        arguments: prior of these keys, (H_key, K, 1 or L), and variances, (H_key, K).
    """
    dtype = compute_dtype(key)
    precision = 1.0 / arguments.variance.to(dtype)[:, :, None]
    beta = torch.zeros(key.shape[:-1], dtype=dtype, device=key.device)
    if arguments.score == "gaussian":
        norms = key.to(dtype).square().sum(-1) * precision / 2.0
        weight = arguments.norm_weight
        beta = beta - (norms if weight is None else (1.0 - weight.to(dtype)) * norms)
    if arguments.log_prior is not None:
        beta = beta + arguments.log_prior.to(dtype)
    if arguments.include_log_det:
        beta = beta + (key.shape[-1] / 2.0) * precision.log()
    return beta


def mixture_scores(
    query: Tensor, key: Tensor, offset: Tensor, arguments: MGKArguments, subtract_query_norm: bool
) -> Tensor:
    """Return logsumexp_r s_ijr, or max_r s_ijr when hard; (B, H, N, L).

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E) where the arguments have shifts, else (B, H_key, K, L, E).
        offset: β_jr, (B, H_prior, K, L).
        arguments: variances and shifts; the prior is in `offset`.
        subtract_query_norm: whether −(τ_r / 2) ‖query‖² counts.
    """
    heads, shift = query.shape[1], arguments.key_shift
    precision = repeat_rows(1.0 / arguments.variance.to(query.dtype), heads)[..., None, None]
    offset = repeat_heads(offset, heads)[:, :, :, None]  # (B, H, K, 1, L)
    # What does not depend on the key, (B, H, N, K), is small beside the scores.
    alone: Tensor | None = None
    if shift is not None:
        alone = query @ repeat_rows(shift.to(query.dtype), heads).mT
    if subtract_query_norm:
        norms = query.square().sum(-1, keepdim=True) / 2.0
        alone = norms.new_zeros(precision.shape[1]) - norms if alone is None else alone - norms
    if alone is not None:
        offset = offset + alone.transpose(2, 3)[..., None] * precision
    shared = None if shift is None else grouped_scores(query, key)
    total: Tensor | None = None
    for r in range(precision.shape[1]):
        product = grouped_scores(query, key[:, :, r]) if shared is None else shared
        score = torch.addcmul(offset[:, :, r], product, precision[:, r])
        if total is None:
            total = score
        else:
            join = torch.maximum if arguments.hard else torch.logaddexp
            total = join(total, score)
    assert total is not None
    return total


def mgk_triton(given: Heads, arguments: MGKArguments) -> Tensor:
    """Return attention to mixtures of Gaussians by the fused kernels, (B, H, N, E_v).

    Keys are unshifted, (B, H_key, L, E), where the arguments have shifts: then one product per pair
    serves all components.
    """
    from lit_probattn.kernels.dense.attention import mgk_attention

    query, key, value, *_ = given
    owners = max(key.shape[1], arguments.variance.shape[0])
    precision = repeat_rows(1.0 / arguments.variance.to(compute_dtype(query)), owners)
    log_prior = arguments.log_prior
    offset = None if log_prior is None else repeat_rows(log_prior, owners)
    if arguments.include_log_det:
        log_det = (query.shape[-1] / 2.0) * precision.log()[..., None]
        offset = log_det if offset is None else offset + log_det
    terms = {
        "precision": precision,
        "offset": offset,
        "gaussian": arguments.score == "gaussian",
        "equal_precision": arguments.equal_variance,
        "hard": arguments.hard,
        **pair_arguments(given),
    }
    key, shift = repeat_heads(key, owners), arguments.key_shift
    shift = None if shift is None else repeat_rows(shift, owners)
    return mgk_attention(query, key, value, shift=shift, **terms)
