"""The attention layer of MGK and sMGK."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lit_probattn.attention.call import HeadLayout
from lit_probattn.attention.core import Core
from lit_probattn.attention.cost.counting import Cost
from lit_probattn.attention.cost.mgk import mixture
from lit_probattn.attention.layer import Attention, LayerOptions
from lit_probattn.attention.mgk.core import MGKCore
from lit_probattn.attention.mgk.options import (
    MGKOptions,
)
from lit_probattn.base.arguments import by_name


@dataclass(frozen=True, kw_only=True)
class MGKArguments(MGKOptions, LayerOptions):
    """Arguments of `MGKAttention`.

    Args:
        num_heads: H. The papers halve it and keep `head_dim`.
    """


class MixtureLayer(Attention):
    """Base of layers whose keys are mixtures of projected or of shifted keys."""

    options: Any  # with the fields of `KeyOptions`

    @property
    def num_components(self) -> int:
        """K."""
        return self.options.num_components

    @property
    def shifted_keys(self) -> bool:
        """Whether components are shifts of one key."""
        return self.options.shifted_keys

    def head_layout(self) -> HeadLayout:
        """Return a layout with K keys per head, or one if components are shifts."""
        keys = 1 if self.shifted_keys else self.num_components
        return replace(super().head_layout(), keys_per_head=keys)


class MGKAttention(MixtureLayer):
    """Attention with a mixture of K Gaussians per key (Transformer-MGK, -sMGK).

    Source: MGK, ICML 2022, Eq. (7), Table 5 (settings), Table 10 (shared keys).
        attn_weights[i, j] ∝ Σ_r π_r exp(−‖query[i] − key[j, r]‖² / (2 σ²_r)),   σ²_r = c_r √E
    Departs from the source: log-space sums; variances learnable by log σ² within a factor 8 of √E;
    the M-step runs once per optimiser step over all its micro-batches and ranks, over real pairs
    only; in grouped attention the mixture belongs to the key/value head (the paper's "shared").

    The arguments are the fields of `MGKOptions` and `LayerOptions`; with `num_kv_heads=1`
    (multi-query MGK) all heads share one set of K keys. Attention dropout makes one decision per
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
        """Return the core, which shifts keys before their rotation."""
        return core(self.layout, self._backend, self.options, rotary=self.rotary)

    def rename_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Load weights whose key norms were annealed to 0, which equal this layer's weights.

        Raises:
            ValueError: the annealing was not complete.
        """
        self.core.drop_annealed(state_dict, f"{prefix}core.")

    def cost(self, seq_len: int) -> Cost:
        """Return the cost by MGK appendix B, with the corrected constant."""
        return mixture(self.sizes(seq_len), self.core.kind_of_mixture)
