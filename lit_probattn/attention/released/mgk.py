"""MGK as in the released codes, for comparison with their results.

`configs/attention/as_released/` names these classes; no module imports them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.mgk.core import MGKCore, MixturePrior
from lit_probattn.attention.mgk.functions import MGK, component_scores
from lit_probattn.attention.mgk.layer import MGKArguments, MGKAttention
from lit_probattn.attention.mgk.options import PRIOR_FLOOR, MGKOptions
from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.base.arguments import OnlyWith, Range, Rate, by_name
from lit_probattn.base.torch_internals import in_backward

EMCodeParity = Literal["none", "lra", "lm"]
ValueBias = Literal["always", "cross"]

_DENSITY_EPS = 1e-6

_COUNT_EPS = 1e-6


# Largest π of the released translation code.
_MOST = 2.0


class MagnitudePrior(MixturePrior):
    """Priors of the released translation code: log min(max(|p|, floor), 2), for setting A.

    They are not a distribution: neither normalised nor at most 1. The gradient is the gradient of
    log |p| between the bounds, and zero outside.
    """

    def forward(self, num_keys: int) -> Tensor:
        """Return log π, (num_heads, K, 1), or (num_heads, K, L) with priors per position."""
        return self._per_key(num_keys).abs().clamp(self.floor, _MOST).log()


@torch.no_grad()
def code_parity_sums(
    query: Tensor,
    key: Tensor,
    log_prior: Tensor,
    variance: Tensor,
    *,
    masks: Masks,
    query_mask: Tensor | None,
    code: EMCodeParity,
) -> tuple[Tensor, Tensor]:
    """Return numerator and denominator of the released code's priors, both (H, 2, L) float64.

    Source: released code of MGK, ICML 2022, two components, priors per head and key position:
        γ_ij = π_j1 e^{g_ij1} / (π_j1 e^{g_ij1} + π_j2 e^{g_ij2} + 1e-6)
        lra:  π_j1 = Σ_i γ_ij / (Σ_i 1 + 1e-6)   over real queries and keys
        lm:   π_j1 = Σ_i γ_ij / Σ_i 1            over all pairs, including masked pairs
        π_j2 = 1 − π_j1
    The 1e-6 is added to a density that is not normalised, so far queries move mass to component 2.

    Args:
        query: (B, H, N, E).
        key: (B, H, 2, L, E).
        log_prior: (H, 2, 1 or L).
        variance: σ², (H, 2).
        masks: masks of the call; `lra` uses the key mask.
        query_mask: real queries, (B, N). None means all.
        code: `lra` or `lm`.
    """
    dtype = compute_dtype(query)
    arguments = MGK(log_prior.to(dtype), variance.to(dtype))
    heads, num_keys = query.shape[1], key.shape[3]
    first = torch.zeros(heads, num_keys, dtype=torch.float64, device=query.device)
    count = torch.zeros_like(first)
    for sample in range(query.shape[0]):
        one = slice(sample, sample + 1)
        scores = component_scores(query[one].to(dtype), key[one].to(dtype), arguments)[0]
        eps = scores.new_full((), math.log(_DENSITY_EPS))
        total = torch.logaddexp(scores.logsumexp(1), eps)  # over (H, 2, N, L)
        share = torch.exp(scores[:, 0] - total).to(torch.float64)  # (H, N, L)
        pairs = torch.ones_like(share[0])
        if code == "lra":
            if query_mask is not None:
                pairs = pairs * query_mask[sample, :, None]
            if masks.key_mask is not None:
                pairs = pairs * masks.key_mask[sample, None]
        first += (share * pairs).sum(1)
        count += pairs.sum(0)
    if code == "lra":
        count = torch.where(count > 0, count + _COUNT_EPS, 0.0)
    return torch.stack([first, count - first], 1), count[:, None].expand(-1, 2, -1)


_LOGITS = ("learned", "softmax")  # settings whose priors have no floor


@dataclass(frozen=True, kw_only=True)
class ReleasedOptions(MGKOptions):
    """Options that only the released codes of MGK, ICML 2022, have.

    Args:
        row_eps: added to the sum of exponentials of every row (language model, translation: 1e-6);
            `backend="reference"` only.
        em_code_parity: setting B as updated by the released code, in every forward pass of
            training, `lra` or `lm`; see `code_parity_sums`.
        shift_first_zero: initialise the first shift with zero.
        prior_floor: smallest π in log space.
        magnitude_prior: π is |p| between `prior_floor` and 2 (translation), not p between 0 and 1.

    Raises:
        ValueError: priors are logits and have a floor.
    """

    row_eps: Rate = 0.0
    em_code_parity: EMCodeParity = "none"
    shift_first_zero: Annotated[bool, OnlyWith(shifted_keys=True)] = False
    magnitude_prior: bool = False
    prior_floor: Annotated[float, Range(above=0, most=1), OnlyWith(e_step=("learned", "soft"))] = (
        PRIOR_FLOOR
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prior_floor != PRIOR_FLOOR and (self.e_step, self.prior_param) == _LOGITS:
            raise ValueError(
                f"prior_floor={self.prior_floor} needs prior_param=clamp, received softmax"
            )


@dataclass(frozen=True, kw_only=True)
class ReleasedArguments(ReleasedOptions, MGKArguments):
    """Arguments of `ReleasedMGKAttention`.

    Args:
        value_bias: whether the value projection has a bias `always`, or only in `cross`-attention
            (translation, sMGK).
    """

    value_bias: ValueBias = "always"


class ReleasedMGKCore(MGKCore):
    """`MGKCore` with the options of released code; see `ReleasedMGKAttention`."""

    options_class = ReleasedOptions

    def make_parameters(self, options: MGKOptions) -> None:
        """Create shifts, priors and variances."""
        assert isinstance(options, ReleasedOptions)
        released, layout, self.prior_floor = options, self.layout, options.prior_floor
        super().make_parameters(options)
        em_code_parity = self.em_code_parity = released.em_code_parity
        self.row_eps = released.row_eps
        share = None if self.prior is None else self.prior.share
        plain = (self.num_components, self.e_step, share, self.score, layout.key)
        wanted = (2, "soft", "head_position", "gaussian", layout.query)
        if em_code_parity != "none" and plain != wanted:
            raise ValueError(
                "em_code_parity needs num_components=2, e_step=soft, prior_share=head_position, "
                f"score=gaussian and num_kv_heads={layout.query}, received {plain}"
            )
        if em_code_parity != "none" and self.key_norm_weight is not None:
            raise ValueError("em_code_parity does not support key_norm_weight: remove one of them")
        if released.magnitude_prior:
            prior = self.prior
            if prior is None or prior.by_m_step or prior.param != "clamp":
                raise ValueError(
                    "magnitude_prior needs e_step=learned and prior_param=clamp, received "
                    f"e_step={self.e_step} and prior_param={prior.param if prior else 'no prior'}"
                )
            self.prior = MagnitudePrior(
                prior.num_components,
                prior.num_heads,
                share=prior.share,
                param="clamp",
                by_m_step=False,
                max_positions=prior.value.shape[-1],
                floor=prior.floor,
            )
        if released.shift_first_zero and self.key_shift is not None:
            with torch.no_grad():
                self.key_shift[:, 0] = 0.0

    def forward(self, call: HeadCall) -> Tensor:
        """Compute attention, then replace the priors immediately, as released code does.

        Raises:
            NotImplementedError: the replaced priors would be used by groups of packed documents, or
                by a recomputation in backward.
        """
        replaces = self.em_code_parity != "none" and self.training
        if replaces and (call.packing is not None or in_backward()):
            remedy = "set activation_checkpointing=False" if in_backward() else "pad the documents"
            raise NotImplementedError(
                f"em_code_parity={self.em_code_parity} replaces the priors after one call, but the "
                f"same step has several calls of this layer: {remedy}"
            )
        out = super().forward(call)
        if replaces and self.prior is not None:
            self.prior.apply_statistics(self.prior.statistics())
        return out

    def variant(self, call: HeadCall) -> MGK:
        """Return the mixture and `row_eps`."""
        return replace(super().variant(call), row_eps=self.row_eps)

    def accumulate_m_step(self, call: HeadCall) -> None:
        """Accumulate the sums of the released code."""
        if self.em_code_parity == "none":
            super().accumulate_m_step(call)
            return
        if self.prior is None or in_backward():
            return
        sums = code_parity_sums(
            call.query.detach(),
            self.components(call.key).detach(),
            self.prior(call.masks.num_keys),
            self.variance(),
            masks=call.masks,
            query_mask=call.query_mask,
            code=self.em_code_parity,
        )
        self.prior.accumulate(*sums)

    def prior_statistics(self) -> Tensor | None:
        """Return None if every forward pass updates the priors."""
        return None if self.em_code_parity != "none" else super().prior_statistics()


class ReleasedMGKAttention(MGKAttention):
    """`MGKAttention` with the options of the released codes of MGK, ICML 2022.

    Source: released code of MGK: Long Range Arena and language model; translation in the released
    code of FiSH, NeurIPS 2022 (fairseq modules MGK and sMGK).
    Departs from the source: `MGKAttention` follows the paper. The translation code of sMGK adds the
    value bias, which self-attention never trained, in step-by-step decoding; here self-attention
    with `value_bias="cross"` never adds it.

    The arguments are the fields of `ReleasedArguments`.

    Raises:
        ValueError: `row_eps` is outside [0, 1), or options of released priors contradict others;
            see also `MGKAttention`.
    """

    core: ReleasedMGKCore
    options: ReleasedArguments
    core_class: ClassVar[type[Core]] = ReleasedMGKCore

    @by_name(ReleasedArguments)
    def __init__(self, options: ReleasedArguments) -> None:
        self.build(options)

    def project_values(self, value: Tensor, *, of_self: bool) -> Tensor:
        """Omit the value bias in self-attention if configured; its gradient is then zero.

        Raises:
            NotImplementedError: the bias is omitted, and `value_proj` is not a plain linear layer.
        """
        bias = self.value_proj.bias
        if not of_self or self.options.value_bias == "always" or bias is None:
            return super().project_values(value, of_self=of_self)
        if not isinstance(self.value_proj, torch.nn.Linear):
            raise NotImplementedError(
                "value_bias='cross' multiplies the weight of value_proj, which is a "
                f"{type(self.value_proj).__name__}: leave value_proj a plain linear layer "
                "(no adapter, not quantised), or set value_bias='always'"
            )
        return linear(value, self.value_proj.weight, 0.0 * bias)
