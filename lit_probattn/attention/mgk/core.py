"""Parameters of keys that are mixtures of Gaussians: shifts, priors, variances."""

from __future__ import annotations

import math
import warnings
from typing import ClassVar

import torch
from torch import Tensor, nn

from lit_probattn.attention.call import HeadCall, check_components
from lit_probattn.attention.core import Core, Gaussians, ParameterTable
from lit_probattn.attention.cost.mgk import Mixture
from lit_probattn.attention.mgk.annealing import KeyNorms
from lit_probattn.attention.mgk.functions import MGK, component_scores
from lit_probattn.attention.mgk.m_step import responsibility_sums
from lit_probattn.attention.mgk.options import (
    PRIOR_FLOOR,
    MGKOptions,
    PriorParam,
    PriorShare,
    variance_multipliers,
)
from lit_probattn.attention.numerics import (
    biased,
    component_keys,
    compute_dtype,
    masked_softmax,
    within,
)
from lit_probattn.base.torch_internals import (
    FollowingModule,
    in_backward,
    is_mapped,
    is_transformed,
    outside_transforms,
)


def _added(total: Tensor, sums: Tensor) -> Tensor:
    """Return `total` + `sums`: in place, for replayed CUDA graphs, except inside transforms."""
    return outside_transforms(total + sums) if is_transformed() else total.add_(sums)


class MixtureVariance(FollowingModule):
    """Variances σ²_r, fixed or learnable (σ² = exp θ), shared by positions.

    Variances that change stay within a factor 8 of √E, or within the initial ones if those are
    farther, so that no component becomes flat enough to vanish. At the bound, a gradient whose step
    leads outwards is zero, and an M-step stops, which is the best value within the bound.

    Args:
        multipliers: c_r, initial (or fixed) variances in units of √E.
        num_heads: heads with separate variances.
        head_dim: E.
        learn: whether σ² is a parameter.
        by_m_step: whether σ² is a buffer that `apply_statistics` updates.
    """

    fixed: Tensor

    def __init__(
        self,
        multipliers: tuple[float, ...],
        num_heads: int,
        head_dim: int,
        learn: bool,
        by_m_step: bool = False,
    ) -> None:
        super().__init__()
        self._exact = tuple(c * head_dim**0.5 for c in multipliers)
        variance = torch.tensor(self._exact, dtype=torch.float64)
        self.is_equal = not learn and not by_m_step and len(set(multipliers)) == 1
        self.bound = (
            head_dim**0.5 * min(1.0 / 8.0, *multipliers),
            head_dim**0.5 * max(8.0, *multipliers),
        )
        self.head_dim, self.by_m_step = head_dim, by_m_step
        self._sums: Tensor | None = None
        self.log_variance: Tensor | None
        start = variance.log().to(torch.get_default_dtype()).repeat(num_heads, 1)
        if by_m_step:
            self.register_buffer("log_variance", start)
        elif learn:
            self.log_variance = nn.Parameter(start)
        else:
            self.log_variance = None
            self.register_buffer("fixed", variance.repeat(num_heads, 1), persistent=False)

    def after_move(self) -> None:
        """Keep fixed variances in float64 after a cast."""
        if self.log_variance is None:
            exact = torch.tensor(self._exact, dtype=torch.float64, device=self.fixed.device)
            self.fixed = exact.repeat(self.fixed.shape[0], 1)

    def learned(self) -> dict[str, ParameterTable]:
        """Return σ² if components differ or learn."""
        return (
            {}
            if self.is_equal
            else {"variance": ParameterTable(self(), "variance σ²", "component")}
        )

    def forward(self) -> Tensor:
        """Return σ², (num_heads, K): float64 when fixed, at least float32 when learned."""
        if self.log_variance is None:
            return self.fixed
        low, high = (math.log(bound) for bound in self.bound)
        return within(self.log_variance.to(compute_dtype(self.log_variance)), low, high).exp()

    @torch.no_grad()
    def accumulate(self, squares: Tensor, weights: Tensor) -> None:
        """Add Σ P_ijr ‖q_i − k_jr‖² and Σ P_ijr of one forward pass, both (num_heads, K)."""
        sums = torch.stack([squares, weights]).to(torch.float64)
        if self._sums is None or self._sums.device != sums.device:
            self._sums = torch.zeros_like(sums)
        self._sums = _added(self._sums, sums)

    def statistics(self) -> Tensor:
        """Return the sums since the last `apply_statistics`, (2, num_heads, K)."""
        if self._sums is not None:
            return self._sums
        assert self.log_variance is not None
        shape = (2, *self.log_variance.shape)
        return torch.zeros(shape, dtype=torch.float64, device=self.log_variance.device)

    @torch.no_grad()
    def apply_statistics(self, sums: Tensor) -> None:
        """M-step: σ²_r = Σ P_ijr ‖q_i − k_jr‖² / (E Σ P_ijr) if Σ P_ijr > 0; reset the sums."""
        assert self.log_variance is not None
        squares, weights = sums
        seen = weights > 0
        fresh = (squares / (self.head_dim * weights.where(seen, 1.0))).clamp(*self.bound)
        kept = self.log_variance.to(torch.float64)
        self.log_variance.copy_(torch.where(seen, fresh.log(), kept))
        self._sums = None


class MixturePrior(nn.Module):
    """Priors π_jr of the components, learned by gradient (A) or by the M-step (B).

    Source: MGK, ICML 2022, section 2.3 and Table 5. Setting A stores raw values p (initially 1/K),
    used as clamp(p, 0, 1) without a sum-to-one constraint; `softmax` stores logits instead. In
    setting B the prior is Σ responsibilities / number of pairs over one optimiser step.

    Args:
        num_components: K.
        num_heads: heads with separate priors.
        share: one set per layer (K,), per head (H, K), or per head and position (H, K, L_max).
        param: parametrisation in setting A.
        by_m_step: setting B; values are a buffer that `apply_statistics` updates.
        max_positions: L_max, required by `head_position`.
        floor: smallest π in log space, above 0. Below it the gradient is zero, as outside [0, 1].

    Raises:
        ValueError: `head_position` without `max_positions`.
    """

    def __init__(
        self,
        num_components: int,
        num_heads: int,
        *,
        share: PriorShare,
        param: PriorParam,
        by_m_step: bool,
        max_positions: int | None,
        floor: float = PRIOR_FLOOR,
    ) -> None:
        super().__init__()
        self.floor = floor
        shape: tuple[int, ...] = (num_heads, num_components)
        if share == "layer":
            shape = (num_components,)
        elif share == "head_position":
            if max_positions is None:
                raise ValueError("prior_share head_position needs max_positions, received None")
            shape = (num_heads, num_components, max_positions)
        self.share, self.param, self.by_m_step = share, param, by_m_step
        self.num_heads, self.num_components = num_heads, num_components
        start = 0.0 if param == "softmax" and not by_m_step else 1.0 / num_components
        values = torch.full(shape, start)
        self.value: Tensor
        if by_m_step:
            self.register_buffer("value", values)
        else:
            self.register_parameter("value", nn.Parameter(values))
        self._sums: Tensor | None = None

    def forward(self, num_keys: int) -> Tensor:
        """Return log π, (num_heads, K, 1), or (num_heads, K, L) with priors per position.

        Raises:
            ValueError: there are more keys than positions with a prior.
        """
        value = self._per_key(num_keys)
        if self.param == "softmax" and not self.by_m_step:
            return value.log_softmax(1)
        return value.clamp(self.floor, 1.0).log()

    def probabilities(self, num_keys: int) -> Tensor:
        """Return π in the same shape, for sums that are not in log space, without the floor."""
        value = self._per_key(num_keys)
        if self.param == "softmax" and not self.by_m_step:
            return value.softmax(1)
        return value.clamp(0.0, 1.0)

    def needs(self) -> dict[str, str]:
        """Return the features that priors per key position require; see `Variant.needs`."""
        if self.share != "head_position":
            return {}
        return dict.fromkeys(("positions", "absolute positions"), "prior_share=head_position")

    def learned(self) -> dict[str, ParameterTable]:
        """Return π, averaged over positions if it depends on them."""
        count = self.value.shape[-1] if self.share == "head_position" else 1
        values = self(count).exp().mean(-1)
        return {"prior": ParameterTable(values, "prior π", "component", is_share=True)}

    def _per_key(self, num_keys: int) -> Tensor:
        value = self.value.to(compute_dtype(self.value))
        if self.share != "head_position":
            return value.expand(self.num_heads, -1)[..., None]
        if num_keys > value.shape[-1]:
            raise ValueError(
                f"{num_keys} keys, but priors exist for max_positions={value.shape[-1]} only"
            )
        return value[..., :num_keys]

    @torch.no_grad()
    def accumulate(self, numerator: Tensor, denominator: Tensor) -> None:
        """Add responsibilities and pair counts of one forward pass, both (num_heads, K, L)."""
        sums = torch.stack([numerator, denominator]).to(torch.float64)
        if self.share == "head_position":
            padding = self.value.shape[-1] - sums.shape[-1]
            sums = nn.functional.pad(sums, (0, padding))
        else:
            sums = sums.sum(-1)
            if self.share == "layer":
                sums = sums.sum(1)
        if self._sums is None or self._sums.device != sums.device:
            self._sums = torch.zeros_like(sums)
        self._sums = _added(self._sums, sums)

    def statistics(self) -> Tensor:
        """Return the sums since the last `apply_statistics`: (2, *prior shape) float64."""
        if self._sums is not None:
            return self._sums
        shape = (2, *self.value.shape)
        return torch.zeros(shape, dtype=torch.float64, device=self.value.device)

    @torch.no_grad()
    def apply_statistics(self, sums: Tensor) -> None:
        """M-step: π = numerator / denominator if that is not 0; reset the sums."""
        numerator, denominator = sums
        seen = denominator > 0
        fresh = (numerator / denominator.where(seen, 1.0)).to(self.value.dtype)
        self.value.copy_(torch.where(seen, fresh, self.value))
        self._sums = None


class MGKCore(KeyNorms, Core):
    """Shifts, priors and variances of attention to keys that are mixtures of K Gaussians.

    The layout has K keys per head unless this core shifts them; `rotary` rotates the keys if shifts
    precede the rotation.

    Raises:
        ValueError: a variance is not positive, a name is unknown, or no dimension is left for
            shifts.
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
        """Create shifts, priors and variances."""
        layout, rotary = self.layout, self.rotary
        shifted, score, count = options.shifted_keys, options.score, options.num_components
        check_components(layout, count, shifted)
        self.num_components, self.shifted_keys = count, shifted
        self.e_step, self.score = options.e_step, score
        self.include_log_det, self.em_weighting = options.include_log_det, options.em_weighting
        self.rotary_shift = options.rotary_shift
        self.has_m_step = options.e_step == "soft"
        owners = layout.key  # heads with separate shifts, priors and variances
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
        """Return the variant of a call; a scale other than 1/√E divides the variances."""
        num_keys, variance = call.masks.num_keys, self.variance()
        return self.makes(
            log_prior=None if self.prior is None else self.prior(num_keys),
            variance=variance if call.scale is None else variance / call.scale_ratio(),
            equal_variance=self.variance.is_equal,
            score=self.score,
            include_log_det=self.include_log_det,
            hard=self.e_step == "hard",
            key_shift=self.shift_table(num_keys),
            norm_weight=self.key_norm_weight,
        )

    def needs(self) -> dict[str, str]:
        """Return the features of the variant, of its priors, and of shifts after rotation."""
        found = super().needs() | ({} if self.prior is None else self.prior.needs())
        if self.shifted_keys and self.rotary is not None and self.rotary_shift == "after":
            found.setdefault("absolute positions", "rotary_shift=after")
        return found

    def shift_table(self, num_keys: int) -> Tensor | None:
        """Return b_r, (H_prior, K, E), or rotated for every position, (H_prior, K, L, E)."""
        shift = self.shifts()
        if shift is None or self.shares_product:
            return shift
        assert self.rotary is not None
        table = shift.to(compute_dtype(shift))[:, :, None].expand(-1, -1, num_keys, -1)
        # Hooks of modules (PyTorch's FLOP counter) fail for views of parameters in `no_grad`.
        return self.rotary.forward(table, 0)

    def components(self, key: Tensor) -> Tensor:
        """Return the keys of all components, (B, H_key, K, L, E), at least float32 if shifted."""
        return component_keys(key, self.num_components, self.shift_table(key.shape[-2]))

    def unambiguous_pairs(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return, if hard, the pairs whose best component leads by more than 16-bit rounding."""
        if self.e_step != "hard":
            return None
        arguments = MGK(
            None, self.variance().double(), self.score, norm_weight=self.key_norm_weight
        )
        scores = component_scores(query.double(), self.components(key).double(), arguments)
        best = scores.topk(2, 2).values
        return best[:, :, 0] - best[:, :, 1] > 0.05

    @property
    def kind_of_mixture(self) -> Mixture:
        """The properties of the mixture that its cost depends on."""
        return Mixture(
            num_components=self.num_components,
            shifted=self.shifted_keys,
            shares_product=self.shares_product,
            gaussian=self.score == "gaussian",
            equal_variance=self.variance.is_equal,
            by_m_step=self.has_m_step,
        )

    @property
    def shares_product(self) -> bool:
        """Whether the components' scores differ only by a term per query and a term per key."""
        turned = self.rotary is not None and self.rotary_shift == "before"
        return self.shifted_keys and not turned

    def shifts(self) -> Tensor | None:
        """Return b_r over whole heads, (H_prior, K, E), padded with zeros in rotated dimensions."""
        size = self.layout.head_dim
        if self.key_shift is None or self.key_shift.shape[-1] == size:
            return self.key_shift
        return nn.functional.pad(self.key_shift, (size - self.key_shift.shape[-1], 0))

    # ------------------------------------------------------------------ analysis
    def gaussians(self, call: HeadCall) -> Gaussians:
        """Return keys, priors and variances of all components.

        Raises:
            ValueError: the scores are not densities, because key norms are added back.
        """
        call.refuse_documents("Gaussians")
        weight = self.key_norm_weight
        if weight is not None and bool(weight):
            raise ValueError(
                f"key norms are added back with weight {float(weight):.3g}, so scores are not "
                "densities of Gaussians: use a checkpoint from after the annealing"
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
        arguments = MGK(*forms, norm_weight=self.key_norm_weight)
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
    def accumulate_m_step(self, call: HeadCall) -> None:
        """Add the responsibilities of a training pass, unless backward recomputes it.

        The task sums them over ranks and applies them once per optimiser step, so micro-batches and
        ranks together are one M-step.

        Raises:
            NotImplementedError: the call is inside `torch.func.vmap`.
        """
        if self.prior is None or not self.has_m_step or in_backward():
            return
        components, variant = self.components(call.key).detach(), self.variant(call)
        tensors = call.query, components, variant.log_prior, variant.variance
        given = [*tensors, call.query_mask, call.masks.bias, *call.masks.boolean]
        if any(x is not None and is_mapped(x) for x in given):
            raise NotImplementedError(
                "e_step=soft sums responsibilities for its M-step, which torch.func.vmap cannot: "
                "call eval() of the layers' cores, or set e_step=learned"
            )
        sums = responsibility_sums(
            call.query.detach(),
            components,
            variant,
            masks=call.masks,
            query_mask=call.query_mask,
            weighting=self.em_weighting,
            with_squares=self.variance.by_m_step,
        )
        self.prior.accumulate(sums.numerator, sums.denominator)
        if sums.squares is not None:
            self.variance.accumulate(sums.squares, sums.numerator.sum(-1))

    def prior_statistics(self) -> Tensor | None:
        """Return the sums of an M-step since the last update, or None without an M-step.

        Numerator and denominator of the priors, (2, *prior shape); if the M-step also sets
        variances, one vector that starts with them.
        """
        if self.prior is None or not self.has_m_step:
            return None
        of_prior = self.prior.statistics()
        if not self.variance.by_m_step:
            return of_prior
        return torch.cat([of_prior.flatten(), self.variance.statistics().flatten()])

    def apply_prior_update(self, statistics: Tensor) -> None:
        """Replace priors, and variances if the M-step sets them, by an M-step over `statistics`.

        `statistics` is `prior_statistics`, summed over ranks by the caller.

        Raises:
            ValueError: no M-step sets the priors.
        """
        if self.prior is None or not self.has_m_step:
            raise ValueError(f"e_step={self.e_step} has no M-step; only e_step=soft updates priors")
        if self.variance.by_m_step:
            of_prior, of_variance = self.prior.statistics(), self.variance.statistics()
            parts = statistics.split([of_prior.numel(), of_variance.numel()])
            statistics = parts[0].view_as(of_prior)
            self.variance.apply_statistics(parts[1].view_as(of_variance))
        self.prior.apply_statistics(statistics)

    def extra_repr(self) -> str:
        """Return the mixture for `repr`."""
        return (
            f"num_components={self.num_components}, shifted_keys={self.shifted_keys}, "
            f"e_step={self.e_step!r}, score={self.score!r}"
        )
