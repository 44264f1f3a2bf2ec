"""Parameters of a mixture of Gaussians per key: priors with their three settings, and variances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lit_probattn.attention.core import ParameterTable
from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.base.torch_internals import FollowingModule

EStep = Literal["learned", "soft", "hard"]
PriorShare = Literal["layer", "head", "head_position"]
PriorParam = Literal["clamp", "softmax"]
VariancePreset = Literal["equal", "paper_main", "code_lm"]

PRIOR_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """Options of keys that are mixtures.

    Args:
        num_components: K.
        shifted_keys: False (MGK, MLK): K key projections. True (sMGK, sMLK): one projection and K
            learned shifts, key[j, r] = key[j] + b_r.

    Raises:
        ValueError: fewer than one component.
    """

    num_components: int = 2
    shifted_keys: bool = False

    def __post_init__(self) -> None:
        if self.num_components < 1:
            raise ValueError(f"num_components must be at least 1, received {self.num_components}")


@dataclass(frozen=True, kw_only=True)
class MixtureOptions(KeyOptions):
    """Options of keys that are mixtures, of their priors and shifts: all that MLK has.

    Args:
        prior_share: one prior per layer, per head, or per head and key position.
        prior_param: setting A keeps clamped values (the paper) or logits.
        max_positions: longest key sequence, for `head_position`.
        shift_init_std: standard deviation of the shifts at the start (paper 1, code 0.5).
    """

    prior_share: PriorShare = "head"
    prior_param: PriorParam = "clamp"
    max_positions: int | None = None
    shift_init_std: float = 1.0


def variance_multipliers(
    variance: VariancePreset | list[float], num_components: int
) -> tuple[float, ...]:
    """Return c_r with σ²_r = c_r √E for every component.

    Source: MGK, ICML 2022, section 3.4 and appendix A.1 (`equal`, `paper_main`); the released
    language-modelling code (`code_lm`: 1, 1/3). For more than two components `paper_main`
    continues as 1, 3, 5, …, an extension of ours.

    Raises:
        ValueError: unknown preset, wrong number of values, or a value that is not positive.
    """
    if isinstance(variance, str):
        if variance == "equal":
            return (1.0,) * num_components
        if variance == "paper_main":
            return tuple(2.0 * r + 1.0 for r in range(num_components))
        if variance == "code_lm":
            if num_components != 2:
                raise ValueError(
                    f"variance preset code_lm is for 2 components, received {num_components}; "
                    "give a list of multipliers instead"
                )
            return (1.0, 1.0 / 3.0)
        raise ValueError(
            f"unknown variance preset {variance!r}; expected equal, paper_main, code_lm or a list "
            f"of {num_components} positive multipliers of √head_dim"
        )
    values = tuple(float(v) for v in variance)
    if len(values) != num_components:
        raise ValueError(
            f"variance has {len(values)} multipliers, expected one per component: {num_components}"
        )
    if not all(0.0 < v < float("inf") for v in values):
        raise ValueError(f"variance multipliers must be positive and finite, received {values}")
    return values


class MixtureVariance(FollowingModule):
    """Variances σ²_r, fixed or learnable (σ² = exp θ), shared by positions.

    Variances that change stay within a factor 8 of √E, so that no component can become flat enough
    to switch itself off; the gradient of a variance at the bound that pushes outwards is zero, and
    an M-step stops there, which is the best that the bound allows.

    Args:
        multipliers: c_r, initial (or fixed) variances in units of √E.
        num_heads: heads that have variances of their own.
        head_dim: E.
        learn: whether σ² is a parameter.
        by_m_step: whether σ² is a buffer that follows `apply_statistics`.
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
        self.bound = head_dim**0.5 / 8.0, head_dim**0.5 * 8.0
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
        """Keep fixed variances in float64 through every cast."""
        if self.log_variance is None:
            exact = torch.tensor(self._exact, dtype=torch.float64, device=self.fixed.device)
            self.fixed = exact.repeat(self.fixed.shape[0], 1)

    def learned(self) -> dict[str, ParameterTable]:
        """Return σ² where components differ or learn."""
        return (
            {}
            if self.is_equal
            else {"variance": ParameterTable(self(), "variance σ²", "component")}
        )

    def forward(self) -> Tensor:
        """Return σ², (num_heads, K): float64 when fixed, at least float32 when learned."""
        if self.log_variance is None:
            return self.fixed
        return self.log_variance.to(compute_dtype(self.log_variance)).exp().clamp(*self.bound)

    @torch.no_grad()
    def accumulate(self, squares: Tensor, weights: Tensor) -> None:
        """Add Σ P_ijr ‖q_i − k_jr‖² and Σ P_ijr of one forward pass, both (num_heads, K)."""
        sums = torch.stack([squares, weights]).to(torch.float64)
        if self._sums is None or self._sums.device != sums.device:
            self._sums = torch.zeros_like(sums)
        self._sums += sums

    def statistics(self) -> Tensor:
        """Return what was accumulated since the last `apply_statistics`, (2, num_heads, K)."""
        if self._sums is not None:
            return self._sums
        assert self.log_variance is not None
        shape = (2, *self.log_variance.shape)
        return torch.zeros(shape, dtype=torch.float64, device=self.log_variance.device)

    @torch.no_grad()
    def apply_statistics(self, sums: Tensor) -> None:
        """M-step: σ²_r = Σ P_ijr ‖q_i − k_jr‖² / (E Σ P_ijr) where seen; forget the sums."""
        assert self.log_variance is not None
        squares, weights = sums
        seen = weights > 0
        fresh = (squares / (self.head_dim * weights.where(seen, 1.0))).clamp(*self.bound)
        kept = self.log_variance.to(torch.float64)
        self.log_variance.copy_(torch.where(seen, fresh.log(), kept))
        self._sums = None


class MixturePrior(nn.Module):
    """Priors π_jr of the components: learned by gradient (A), or by the M-step (B).

    Source: MGK, ICML 2022, section 2.3 and Table 5. Setting A keeps raw values p (start 1/K) that
    enter as clamp(p, 0, 1) without a sum-to-one constraint; `softmax` keeps logits instead. In
    setting B the prior is Σ responsibilities / number of pairs over one optimiser step.

    Args:
        num_components: K.
        num_heads: heads that have priors of their own.
        share: one set per layer (K,), per head (H, K), or per head and position (H, K, L_max).
        param: how setting A parametrises them.
        by_m_step: setting B; values are a buffer and follow `apply`.
        max_positions: L_max, needed by `head_position`.
        floor: smallest π in log space, above 0. Below it the gradient is zero, as outside [0, 1].

    Raises:
        ValueError: `head_position` without `max_positions`, or a floor outside (0, 1].
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
        if not 0.0 < floor <= 1.0:
            raise ValueError(f"the prior's floor must be in (0, 1], received {floor}")
        self.floor = floor
        shape: tuple[int, ...] = (num_heads, num_components)
        if share == "layer":
            shape = (num_components,)
        elif share == "head_position":
            if max_positions is None:
                raise ValueError("prior_share head_position needs max_positions, received None")
            shape = (num_heads, num_components, max_positions)
        elif share != "head":
            raise ValueError(
                f"unknown prior_share {share!r}; expected layer, head or head_position"
            )
        if param not in ("clamp", "softmax"):
            raise ValueError(f"unknown prior_param {param!r}; expected clamp or softmax")
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
        """Return log π, (num_heads, K, 1), or (num_heads, K, L) when positions have their own.

        Raises:
            ValueError: more keys than positions with a prior.
        """
        value = self._per_key(num_keys)
        if self.param == "softmax" and not self.by_m_step:
            return value.log_softmax(1)
        return value.clamp(0.0, 1.0).clamp_min(self.floor).log()

    def probabilities(self, num_keys: int) -> Tensor:
        """Return π in the same shape, for sums that are not in log space: no floor above zero."""
        value = self._per_key(num_keys)
        if self.param == "softmax" and not self.by_m_step:
            return value.softmax(1)
        return value.clamp(0.0, 1.0)

    def learned(self) -> dict[str, ParameterTable]:
        """Return π as it enters, the mean over positions where they have their own."""
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
        self._sums += sums

    def statistics(self) -> Tensor:
        """Return what was accumulated since the last `apply`: (2, *prior shape) float64."""
        if self._sums is not None:
            return self._sums
        shape = (2, *self.value.shape)
        return torch.zeros(shape, dtype=torch.float64, device=self.value.device)

    @torch.no_grad()
    def apply_statistics(self, sums: Tensor) -> None:
        """M-step: π = numerator / denominator where anything was seen; forget the sums."""
        numerator, denominator = sums
        seen = denominator > 0
        fresh = (numerator / denominator.where(seen, 1.0)).to(self.value.dtype)
        self.value.copy_(torch.where(seen, fresh, self.value))
        self._sums = None
