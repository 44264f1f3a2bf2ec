"""Options of MGK and sMGK: keys, priors in three settings, variances, densities."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from lit_probattn.attention.mgk.annealing import NormOptions
from lit_probattn.attention.mgk.functions import Score
from lit_probattn.attention.rotary import RotaryShift
from lit_probattn.base.arguments import Count, NotNegative, OnlyWith, Options

EStep = Literal["learned", "soft", "hard"]
PriorShare = Literal["layer", "head", "head_position"]
PriorParam = Literal["clamp", "softmax"]
VariancePreset = Literal["equal", "paper_main", "code_lm"]

PRIOR_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True)
class KeyOptions(Options):
    """Options of keys that are mixtures.

    Args:
        num_components: K.
        shifted_keys: False (MGK, MLK): K key projections. True (sMGK, sMLK): one projection and K
            learned shifts, key[j, r] = key[j] + b_r.
    """

    num_components: Count = 2
    shifted_keys: bool = False


@dataclass(frozen=True, kw_only=True)
class MixtureOptions(KeyOptions):
    """Options of mixture keys, their priors and shifts, which MLK shares.

    Args:
        prior_share: one prior per layer, per head, or per head and key position, which counts
            padding.
        prior_param: setting A stores clamped values (the paper) or logits.
        max_positions: longest key sequence, for `head_position`.
        shift_init_std: standard deviation of the initial shifts (paper 1, code 0.5).
    """

    prior_share: Annotated[PriorShare, OnlyWith(e_step=("learned", "soft"))] = "head"
    prior_param: Annotated[PriorParam, OnlyWith(e_step="learned")] = "clamp"
    max_positions: Annotated[Count | None, OnlyWith(prior_share="head_position")] = None
    shift_init_std: Annotated[NotNegative, OnlyWith(shifted_keys=True)] = 1.0


def variance_multipliers(
    variance: VariancePreset | list[float], num_components: int
) -> tuple[float, ...]:
    """Return c_r with σ²_r = c_r √E for every component.

    Source: MGK, ICML 2022, section 3.4 and appendix A.1 (`equal`, `paper_main`); the released
    language-modelling code (`code_lm`: 1, 1/3). For more than two components `paper_main`
    continues as 1, 3, 5, …, which is this package's extension.

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
                    "pass a list of multipliers instead"
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


@dataclass(frozen=True, kw_only=True)
class MGKOptions(NormOptions, MixtureOptions):
    """Options of MGK and sMGK: densities of components, and their combination into a score.

    Args:
        e_step: `learned` (setting A, prior by gradient), `soft` (B, prior by the M-step),
            `hard` (C, maximum over components, no prior).
        score: `gaussian`, or `dot` ("Softmax MGK").
        variance: multipliers c_r or a preset: `equal` (1, …), `paper_main` (1, 3), `code_lm`
            (1, 1/3).
        learn_variance: make σ² a parameter per head and component.
        m_step_variance: whether the M-step of setting B sets σ² per head and component, Σ_ij P_ijr
            ‖query[i] − key[j, r]‖² / (E Σ_ij P_ijr) with P the joint posterior; requires
            `em_weighting="posterior"` and `include_log_det`. An update of priors and variances
            never decreases the likelihood of the queries under these keys.
        include_log_det: add −(E/2) log σ²_r, the exact Gaussian density.
        em_weighting: weight of a pair in the M-step: equal (the paper), or its attention weight.
        rotary_shift: shifted keys with rotary positions: shift `before` rotation (relative
            positions, K products per pair), `after` it (one product, if the kernel supports it, but
            scores depend on absolute positions), or in `unrotated` dimensions only (both;
            recommended if `rotary_dim` < E).
    """

    e_step: EStep = "learned"
    score: Score = "gaussian"
    variance: VariancePreset | list[float] = "equal"
    learn_variance: bool = False
    m_step_variance: bool = False
    include_log_det: bool = False
    em_weighting: Annotated[Literal["uniform", "posterior"], OnlyWith(e_step="soft")] = "uniform"
    rotary_shift: Annotated[
        RotaryShift, OnlyWith(shifted_keys=True, rotary_dim=range(1, sys.maxsize))
    ] = "before"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_norms(self.score)
        if self.m_step_variance:
            self._check_m_step_variance()

    def _check_m_step_variance(self) -> None:
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
                    "σ² maximises the likelihood only of Gaussian densities with posterior weights"
                )
