"""The core and the layer of MGK and sMGK: key components or shifts, priors, variances."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_probattn.attention.call import HeadCall, HeadLayout, check_components
from lit_probattn.attention.core import Core, Gaussians, ParameterTable
from lit_probattn.attention.cost.counting import Cost
from lit_probattn.attention.cost.mgk import Mixture, mixture
from lit_probattn.attention.layer import Attention, LayerOptions
from lit_probattn.attention.mgk.annealing import KeyNorms, NormOptions
from lit_probattn.attention.mgk.functions import (
    MGK,
    Score,
    component_scores,
)
from lit_probattn.attention.mgk.m_step import responsibility_sums
from lit_probattn.attention.mgk.priors import (
    PRIOR_FLOOR,
    EStep,
    KeyOptions,
    MixtureOptions,
    MixturePrior,
    MixtureVariance,
    VariancePreset,
    variance_multipliers,
)
from lit_probattn.attention.numerics import (
    biased,
    check_choice,
    compute_dtype,
    masked_softmax,
)
from lit_probattn.attention.rotary import RotaryShift
from lit_probattn.base.arguments import by_name
from lit_probattn.base.torch_internals import in_backward


@dataclass(frozen=True, kw_only=True)
class DensityOptions(KeyOptions):
    """Options of the densities of MGK's components, and of how they become one score.

    Args:
        e_step: `learned` (setting A, prior by gradient), `soft` (B, prior by the M-step),
            `hard` (C, maximum over components, no prior).
        score: `gaussian`, or `dot` ("Softmax MGK").
        variance: multipliers c_r or a preset: `equal` (1, …), `paper_main` (1, 3), `code_lm`
            (1, 1/3).
        learn_variance: make σ² a parameter per head and component.
        m_step_variance: let σ² per head and component follow the M-step of setting B, Σ_ij P_ijr
            ‖query[i] − key[j, r]‖² / (E Σ_ij P_ijr) with P the joint posterior; needs
            `em_weighting="posterior"` and `include_log_det`. An update of priors and variances
            never makes the queries less likely under these keys.
    """

    e_step: EStep = "learned"
    score: Score = "gaussian"
    variance: VariancePreset | list[float] = "equal"
    learn_variance: bool = False
    m_step_variance: bool = False


@dataclass(frozen=True, kw_only=True)
class MGKOptions(NormOptions, MixtureOptions, DensityOptions):
    """Options of MGK and sMGK; those of its bases come first.

    Args:
        include_log_det: add −(E/2) log σ²_r, the exact Gaussian density.
        em_weighting: pairs count equally in the M-step (the paper), or by their attention weight.
        rotary_shift: shifted keys with rotary positions: shift `before` rotation (relative
            positions, K products per pair), `after` it (one product where a kernel uses that, but
            absolute positions enter), or in `unrotated` dimensions only (both; recommended where
            `rotary_dim` < E).
    """

    include_log_det: bool = False
    em_weighting: Literal["uniform", "posterior"] = "uniform"
    rotary_shift: RotaryShift = "before"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_norms(self.score)
        check_choice("e_step", self.e_step, ("learned", "soft", "hard"))
        check_choice("score", self.score, ("gaussian", "dot"))
        check_choice("em_weighting", self.em_weighting, ("uniform", "posterior"))
        check_choice("rotary_shift", self.rotary_shift, ("before", "after", "unrotated"))
        if self.m_step_variance:
            self._check_m_step_variance()

    def _check_m_step_variance(self) -> None:
        """Raise a ValueError where σ² of an M-step is not what makes the queries likeliest."""
        needed = {
            "e_step": "soft",
            "em_weighting": "posterior",
            "score": "gaussian",
            "include_log_det": True,
            "learn_variance": False,
            "key_norm_weight": None,
        }
        for name, wanted in needed.items():
            if getattr(self, name) != wanted:
                raise ValueError(
                    f"m_step_variance needs {name}={wanted}, received {getattr(self, name)}: its "
                    "σ² is the likeliest only of Gaussian densities, weighted by the posterior"
                )


@dataclass(frozen=True, kw_only=True)
class MGKArguments(MGKOptions, LayerOptions):
    """Arguments of `MGKAttention`.

    Args:
        num_heads: H. The papers halve it and keep `head_dim`.
    """


class MGKCore(KeyNorms, Core):
    """Shifts, priors and variances of attention to keys that are mixtures of K Gaussians.

    The layout has K keys per head unless they are shifted here; `rotary` turns the keys, where
    shifts come before rotation.

    Raises:
        ValueError: a variance is not positive, a name is unknown, or shifts have no dimension left.
    """

    makes: ClassVar[type[MGK]] = MGK
    has_gaussians: ClassVar[bool] = True
    has_components = True
    # Added to the sum of exponentials of every row; presets of released code set it.
    row_eps: float = 0.0

    # Smallest π in log space.
    prior_floor: float = PRIOR_FLOOR
    options_class: ClassVar[type[MGKOptions]] = MGKOptions

    def make_parameters(self, options: MGKOptions) -> None:
        """Make shifts, priors and variances."""
        layout, rotary = self.layout, self.rotary
        shifted, score, count = options.shifted_keys, options.score, options.num_components
        check_components(layout, count, shifted)
        self.num_components, self.shifted_keys = count, shifted
        self.e_step, self.score = options.e_step, score
        self.include_log_det, self.em_weighting = options.include_log_det, options.em_weighting
        self.rotary_shift = options.rotary_shift
        self.has_m_step = options.e_step == "soft"
        owners = layout.key  # heads with shifts, priors and variances of their own
        multipliers = variance_multipliers(options.variance, count)
        self.variance = MixtureVariance(
            *(multipliers, owners, layout.head_dim),
            *(options.learn_variance, options.m_step_variance),
        )
        self.prior: MixturePrior | None = None
        if options.e_step != "hard":
            self.prior = MixturePrior(
                count,
                owners,
                share=options.prior_share,
                param=options.prior_param,
                by_m_step=options.e_step == "soft",
                max_positions=options.max_positions,
                floor=self.prior_floor,
            )
        self.key_shift: nn.Parameter | None = None
        if shifted:
            size = layout.head_dim
            if rotary is not None and options.rotary_shift == "unrotated":
                size -= rotary.rotary_dim
                if size == 0:
                    raise ValueError(
                        f"rotary_shift=unrotated: rotary_dim={rotary.rotary_dim} leaves no "
                        f"dimension of head_dim={layout.head_dim} for the shifts; choose a smaller "
                        "rotary_dim"
                    )
            shift = torch.randn(owners, count, size) * options.shift_init_std
            self.key_shift = nn.Parameter(shift)
        self.keep_norms(options)
        collapses = shifted and score == "dot" and self.variance.is_equal
        if collapses and options.prior_share != "head_position":
            warnings.warn(
                "shifted keys with dot-product scores, equal variances and priors shared by "
                "positions are ordinary softmax attention: the shift cancels in every row",
                stacklevel=7,
            )

    # ------------------------------------------------------------------ one call
    def variant(self, call: HeadCall) -> MGK:
        """Return priors, variances, shifts and switches; another scale divides the variances."""
        num_keys, variance = call.masks.num_keys, self.variance()
        return self.makes(
            log_prior=None if self.prior is None else self.prior(num_keys),
            variance=variance if call.scale is None else variance / call.scale_ratio(),
            equal_variance=self.variance.is_equal,
            score=self.score,
            include_log_det=self.include_log_det,
            hard=self.e_step == "hard",
            key_shift=self.shift_table(0, num_keys),
            norm_weight=self.key_norm_weight,
        )

    def shift_table(self, first_position: int, num_keys: int) -> Tensor | None:
        """Return b_r, (H_prior, K, E), or of every position, (H_prior, K, L, E), where it turns."""
        shift = self.shifts()
        if shift is None or self.shares_product:
            return shift
        assert self.rotary is not None
        table = shift.to(compute_dtype(shift))[:, :, None].expand(-1, -1, num_keys, -1)
        return self.rotary(table, first_position)

    def components(self, key: Tensor, first_position: int = 0) -> Tensor:
        """Return every component's keys, (B, H_key, K, L, E); shifted ones in at least float32."""
        table = self.shift_table(first_position, key.shape[-2])
        return MGK(None, self.variance(), key_shift=table).components(key)

    def unambiguous_pairs(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return, if hard, the pairs whose best component leads by more than 16-bit rounding."""
        if self.e_step != "hard":
            return None
        arguments = MGK(None, self.variance().double(), self.score, norm_weight=self.norm_weight)
        scores = component_scores(query.double(), self.components(key).double(), arguments)
        best = scores.topk(2, 2).values
        return best[:, :, 0] - best[:, :, 1] > 0.05

    @property
    def kind_of_mixture(self) -> Mixture:
        """What enters the cost."""
        return Mixture(
            num_components=self.num_components,
            shifted=self.shifted_keys,
            shares_product=self.shares_product,
            gaussian=self.score == "gaussian",
            equal_variance=self.variance.is_equal,
            by_m_step=self.by_m_step,
        )

    @property
    def shares_product(self) -> bool:
        """Whether the components' scores differ by a term per query and one per key only."""
        turned = self.rotary is not None and self.rotary_shift == "before"
        return self.shifted_keys and not turned

    def shifts(self) -> Tensor | None:
        """Return b_r over whole heads, (H_prior, K, E); zero where they are kept unrotated."""
        size = self.layout.head_dim
        if self.key_shift is None or self.key_shift.shape[-1] == size:
            return self.key_shift
        return nn.functional.pad(self.key_shift, (size - self.key_shift.shape[-1], 0))

    # ------------------------------------------------------------------ what studies ask
    def gaussians(self, call: HeadCall) -> Gaussians:
        """Return every component's keys, priors and variances.

        Raises:
            ValueError: the scores are not densities, as keys' norms are put back.
        """
        call.refuse_documents("Gaussians")
        weight = self.norm_weight
        if weight is not None and bool(weight):
            raise ValueError(
                f"keys' norms are put back with weight {float(weight):.3g}, so scores are not "
                "densities of Gaussians: take a checkpoint from after the annealing"
            )
        return self._mixtures(call)

    def _mixtures(self, call: HeadCall) -> Gaussians:
        kind = call.query.device, compute_dtype(call.query)
        prior = None if self.prior is None else self.prior(call.masks.num_keys).to(*kind)
        return Gaussians(self.components(call.key).to(*kind), prior, self.variance().to(*kind))

    def posterior(self, call: HeadCall) -> tuple[Tensor, Tensor]:
        """Return weights and responsibilities.

        Source: MGK, ICML 2022, Eq. (8): γ_ijr = exp(s_ijr) / Σ_r' exp(s_ijr'); hard inference: 1
        for the first largest s_ijr.
        """
        call.refuse_documents("responsibilities")
        parts, masks = self._mixtures(call), call.masks
        forms = (parts.log_prior, parts.variance, self.score, self.include_log_det)
        arguments = MGK(*forms, norm_weight=self.norm_weight)
        scores = component_scores(call.query.to(parts.key), parts.key, arguments)
        rows, cols = masks.all_rows, masks.all_cols
        allowed = masks.allowed(rows, cols, call.query.device)
        if self.e_step == "hard":
            shares = nn.functional.one_hot(scores.argmax(2), scores.shape[2]).to(scores)
            shares, total = shares.movedim(-1, 2), scores.amax(2)
        else:
            shares, total = scores.softmax(2), scores.logsumexp(2)
        total = biased(total, masks, rows, cols)
        return masked_softmax(total, allowed, self.row_eps), shares

    def learned(self) -> dict[str, ParameterTable]:
        """Return priors and variances."""
        prior = {} if self.prior is None else self.prior.learned()
        return prior | self.variance.learned()

    # ------------------------------------------------------------------ setting B
    @property
    def by_m_step(self) -> bool:
        """Whether priors follow the M-step."""
        return self.e_step == "soft"

    def accumulate_m_step(self, call: HeadCall) -> None:
        """Add the responsibilities of a training pass; a recomputation in backward adds nothing.

        The task sums them over ranks and applies them once per optimiser step, so micro-batches and
        ranks together make one M-step.
        """
        if self.prior is None or not self.by_m_step or in_backward():
            return
        sums = responsibility_sums(
            call.query.detach(),
            self.components(call.key).detach(),
            self.variant(call),
            masks=call.masks,
            query_mask=call.query_mask,
            weighting=self.em_weighting,
            with_squares=self.variance.by_m_step,
        )
        self.prior.accumulate(sums.numerator, sums.denominator)
        if sums.squares is not None:
            self.variance.accumulate(sums.squares, sums.numerator.sum(-1))

    def prior_statistics(self) -> Tensor | None:
        """Return the sums of an M-step since the last update, or None where there is none.

        Numerator and denominator of the priors, (2, *prior shape); where variances follow too, one
        vector, those first.
        """
        if self.prior is None or not self.by_m_step:
            return None
        of_prior = self.prior.statistics()
        if not self.variance.by_m_step:
            return of_prior
        return torch.cat([of_prior.flatten(), self.variance.statistics().flatten()])

    def apply_prior_update(self, statistics: Tensor) -> None:
        """Replace priors, and variances that follow, by an M-step over `statistics`.

        They are `prior_statistics`, summed over ranks by the caller.

        Raises:
            ValueError: the priors do not follow an M-step.
        """
        if self.prior is None or not self.by_m_step:
            raise ValueError(f"e_step={self.e_step} has no M-step; only e_step=soft updates priors")
        if self.variance.by_m_step:
            of_prior, of_variance = self.prior.statistics(), self.variance.statistics()
            parts = statistics.split([of_prior.numel(), of_variance.numel()])
            statistics = parts[0].view_as(of_prior)
            self.variance.apply_statistics(parts[1].view_as(of_variance))
        self.prior.apply_statistics(statistics)

    def extra_repr(self) -> str:
        """The mixture, for printing."""
        return (
            f"num_components={self.num_components}, shifted_keys={self.shifted_keys}, "
            f"e_step={self.e_step!r}, score={self.score!r}"
        )


class MGKAttention(Attention):
    """Attention with a mixture of K Gaussians per key (Transformer-MGK, -sMGK).

    Source: MGK, ICML 2022, Eq. (7), Table 5 (settings), Table 10 (shared keys).
        attn_weights[i, j] ∝ Σ_r π_r exp(−‖query[i] − key[j, r]‖² / (2 σ²_r)),   σ²_r = c_r √E
    Departs from the source: log-space sums; variances learnable by log σ² within a factor 8 of √E;
    the M-step runs once per optimiser step over all its micro-batches and ranks, over real pairs
    only; in grouped attention the mixture belongs to the key/value head (the paper's "shared").

    Its arguments are the fields of `MGKOptions` and `LayerOptions`; with `num_kv_heads=1`
    (multi-query MGK) one set of K keys serves all heads. Attention dropout takes one decision per
    (i, j) for all components.

    Raises:
        ValueError: fewer than one component, a variance that is not positive, an unknown name; see
            also `Attention`.
    """

    core: MGKCore
    options: MGKArguments
    core_class: ClassVar[type[Core]] = MGKCore

    @by_name(MGKArguments)
    def __init__(self, options: MGKArguments) -> None:
        self.build(options)

    def make_core(self, core: type[Core]) -> Core:
        """Return the core, which shifts keys before they are rotated."""
        return core(self.layout, self._backend, self.options, rotary=self.rotary)

    @property
    def num_components(self) -> int:
        """K."""
        return self.options.num_components

    @property
    def shifted_keys(self) -> bool:
        """Whether components are shifts of one key."""
        return self.options.shifted_keys

    def rename_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take weights whose norms were annealed to 0, which is this layer without the annealing.

        Raises:
            ValueError: they were not annealed to the end.
        """
        self.core.drop_annealed(state_dict, f"{prefix}core.")

    def head_layout(self) -> HeadLayout:
        """All components at once unless they are shifts."""
        keys = 1 if self.shifted_keys else self.num_components
        return replace(super().head_layout(), keys_per_head=keys)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost by MGK appendix B, with the corrected constant."""
        return mixture(self.sizes(seq_len), self.core.kind_of_mixture)
