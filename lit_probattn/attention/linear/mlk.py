"""MLK and sMLK: linear attention whose keys are mixtures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lit_probattn.attention.call import HeadCall, check_components
from lit_probattn.attention.core import ParameterTable
from lit_probattn.attention.cost.mgk import Features
from lit_probattn.attention.linear.functions import (
    MLK,
    Linear,
    linear_kernel,
    masked_kernel,
)
from lit_probattn.attention.linear.layer import (
    LinearArguments,
    LinearAttention,
    LinearCore,
    LinearOptions,
)
from lit_probattn.attention.mgk.core import MixturePrior
from lit_probattn.attention.mgk.layer import MixtureLayer
from lit_probattn.attention.mgk.options import MixtureOptions
from lit_probattn.attention.numerics import component_keys, compute_dtype
from lit_probattn.base.arguments import by_name


@dataclass(frozen=True, kw_only=True)
class MLKOptions(MixtureOptions, LinearOptions):
    """Options of MLK and sMLK."""


@dataclass(frozen=True, kw_only=True)
class MLKArguments(MLKOptions, LinearArguments):
    """Arguments of `MLKAttention`.

    Args:
        num_heads: H. The paper halves it and keeps `head_dim`.
    """


class MLKCore(LinearCore):
    """Parameters of linear attention with a mixture of K components per key.

    The layout has K keys per head unless this core shifts them; see `MLKAttention`.
    """

    makes: ClassVar[type[Linear]] = MLK
    options_class = MLKOptions

    def make_parameters(self, options: LinearOptions) -> None:
        """Create priors and shifts."""
        super().make_parameters(options)
        assert isinstance(options, MLKOptions)
        layout = self.layout
        count = self.num_components = options.num_components
        check_components(layout, count, options.shifted_keys)
        self.prior = MixturePrior(
            count,
            layout.key,
            share=options.prior_share,
            param=options.prior_param,
            by_m_step=False,
            max_positions=options.max_positions,
        )
        if options.shifted_keys:
            shift = torch.randn(layout.key, count, layout.head_dim) * options.shift_init_std
            self.key_shift = nn.Parameter(shift)

    def components(self, key: Tensor) -> Tensor:
        """Return the keys of all components, (B, H_kv, K, L, E), at least float32 if shifted."""
        return component_keys(key, self.num_components, self.key_shift)

    def needs(self) -> dict[str, str]:
        """Return the features of the variant and of its priors."""
        return super().needs() | self.prior.needs()

    @property
    def kind_of_features(self) -> Features:
        """The properties of the features that the cost depends on."""
        kind = super().kind_of_features._replace(num_components=self.num_components)
        return kind._replace(
            shifted=self.key_shift is not None, mixes_keys=self.form.mix == "before"
        )

    def shares(self, call: HeadCall) -> Tensor | None:
        """Return π of the call's keys, (H_kv, K, 1 or L)."""
        num_keys = call.value.shape[2]
        first = 0 if call.cache is None else call.cache.length - num_keys
        shares = self.prior.probabilities(first + num_keys)
        return shares[..., first:] if shares.shape[-1] > 1 else shares

    @property
    def has_components(self) -> bool:  # type: ignore[override]
        """Whether components are separate: False if keys are mixed before the feature map."""
        return self.form.mix == "after"

    def posterior(self, call: HeadCall) -> tuple[Tensor, Tensor]:
        """Return weights and γ_ijr = π_r φ(q_i)·φ(k_jr) / Σ_r' π_r' φ(q_i)·φ(k_jr')."""
        call.refuse_documents("responsibilities")
        dtype = compute_dtype(call.query)
        query, key = call.query.to(dtype), self.components(call.key).to(dtype)
        prior, features = self.shares(call), self.features(call.rng)
        assert prior is not None  # every mixture has one
        parts = []
        for component in range(self.num_components):
            alone = torch.zeros_like(prior)
            alone[:, component] = prior[:, component]
            arguments = Linear(self.form, features, alone)
            parts.append(linear_kernel(query, key, arguments))
        kernel = torch.stack(parts, 2)
        total = kernel.sum(2)
        shares = kernel / total.masked_fill(total == 0, 1.0)[:, :, None]
        visible = masked_kernel(total, call.masks)
        norm = visible.sum(-1, keepdim=True)
        return visible / norm.masked_fill(norm == 0, 1.0), shares

    def learned(self) -> dict[str, ParameterTable]:
        """Return the priors."""
        return self.prior.learned()

    def extra_repr(self) -> str:
        """Return options and mixture for `repr`."""
        return (
            f"{super().extra_repr()}, num_components={self.num_components}, "
            f"shifted_keys={self.key_shift is not None}"
        )


class MLKAttention(MixtureLayer, LinearAttention):
    """Linear attention with a mixture of K components per key (Transformer-MLK, -sMLK).

    Source: MGK, ICML 2022, section 2.4.
        out[i] = φ(query[i])ᵀ Σ_j Σ_r π_r φ(key[j, r]) value[j]ᵀ
               / φ(query[i])ᵀ Σ_j Σ_r π_r φ(key[j, r])
    Departs from the source: nothing; the released codes are `ReleasedMLKAttention`. Priors are
    learned by gradient (setting A); the paper defines no E-step and no M-step for MLK, so settings
    B and C do not exist.

    The arguments are the fields of `MixtureOptions` and the arguments of `LinearAttention`;
    features are normalised before mixing.

    Raises:
        ValueError: fewer than one component, an unknown name, contradicting options.
    """

    core: MLKCore
    options: MLKArguments
    core_class = MLKCore

    @by_name(MLKArguments)
    def __init__(self, options: MLKArguments) -> None:
        self.build(options)
