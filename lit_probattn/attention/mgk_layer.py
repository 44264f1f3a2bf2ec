"""The MGK and sMGK layer: key components or shifted keys, priors, variances, settings A, B, C."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_probattn.attention.backends import Backend, Call
from lit_probattn.attention.base import Attention, BackendFunction, Cost
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.mgk import (
    Score,
    mgk_blockwise,
    mgk_reference,
    mgk_scores,
    mgk_sdpa,
    responsibility_sums,
)
from lit_probattn.attention.mixture import (
    EStep,
    MixturePrior,
    MixtureVariance,
    PriorParam,
    PriorShare,
    VariancePreset,
    variance_multipliers,
)
from lit_probattn.attention.steps import autocast_off


class MGKAttention(Attention):
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

    Raises:
        ValueError: fewer than one component, a variance that is not positive, an unknown name.
    """

    variant: ClassVar[str] = "mgk"
    backends: ClassVar[dict[str, BackendFunction]] = {
        "reference": mgk_reference,
        "sdpa": mgk_sdpa,
        "blockwise": mgk_blockwise,
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
        )
        _check_choice("e_step", e_step, ("learned", "soft", "hard"))
        _check_choice("score", score, ("gaussian", "dot"))
        _check_choice("mixture_heads", mixture_heads, ("kv", "query"))
        _check_choice("em_weighting", em_weighting, ("uniform", "posterior"))
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
            )
        self.key_shift: nn.Parameter | None = None
        if shifted_keys:
            shift = torch.randn(owners, num_components, head_dim) * shift_init_std
            if shift_first_zero:
                shift[:, 0] = 0.0
            self.key_shift = nn.Parameter(shift)
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

    def expand_keys(self, key: Tensor) -> Tensor:
        """Return every component's keys, (B, H_key, K, L, E)."""
        if self.key_shift is None:
            return key
        heads = self.key_shift.shape[0]
        repeated = key.repeat_interleave(heads // key.shape[1], 1) if heads != key.shape[1] else key
        return repeated[:, :, None] + self.key_shift[None, :, :, None].to(key.dtype)

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
        return super().unsupported(backend, call)

    # ------------------------------------------------------------------ setting B
    def observe(self, query: Tensor, key: Tensor, masks: Masks, query_mask: Tensor | None) -> None:
        """Add this pass's responsibilities; a recomputation inside backward adds nothing."""
        if self.prior is None or not self.prior.by_m_step or in_backward():
            return
        with autocast_off(query):
            numerator, denominator = responsibility_sums(
                query.detach(),
                key.detach(),
                masks=masks,
                query_mask=query_mask,
                log_prior=self.prior(key.shape[3]),
                variance=self.variance(),
                score=self.score,
                include_log_det=self.include_log_det,
                weighting=self.em_weighting,
            )
        self.prior.accumulate(numerator, denominator)

    def prior_statistics(self) -> Tensor | None:
        """Return numerator and denominator since the last update, (2, *prior shape), or None."""
        if self.prior is None or not self.prior.by_m_step:
            return None
        return self.prior.statistics()

    def apply_prior_update(self, statistics: Tensor) -> None:
        """Replace the priors by an M-step over `statistics` (summed over ranks by the caller)."""
        if self.prior is None or not self.prior.by_m_step:
            raise ValueError(f"e_step={self.e_step} has no M-step; only e_step=soft updates priors")
        self.prior.apply_statistics(statistics)

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


def in_backward() -> bool:
    """Whether this runs inside a backward pass, as recomputation of checkpoints does."""
    return torch._C._current_graph_task_id() != -1


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, received {value!r}")
