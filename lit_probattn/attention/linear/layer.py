"""Linear attention, the baseline of MLK: a feature map instead of the softmax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lit_probattn.attention.cache import Cache, LinearState
from lit_probattn.attention.call import HeadCall, key_or_fresh
from lit_probattn.attention.core import Core
from lit_probattn.attention.cost import mgk as costs
from lit_probattn.attention.cost.counting import Cost
from lit_probattn.attention.layer import Attention, LayerOptions
from lit_probattn.attention.linear.features import (
    FeatureMap,
    FeatureName,
    FeatureNorm,
    check_feature_map,
    default_num_features,
    drawn_projection,
    orthogonal_projection,
)
from lit_probattn.attention.linear.functions import Linear, LinearForm, StateVariant
from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.base.arguments import Count, OnlyWith, Options, by_name
from lit_probattn.randomness import RandomKey


@dataclass(frozen=True, kw_only=True)
class LinearOptions(Options):
    """Options of linear attention.

    Args:
        feature_map: `elu` (elu(x) + 1), `relu`, `dpfp`, or `favor` (random features for exp(q · k /
            √E)).
        num_features: F of `favor`. None means E ln E. Training redraws them in every step, from the
            step's key; evaluation uses the initial draw.
        dpfp_nu: ν of `dpfp`; F = 2 E ν.
        feature_norm: `sum` divides features by their sum.
    """

    feature_map: FeatureName = "elu"
    num_features: Count | None = None
    dpfp_nu: Annotated[Count, OnlyWith(feature_map="dpfp")] = 1
    feature_norm: FeatureNorm = "none"

    def form(self) -> LinearForm:
        """Return feature map and options."""
        return LinearForm(FeatureMap(self.feature_map, self.feature_norm, self.dpfp_nu))


@dataclass(frozen=True, kw_only=True)
class LinearArguments(LinearOptions, LayerOptions):
    """Arguments of `LinearAttention`, without rotary positions."""

    rotary_dim: int = field(default=0, init=False)


class StateCore(Core):
    """Base of cores without scores, which decode from states of constant size."""

    makes: ClassVar[type[StateVariant]]
    form: LinearForm

    def check(self, bias: Tensor | None, cache: Cache) -> None:
        """Raise if there is a bias, or a cache without states."""
        self.makes.refuse(self.form, bias, cache)

    def new_cache(self, capacity: int = 0) -> LinearState:
        """Return an empty state; `capacity` is ignored, because the size is constant."""
        return self.makes.state_class()

    def absorb(self, call: HeadCall) -> None:
        """Add the keys to the state's sums."""
        self(call)


class LinearCore(StateCore):
    """Random features, if any; see `LinearAttention`."""

    makes: ClassVar[type[Linear]] = Linear
    redraws = True  # new random features in every training step, from its key
    projection: Tensor | None
    key_shift: Tensor | None

    options_class: ClassVar[type[LinearOptions]] = LinearOptions

    def make_parameters(self, options: LinearOptions) -> None:
        """Draw random features, if any."""
        size, num_features, form = self.layout.head_dim, options.num_features, options.form()
        check_feature_map(form.features, size)
        _check_form(form, num_features)
        self.form = form
        # √N of the padded call differs from √N of a document.
        self.takes_padding = form.divides or form.padded_len is not None
        self.key_shift = None
        projection = None
        if form.features.name == "favor":
            count = default_num_features(size) if num_features is None else num_features
            normals = torch.randn(count, 2, size, dtype=torch.float64)
            projection = orthogonal_projection(normals).to(torch.get_default_dtype())
        self.register_buffer("projection", projection)

    # ------------------------------------------------------------------ one call
    def variant(self, call: HeadCall) -> Linear:
        """Return the variant with features, priors, shifts and state."""
        return self.makes(
            self.form,
            self.features(call.rng),
            prior=self.shares(call),
            key_shift=self.key_shift,
            state=call.cache if isinstance(call.cache, LinearState) else None,
        )

    @property
    def kind_of_features(self) -> costs.Features:
        """The properties of the features that the cost depends on."""
        form, projection = self.form, self.projection
        number = form.features.num_features(self.layout.head_dim, projection)
        return costs.Features(number, projection is not None, form.divides)

    def features(self, rng: RandomKey | None) -> Tensor | None:
        """Return the random features of a call, (F, E); in training, drawn for the step."""
        if self.projection is None or not self.training or not self.redraws:
            return self.projection
        sizes = self.projection.shape[0], self.layout.head_dim
        kind = self.projection.device, compute_dtype(self.projection)
        return drawn_projection(key_or_fresh(rng), *sizes).to(*kind)

    def shares(self, call: HeadCall) -> Tensor | None:
        """Return π of the call's keys, (H_kv, K, 1 or L). None means no mixture."""
        return None

    def extra_repr(self) -> str:
        """Return the options for `repr`."""
        return str(self.form)


class LinearAttention(Attention):
    """Attention with a positive feature map φ, in O(N) time and memory.

    Source: Katharopoulos et al., 2020, Eq. (4); feature maps: see `FeatureMap`.
        out[i] = Σ_j φ(query[i]) · φ(key[j]) value[j] / Σ_j φ(query[i]) · φ(key[j])
    Departs from the source: attention dropout drops whole values (one decision per sample,
    key/value head and key), because there are no pairs; no epsilon in the denominator, so that
    weights sum to one (the value-aware paper adds 1e-6; `ReleasedLinearAttention` has `eps`).

    Linear attention has no scores, and therefore no additive bias. Boolean `attn_mask` requires
    `backend="reference"`. The released codes of MGK differ in denominator and output factor: see
    `ReleasedLinearAttention`.

    The arguments are the fields of `LinearOptions` and of `LayerOptions`, without rotary positions.
    `dropout` drops values; `backend=reference` stores the weights, `blockwise` and `triton` are
    O(N).

    Raises:
        ValueError: an unknown name, or options that contradict each other; see also `Attention`.
    """

    core: LinearCore
    core_class: ClassVar[type[Core]] = LinearCore

    @by_name(LinearArguments)
    def __init__(self, options: LinearArguments) -> None:
        self.build(options)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost of the O(N) form without a causal mask, by MGK appendix B's rule."""
        return costs.linear(self.sizes(seq_len), self.core.kind_of_features)


def _check_form(form: LinearForm, num_features: int | None) -> None:
    if num_features is not None and form.features.name != "favor":
        raise ValueError(
            f"num_features is for feature_map=favor, received {num_features} with "
            f"feature_map={form.features.name}"
        )
    scaled = form.features.name == "favor" and form.features.norm == "none"
    if scaled and (form.eps or not form.divides):
        raise ValueError(
            "feature_map=favor has features up to a common factor: it needs denominator=sum and "
            f"eps=0 (or feature_norm=sum), received denominator={form.denominator} and "
            f"eps={form.eps}"
        )
