"""Attention whose keys are mixtures of Gaussians: the equation and its normal form.

The parameters are in `core.py`. Shifted keys need one product per pair if the normal form allows
it. With τ = 1/σ²:

    s_ijr = τ_r query[i] · key[j, r] − (τ_r / 2) ‖query[i]‖² + β_jr
    β_jr = log π_jr − (1 − λ) (τ_r / 2) ‖key[j, r]‖² [− (E / 2) log σ²_r]

where λ = 0, or the weight with which key norms are added back (`norm_weight`). For shifted keys,
query · (key + b_r) = query · key + query · b_r, for any number of components.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.engines.kernels import lower_points
from lit_probattn.attention.numerics import (
    component_keys,
    compute_dtype,
    first_maximum,
    repeat_heads,
    repeat_rows,
    squared_distance,
)
from lit_probattn.attention.variant import Scores, Variant

Score = Literal["gaussian", "dot"]


@dataclass(frozen=True)
class MGK(Variant):
    """Attention to keys that are mixtures of K Gaussians.

    Args:
        log_prior: log π, (H_prior, K, 1 or L). None means no prior.
        variance: σ², (H_prior, K).
        include_log_det: whether to add the determinant; see `component_scores`.
        equal_variance: whether σ² is known to be the same for all components of a head, so that
            engines can drop the query's norm.
        hard: maximum instead of sum over components.
        key_shift: b_r, (H_prior, K, E), for key[j, r] = key[j] + b_r; (H_prior, K, L, E) if it
            depends on the position. None means K keys per position.
        row_eps: added to the sum over keys (released language-modelling code: 1e-6), by the
            reference only.
        norm_weight: λ, (), of Gaussian scores; see `component_scores`. None means 0.
    """

    name = "mgk"
    kernels = ("dense/mgk", "dense/smgk")

    log_prior: Tensor | None
    variance: Tensor
    score: Score = "gaussian"
    include_log_det: bool = False
    equal_variance: bool = False
    hard: bool = False
    key_shift: Tensor | None = None
    row_eps: float = 0.0
    norm_weight: Tensor | None = None

    @property
    def shares_product(self) -> bool:
        """Whether the components' scores differ only by a term per query and a term per key."""
        return self.key_shift is not None and self.key_shift.dim() == 3

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The row of `AUTO`; below head size 16, one product for all components was not faster."""
        shift = self.key_shift
        wide = shift is not None and shift.shape[-1] >= 16
        return "shifted" if self.shares_product and wide else "mixture"

    @property
    def kernel(self) -> str:
        """The family of kernels for these options."""
        return self.kernels[1 if self.shares_product else 0]

    @property
    def score_maps(self) -> int:  # type: ignore[override]
        """K."""
        return self.variance.shape[1]

    def components(self, key: Tensor) -> Tensor:
        """Return the keys of all components, (B, H_key, K, L, E), at least float32 if shifted."""
        return component_keys(key, self.variance.shape[1], self.key_shift)

    def scores(self, call: HeadCall) -> Tensor:
        """Return l_ij = logsumexp_r s_ijr, or max_r s_ijr when hard; (B, H, N, L).

        Source: MGK, ICML 2022, Eq. (7); hard E-step, section 2.3:
            attn_weights[i, j] ∝ Σ_r exp(s_ijr)      or      ∝ max_r exp(s_ijr)
        Departs from the source: sums of exponentials in log space.
        """
        exact = replace(self, variance=self.variance.to(call.query.dtype))
        return mgk_scores(call.query, self.components(call.key), exact)

    def needs(self) -> dict[str, str]:
        """Return the features that a hard E-step, `row_eps` or rotated shifts require."""
        turned = self.key_shift is not None and self.key_shift.dim() == 4
        found = {
            "maximum": ("e_step=hard", self.hard),
            "row_eps": (f"row_eps={self.row_eps:g}", bool(self.row_eps)),
            "positions": ("rotary_shift=before", turned),
        }
        return {name: option for name, (option, needed) in found.items() if needed}

    def sizes(self, call: HeadCall) -> dict[str, int]:
        """K."""
        return {"components": self.variance.shape[1]}

    def lower(self, call: HeadCall, *, own_keys: bool = False) -> Scores:
        """Return the scores in normal form.

        If shifts allow it, all components share one product per pair. With c the mean key,
        k' = k − c and q' = q − c,

            s_ijr = τ_r q'·k'_jr + a_ir + β_jr,   a_ir = τ_r q'·b_r − (τ_r − τ_1) ‖q'‖²/2

        Keys of a part are neither centred (c = 0) nor multiplied by τ_r.
        """
        query, low = call.query, call.query.dtype
        dtype, heads = compute_dtype(query), query.shape[1]
        mixture, is_part = self._at_keys(call), call.first_key is not None
        one_product = self.shares_product and not own_keys
        shift = self.key_shift if one_product else None
        key = call.key[:, :, None] if one_product else mixture.components(call.key)
        owners = max(key.shape[1], self.variance.shape[0])
        precision = repeat_rows(self.variance.to(dtype).reciprocal(), owners)  # (H', K)
        shift = None if shift is None else repeat_rows(shift.to(dtype), owners)  # (H', K, E)
        reduce: Literal["soft", "hard"] = "hard" if self.hard else "soft"
        if call.fused and not is_part:
            key = repeat_heads(key, owners).to(low)
            return replace(self._lower_fused(query, key, precision, shift), reduce=reduce)
        key, query = repeat_heads(key, owners).to(dtype), query.to(dtype)
        kept = None
        if self.score == "gaussian" and self.norm_weight is not None:
            whole = key[:, :, :, call.num_terms :]
            whole = whole if shift is None else whole + shift[:, :, None]
            kept = _kept_norms(whole, self.norm_weight)
        if self.score == "gaussian" and not is_part and key.shape[3]:  # the mean of no keys is NaN
            # One dimension at a time: twenty times as fast for heads of adjacent positions.
            centre = key.detach().mean(3, keepdim=True).mean(2, keepdim=True)
            key, query = key - centre, query - repeat_heads(centre[:, :, 0], heads)
        query, coef = query.to(low), None
        if not is_part and (shift is None or self.equal_variance):  # the key includes the factor
            factor = precision[:, : key.shape[2], None, None]
            # In full, because broadcasting over E would multiply E numbers at a time.
            factor = factor.expand(-1, -1, 1, key.shape[4]).clone()
            scaled = (key * factor).to(low)
            key = scaled.to(dtype) / factor if low != dtype else key
        else:
            scaled, coef = key.to(low), precision
        new = key[:, :, :, call.num_terms :] if is_part else key
        row, col = mixture.terms(query, new, precision, shift, kept, is_part=is_part)
        if is_part and self.equal_variance:  # the query includes the factor
            query, coef = query * repeat_rows(precision, heads)[:, :1, None], None
        return Scores(query.to(low), scaled, coef=coef, row=row, col=col, reduce=reduce)

    def _lower_fused(
        self, query: Tensor, key: Tensor, precision: Tensor, shift: Tensor | None
    ) -> Scores:
        """Compute `lower` in few kernel launches; τ_r is always a coefficient."""
        offset = self.offset(precision, query.shape[-1])
        if self.score == "dot" and shift is None:
            sizes = key.shape[0], *precision.shape, key.shape[3]
            col = None if offset is None else offset.expand(sizes)
            return Scores(query, key, coef=precision, col=col)
        found = lower_points(
            *(query, key, precision),
            offset=offset,
            shift=shift,
            gaussian=self.score == "gaussian",
            equal=self.equal_variance,
        )
        if self.score == "dot" or self.norm_weight is None or found.col is None:
            return found
        key = key.to(precision.dtype)
        key = key if shift is None else key + shift[:, :, None]
        kept = _kept_norms(key, self.norm_weight) * precision[:, :, None]
        return replace(found, col=found.col + kept)

    def _at_keys(self, call: HeadCall) -> MGK:
        """Return the variant with shifts of a part's keys and priors of its keys without terms."""
        prior, shift, first = self.log_prior, self.key_shift, call.first_key
        if first is None:
            return self
        stop = first + call.num_keys
        if prior is not None and prior.shape[-1] > 1:
            prior = prior[..., first + call.num_terms : stop]
        if shift is not None and shift.dim() == 4:
            shift = shift[:, :, first:stop]
        return replace(self, log_prior=prior, key_shift=shift)

    def offset(self, precision: Tensor, head_dim: int) -> Tensor | None:
        """Return β without the norms, (H', K, 1 or L), or None if it is 0."""
        found: Tensor | None = None
        if self.log_prior is not None:
            found = repeat_rows(self.log_prior.to(precision.dtype), precision.shape[0])
        if self.include_log_det:
            log_det = (head_dim / 2.0) * precision.log()[:, :, None]
            found = log_det if found is None else found + log_det
        return found

    def terms(
        self,
        query: Tensor,
        key: Tensor,
        precision: Tensor,
        shift: Tensor | None,
        kept: Tensor | None = None,
        *,
        is_part: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return a_ir, (B, H, N, K), and β_jr, (B, H', K, L); None if all are 0 or equal.

        For Gaussian scores they are the terms of ‖q − k − b_r‖² other than the product q·k,

            ‖q‖² − 2 q·b_r    and    ‖k‖² + 2 k·b_r + ‖b_r‖²,   each times −τ_r / 2

        A softmax cancels what all components share, so ‖q‖² is multiplied by τ_r − τ_1; by τ_r if
        `is_part` with `row_eps`, which adds to the sum of weights.

        Args:
            query: (B, H, N, E).
            key: (B, H', K or 1, L, E).
            precision: τ, (H', K).
            shift: b_r, (H', K, E), if keys are not shifted yet.
            kept: λ‖k‖²/2 of uncentred keys, (B, H', K, L).
            is_part: whether the keys are a part of the call's keys, and therefore few.
        """
        heads, row, col = query.shape[1], None, None
        tau, is_gaussian = repeat_rows(precision, heads), self.score == "gaussian"
        whole_norm = is_part and self.row_eps > 0.0
        varies = not self.equal_variance and tau.shape[1] > 1
        if is_gaussian and (varies or whole_norm):
            weight = tau if whole_norm else tau - tau[:, :1]
            norm = query.to(precision.dtype).square().sum(-1, keepdim=True)
            row = norm * (weight * -0.5)[:, None]
        if shift is not None:
            moved = query.to(precision.dtype) @ (repeat_rows(shift, heads) * tau[..., None]).mT
            row = moved if row is None else row + moved
        col = self.offset(precision, key.shape[-1])
        if is_gaussian:
            if shift is not None and is_part:  # few keys: cheaper than the expansion
                key, shift = key + shift[:, :, None], None
            norm = key.square().sum(-1)
            if shift is not None:
                norm = norm + 2.0 * (shift @ key[:, :, 0].mT) + shift.square().sum(-1)[:, :, None]
            if kept is not None:
                norm = norm - 2.0 * kept
            norm = norm * (precision[:, :, None] / -2.0)
            col = norm if col is None else col + norm
        if col is not None:
            col = col.expand(key.shape[0], *precision.shape, key.shape[3])
        return row, col


def component_scores(query: Tensor, key: Tensor, arguments: MGK) -> Tensor:
    """Return s_ijr, the log-score of component r of key j for query i; (B, H, K, N, L).

    Source: MGK, ICML 2022, Eq. (3), (6), (7):
        gaussian:  s_ijr = log π_jr − ‖query[i] − key[j, r]‖² / (2 σ²_r) [− (E/2) log σ²_r]
        dot:       s_ijr = log π_jr + query[i] · key[j, r] / σ²_r        [− (E/2) log σ²_r]
    Departs from the source: the determinant in brackets is an option (the paper drops it); a weight
    λ adds λ ‖key[j, r]‖² / (2 σ²_r) to the Gaussian score, so that 1 gives the dot product, up to
    −‖query[i]‖² / (2 σ²_r), and 0 the paper's score.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E), H_key a divisor of H.
        arguments: prior, variances, and options of the score.
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


def mgk_scores(query: Tensor, key: Tensor, arguments: MGK) -> Tensor:
    """Return l_ij = logsumexp_r s_ijr, or max_r s_ijr when hard; (B, H, N, L)."""
    components = component_scores(query, key, arguments)
    return first_maximum(components.unbind(2)) if arguments.hard else components.logsumexp(2)


def _kept_norms(key: Tensor, weight: Tensor) -> Tensor:
    """Return λ‖k‖²/2 of uncentred keys, (B, H, K, L)."""
    return weight.to(key.dtype) / 2.0 * key.square().sum(-1)
