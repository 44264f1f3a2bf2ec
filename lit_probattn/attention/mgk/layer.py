"""The MGK and sMGK layer. Over 300 lines: one class, a third of it documents its options.

Key components or shifted keys, priors, variances, settings A, B, C.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_probattn.attention.backends import Backend, Call, kernel_refusal
from lit_probattn.attention.functional import repeat_heads
from lit_probattn.attention.layer import Attention, BackendFunction, Cost
from lit_probattn.attention.mgk.functions import (
    Score,
    key_offsets,
    mgk_blockwise,
    mgk_reference,
    mgk_scores,
    mgk_sdpa,
    mgk_triton,
    mixture_scores,
)
from lit_probattn.attention.mgk.m_step import EMCodeParity, MStepPriors
from lit_probattn.attention.mgk.priors import (
    PRIOR_FLOOR,
    EStep,
    MixturePrior,
    MixtureVariance,
    PriorParam,
    PriorShare,
    VariancePreset,
    variance_multipliers,
)
from lit_probattn.attention.rotary import RotaryShift


class MGKAttention(MStepPriors, Attention):
    """Attention with a mixture of K Gaussians per key (Transformer-MGK, -sMGK).

    Source: MGK, ICML 2022, Eq. (7), Table 5 (settings), Table 10 (shared keys).
        attn_weights[i, j] ∝ Σ_r π_r exp(−‖query[i] − key[j, r]‖² / (2 σ²_r)),   σ²_r = c_r √E
    Departs from the source: log-space sums; variances learnable by log σ² within a factor 8 of √E;
    the M-step runs once per optimiser step over all its micro-batches and ranks, over real pairs
    only; in grouped attention the mixture may belong to the key/value head or to the query head.

    Args:
        embed_dim: C.
        head_dim: E.
        num_heads: H. The papers halve it and keep `head_dim`.
        num_kv_heads: key/value heads; 1 is multi-query MGK (one set of K keys for all heads).
        key_embed_dim: width of keys and values in cross-attention.
        value_head_dim: size of a value head.
        bias: biases of the projections.
        dropout: attention dropout in training, one decision per (i, j) for all components.
        backend: implementation.
        num_components: K.
        shifted_keys: False (MGK): K key projections. True (sMGK): one projection and K learned
            shifts, key[j, r] = key[j] + b_r.
        e_step: `learned` (setting A, prior by gradient), `soft` (B, prior by the M-step),
            `hard` (C, maximum over components, no prior).
        score: `gaussian`, or `dot` ("Softmax MGK").
        variance: multipliers c_r or a preset: `equal` (1, …), `paper_main` (1, 3), `code_lm`
            (1, 1/3).
        learn_variance: make σ² a parameter per head and component.
        prior_share: one prior per layer, per head, or per head and key position.
        prior_param: setting A keeps clamped values (the paper) or logits.
        max_positions: longest key sequence, for `head_position`.
        mixture_heads: in grouped attention, whether shifts, priors and variances belong to the
            key/value head (the paper's "shared") or to each query head.
        shift_init_std: standard deviation of the shifts at the start (paper 1, code 0.5).
        shift_first_zero: start the first shift at zero (the released code).
        include_log_det: add −(E/2) log σ²_r, the exact Gaussian density.
        em_weighting: pairs count equally in the M-step (the paper), or by their attention weight.
        prior_momentum: weight of the old prior in an M-step.
        prior_floor: smallest π in log space.
        rotary_dim: entries of a head that rotary positions turn; 0 for none.
        rotary_base: base of the rotary angles.
        rotary_shift: shifted keys with rotary positions: shift `before` rotation (relative
            positions, K products per pair), `after` it (one product where a kernel uses that, but
            absolute positions enter), or in `unrotated` dimensions only (both; recommended where
            `rotary_dim` < E).
        row_eps: added to the sum of exponentials of every row (released language-modelling code:
            1e-6); `backend="reference"` only.
        em_code_parity: setting B as the released code updates it, at every forward pass in
            training, `lra` or `lm`; see `code_parity_sums`.

    Raises:
        ValueError: fewer than one component, a variance that is not positive, an unknown name.
    """

    variant: ClassVar[str] = "mgk"
    steps_over_cache: ClassVar[bool] = True
    backends: ClassVar[dict[str, BackendFunction]] = {
        "reference": mgk_reference,
        "sdpa": mgk_sdpa,
        "blockwise": mgk_blockwise,
        "triton": mgk_triton,
    }

    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        key_embed_dim: int | None = None,
        value_head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        backend: Backend = "auto",
        num_components: int = 2,
        shifted_keys: bool = False,
        e_step: EStep = "learned",
        score: Score = "gaussian",
        variance: VariancePreset | list[float] = "equal",
        learn_variance: bool = False,
        prior_share: PriorShare = "head",
        prior_param: PriorParam = "clamp",
        max_positions: int | None = None,
        mixture_heads: Literal["kv", "query"] = "kv",
        shift_init_std: float = 1.0,
        shift_first_zero: bool = False,
        include_log_det: bool = False,
        em_weighting: Literal["uniform", "posterior"] = "uniform",
        prior_momentum: float = 0.0,
        prior_floor: float = PRIOR_FLOOR,
        rotary_dim: int = 0,
        rotary_base: float = 10000.0,
        rotary_shift: RotaryShift = "before",
        row_eps: float = 0.0,
        em_code_parity: EMCodeParity = "none",
    ) -> None:
        if num_components < 1:
            raise ValueError(f"num_components must be at least 1, received {num_components}")
        self.num_components, self.shifted_keys = num_components, shifted_keys
        super().__init__(
            embed_dim,
            head_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            key_embed_dim=key_embed_dim,
            value_head_dim=value_head_dim,
            bias=bias,
            dropout=dropout,
            backend=backend,
            rotary_dim=rotary_dim,
            rotary_base=rotary_base,
        )
        _check_choice("e_step", e_step, ("learned", "soft", "hard"))
        _check_choice("score", score, ("gaussian", "dot"))
        _check_choice("mixture_heads", mixture_heads, ("kv", "query"))
        _check_choice("em_weighting", em_weighting, ("uniform", "posterior"))
        _check_choice("rotary_shift", rotary_shift, ("before", "after", "unrotated"))
        _check_choice("em_code_parity", em_code_parity, ("none", "lra", "lm"))
        if not 0.0 <= row_eps < 1.0:
            raise ValueError(f"row_eps must be in [0, 1), received {row_eps}")
        self.rotary_shift, self.row_eps, self.em_code_parity = rotary_shift, row_eps, em_code_parity
        self.e_step, self.score, self.score_maps = e_step, score, num_components
        self.include_log_det, self.em_weighting = include_log_det, em_weighting
        self.mixture_heads = mixture_heads
        owners = self.num_kv_heads if mixture_heads == "kv" else num_heads
        multipliers = variance_multipliers(variance, num_components)
        self.variance = MixtureVariance(multipliers, owners, head_dim, learn_variance)
        self.prior: MixturePrior | None = None
        if e_step != "hard":
            self.prior = MixturePrior(
                num_components,
                owners,
                share=prior_share,
                param=prior_param,
                by_m_step=e_step == "soft",
                max_positions=max_positions,
                momentum=prior_momentum,
                floor=prior_floor,
            )
        self.key_shift: nn.Parameter | None = None
        if shifted_keys:
            size = head_dim
            if rotary_dim and rotary_shift == "unrotated":
                size = head_dim - rotary_dim
                if size == 0:
                    raise ValueError(
                        f"rotary_shift=unrotated: rotary_dim={rotary_dim} leaves no dimension of "
                        f"head_dim={head_dim} for the shifts; choose a smaller rotary_dim"
                    )
            shift = torch.randn(owners, num_components, size) * shift_init_std
            if shift_first_zero:
                shift[:, 0] = 0.0
            self.key_shift = nn.Parameter(shift)
        plain = (num_components, e_step, prior_share, score, self.num_kv_heads)
        if em_code_parity != "none" and plain != (
            2,
            "soft",
            "head_position",
            "gaussian",
            num_heads,
        ):
            raise ValueError(
                "em_code_parity needs num_components=2, e_step=soft, prior_share=head_position, "
                f"score=gaussian and num_kv_heads={num_heads}, received {plain}"
            )
        collapses = shifted_keys and score == "dot" and self.variance.is_equal
        if collapses and prior_share != "head_position":
            warnings.warn(
                "shifted keys with dot-product scores, equal variances and priors shared by "
                "positions are ordinary softmax attention: the shift cancels in every row",
                stacklevel=2,
            )

    @property
    def key_width(self) -> int:
        """Output width of `key_proj`: all components at once unless they are shifts."""
        return self.num_kv_heads * self.head_dim * (1 if self.shifted_keys else self.num_components)

    def split_keys(self, key: Tensor) -> Tensor:
        """(B, L, width) -> (B, H_kv, K, L, E), or (B, H_kv, L, E) before shifting."""
        if self.shifted_keys:
            return super().split_keys(key)
        sizes = (self.num_kv_heads, self.num_components, self.head_dim)
        return key.unflatten(-1, sizes).permute(0, 2, 3, 1, 4)

    def expand_keys(self, key: Tensor, first_position: int = 0) -> Tensor:
        """Return every component's keys, (B, H_key, K, L, E)."""
        shift = self._shifts()
        if shift is None:
            return key
        table = shift[:, :, None].to(key.dtype)
        if self.rotary is not None and self.rotary_shift == "before":
            table = self.rotary(table.expand(-1, -1, key.shape[-2], -1), first_position)
        return repeat_heads(key, max(shift.shape[0], key.shape[1]))[:, :, None] + table[None]

    @property
    def shares_product(self) -> bool:
        """Whether the components' scores differ by a term per query and one per key only."""
        turned = self.rotary is not None and self.rotary_shift == "before"
        return self.shifted_keys and not turned

    def keys_for(self, backend: str, key: Tensor) -> Tensor:
        """The kernel of shifted keys takes them before shifting."""
        return key if backend == "triton" and self.shares_product else self.expand_keys(key)

    def _shifts(self) -> Tensor | None:
        """Return b_r over whole heads, (H_prior, K, E); zero where they are kept unrotated."""
        if self.key_shift is None or self.key_shift.shape[-1] == self.head_dim:
            return self.key_shift
        return nn.functional.pad(self.key_shift, (self.head_dim - self.key_shift.shape[-1], 0))

    # ------------------------------------------------------------------ decoding
    def key_offset(self, key: Tensor, first_position: int) -> Tensor | None:
        """Return β_jr of stored keys, (B, H_prior, K, L); see `mgk_decode`."""
        log_prior = None if self.prior is None else self.prior(first_position + key.shape[-2])
        if log_prior is not None and log_prior.shape[-1] > 1:
            log_prior = log_prior[..., first_position:]
        variance = self.variance()
        return key_offsets(
            repeat_heads(self.expand_keys(key, first_position), variance.shape[0]),
            log_prior=log_prior,
            variance=variance,
            gaussian=self.score == "gaussian",
            include_log_det=self.include_log_det,
        )

    def cached_scores(
        self, query: Tensor, key: Tensor, offset: Tensor | None, cols: range, num_keys: int
    ) -> Tensor:
        """Return the scores of a part of the cache; shifted keys cost one product per pair."""
        if offset is None:
            offset = self.key_offset(key, cols.start)
        assert offset is not None
        shift = self._shifts()
        if self.rotary is not None and self.rotary_shift == "before" and shift is not None:
            key, shift = self.expand_keys(key, cols.start), None
        varies = not self.variance.is_equal or self.row_eps > 0.0
        return mixture_scores(
            query,
            key,
            shift=shift,
            offset=offset,
            variance=self.variance(),
            subtract_query_norm=self.score == "gaussian" and varies,
            hard=self.e_step == "hard",
        )

    def run(
        self,
        backend: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        arguments: dict[str, Any],
        **call: Any,
    ) -> Tensor:
        """Compute the heads' outputs; then, as released code does, replace the priors."""
        if self.row_eps:
            arguments = {**arguments, "row_eps": self.row_eps}
        if backend == "triton" and self.shares_product:
            arguments = {**arguments, "key_shift": self._shifts()}
        out = super().run(backend, query, key, value, arguments=arguments, **call)
        if self.em_code_parity != "none" and self.training and self.prior is not None:
            self.prior.apply_statistics(self.prior.statistics())
        return out

    def score_arguments(self, num_keys: int) -> dict[str, Any]:
        """Return priors, variances and switches for the backend functions."""
        return {
            "log_prior": None if self.prior is None else self.prior(num_keys),
            "variance": self.variance(),
            "equal_variance": self.variance.is_equal,
            "score": self.score,
            "include_log_det": self.include_log_det,
            "hard": self.e_step == "hard",
        }

    def reference_scores(self, query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
        """Return `mgk_scores`."""
        return mgk_scores(query, key, **arguments)

    def unsupported(self, backend: str, call: Call) -> str | None:
        """A maximum over components is no softmax over expanded keys."""
        if backend == "sdpa" and self.e_step == "hard":
            return "cannot take the maximum over components (e_step=hard)"
        if backend != "reference" and self.row_eps:
            return "cannot add row_eps to the sums of rows"
        if backend == "triton":
            family = "smgk" if self.shares_product else "mgk"
            sizes = (self.head_dim, self.value_head_dim)
            return kernel_refusal(family, call, *sizes, bias_gradient=True)
        return super().unsupported(backend, call)

    # ------------------------------------------------------------------ cost
    def cost(self, seq_len: int) -> Cost:
        """Return the cost by MGK appendix B, general K, with the corrected constant.

        With the H heads of this layer, which stand for KH heads of the baseline:
            MGK   N²H(2(K+1)E−1) + NHE(2(K+2)C + 2KHE − (2K+3))
            sMGK  N²H(2(K+1)E−1) + NHE(6C + 2KHE − 4)
        (output width KHE as in the baseline, H_kv = H).
        """
        n, c, e, h, k = seq_len, self.embed_dim, self.head_dim, self.num_heads, self.num_components
        e_v, kv, width = self.value_head_dim, self.num_kv_heads, self.key_embed_dim
        if self.shifted_keys:
            linear = n * h * e * (6 * c + 2 * h * k * e - 4)
        else:
            linear = n * h * e * (2 * (k + 2) * c + 2 * h * k * e - (2 * k + 3))
        projections = n * (c * h * e + width * (self.key_width + kv * e_v) + h * e_v * c)
        return Cost(
            paper_flops=n * n * h * (2 * (k + 1) * e - 1) + linear,
            macs=projections + n * n * h * (k * e + e_v),
            num_parameters=sum(p.numel() for p in self.parameters()),
        )

    def extra_repr(self) -> str:
        """Sizes and the mixture, for printing."""
        return (
            f"{super().extra_repr()}, num_components={self.num_components}, "
            f"shifted_keys={self.shifted_keys}, e_step={self.e_step!r}, score={self.score!r}"
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, received {value!r}")
