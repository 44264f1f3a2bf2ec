"""MLK and sMLK: linear attention whose keys are mixtures."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from lit_probattn.attention.backends import Backend
from lit_probattn.attention.linear.features import FeatureName, FeatureNorm
from lit_probattn.attention.linear.functions import Denominator, Mix, OutputScale
from lit_probattn.attention.linear.layer import LinearAttention
from lit_probattn.attention.mgk.priors import MixturePrior, PriorParam, PriorShare


class MLKAttention(LinearAttention):
    """Linear attention with a mixture of K components per key (Transformer-MLK, -sMLK).

    Source: MGK, ICML 2022, section 2.5.
        out[i] = φ(query[i])ᵀ Σ_j Σ_r π_r φ(key[j, r]) value[j]ᵀ
               / φ(query[i])ᵀ Σ_j Σ_r π_r φ(key[j, r])
    Departs from the source: nothing by default; `mix="before"` and the switches of
    `LinearAttention` are what the released codes do. Priors are learned by gradient (setting A);
    the paper defines no E-step and no M-step for MLK, so there is no setting B or C.

    Args:
        embed_dim: C.
        head_dim: E.
        num_heads: H. The paper halves it and keeps `head_dim`.
        num_kv_heads: key/value heads, each with a mixture of its own.
        key_embed_dim: width of keys and values in cross-attention.
        value_head_dim: size of a value head.
        bias: biases of the projections.
        dropout: probability of dropping a value in training.
        backend: `reference` materialises the maps, `blockwise` and `triton` are O(N).
        num_components: K.
        shifted_keys: False (MLK): K key projections. True (sMLK): one projection and K learned
            shifts, key[j, r] = key[j] + b_r.
        mix: `after` the feature map (the paper), or `before` it, φ(Σ_r π_r key[j, r]), which is
            ordinary linear attention with key weights Σ_r π_r W_r.
        prior_share: one prior per layer, per head, or per head and key position.
        prior_param: clamped values (the paper) or logits.
        max_positions: longest key sequence, for `head_position`.
        shift_init_std: standard deviation of the shifts at the start (paper 1, code 0.5).
        shift_first_zero: start the first shift at zero (the released code).
        feature_map: see `LinearAttention`, as all that follow.
        num_features: F of `favor`.
        redraw_features: draw `favor`'s features anew in every training step.
        dpfp_nu: ν of `dpfp`.
        feature_norm: `sum` divides features by their sum, before mixing.
        denominator: `sum` over keys, or `sqrt_len`.
        eps: added to the sum.
        output_scale: factor on the output.
        padded_len: the N of `sqrt_len`.

    Raises:
        ValueError: fewer than one component, an unknown name, contradicting options.
    """

    variant: ClassVar[str] = "mlk"

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
        mix: Mix = "after",
        prior_share: PriorShare = "head",
        prior_param: PriorParam = "clamp",
        max_positions: int | None = None,
        shift_init_std: float = 1.0,
        shift_first_zero: bool = False,
        feature_map: FeatureName = "elu",
        num_features: int | None = None,
        redraw_features: bool = True,
        dpfp_nu: int = 1,
        feature_norm: FeatureNorm = "none",
        denominator: Denominator = "sum",
        eps: float = 0.0,
        output_scale: OutputScale = "one",
        padded_len: int | None = None,
    ) -> None:
        if num_components < 1:
            raise ValueError(f"num_components must be at least 1, received {num_components}")
        if mix not in ("after", "before"):
            raise ValueError(f"mix must be after or before, received {mix!r}")
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
            feature_map=feature_map,
            num_features=num_features,
            redraw_features=redraw_features,
            dpfp_nu=dpfp_nu,
            feature_norm=feature_norm,
            denominator=denominator,
            eps=eps,
            output_scale=output_scale,
            padded_len=padded_len,
        )
        self.form = replace(self.form, mix=mix)
        self.score_maps = num_components
        self.prior = MixturePrior(
            num_components,
            self.num_kv_heads,
            share=prior_share,
            param=prior_param,
            by_m_step=False,
            max_positions=max_positions,
        )
        self.key_shift: nn.Parameter | None = None
        if shifted_keys:
            shift = torch.randn(self.num_kv_heads, num_components, head_dim) * shift_init_std
            if shift_first_zero:
                shift[:, 0] = 0.0
            self.key_shift = nn.Parameter(shift)

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
        """Return every component's keys, (B, H_kv, K, L, E)."""
        if self.key_shift is None:
            return key
        return key[:, :, None] + self.key_shift[None, :, :, None].to(key.dtype)

    def prior_shares(self, first_position: int, num_keys: int) -> Tensor | None:
        """Return π of the keys from `first_position` on, (H_kv, K, 1 or L)."""
        shares = self.prior.probabilities(first_position + num_keys)
        return shares[..., first_position:] if shares.shape[-1] > 1 else shares

    def key_flops(self, seq_len: int) -> int:
        """Operations from inputs to mixed key features: projections, shifts, (2K − 1)NF mixing."""
        n, kv, e, k = seq_len, self.num_kv_heads, self.head_dim, self.num_components
        mixed = e
        if self.form.mix == "after":
            mixed = self.form.features.num_features(e, self.projection)
        project = n * e * (2 * self.key_embed_dim - 1)
        keys = project + k * n * e if self.shifted_keys else k * project
        return kv * (keys + (2 * k - 1) * n * mixed)

    def extra_repr(self) -> str:
        """Sizes, switches and the mixture, for printing."""
        return (
            f"{super().extra_repr()}, num_components={self.num_components}, "
            f"shifted_keys={self.shifted_keys}"
        )
