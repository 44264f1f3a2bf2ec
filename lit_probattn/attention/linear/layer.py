"""Linear attention, the baseline of MLK: a feature map in place of the softmax."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_probattn.attention.backends import AutoRule, Backend, Call
from lit_probattn.attention.cache import Cache, LinearState
from lit_probattn.attention.functional import autocast_off, compute_dtype
from lit_probattn.attention.layer import Attention, BackendFunction, Cost
from lit_probattn.attention.linear.features import (
    FeatureMap,
    FeatureName,
    FeatureNorm,
    check_feature_map,
    default_num_features,
    feature_normals,
    orthogonal_projection,
)
from lit_probattn.attention.linear.functions import (
    CHUNK_RULES,
    Denominator,
    LinearForm,
    OutputScale,
    linear_blockwise,
    linear_kernel,
    linear_reference,
    linear_refusal,
    linear_triton,
    masked_kernel,
)
from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import RandomKey


class LinearAttention(Attention):
    """Attention with a positive feature map φ, in O(N) time and memory.

    Source: Katharopoulos et al., 2020, Eq. (4); feature maps: see `FeatureMap`.
        out[i] = Σ_j φ(query[i]) · φ(key[j]) value[j] / Σ_j φ(query[i]) · φ(key[j])
    Departs from the source: the released codes of MGK differ in feature normalisation, denominator
    and output factor; these are options, shared with `MLKAttention`. Attention dropout drops whole
    values (one decision per sample, key/value head and key), because there are no pairs.

    There is no additive bias (no scores). Boolean `attn_mask` needs `backend="reference"`.

    Args:
        embed_dim: C.
        head_dim: E.
        num_heads: H.
        num_kv_heads: key/value heads, a divisor of H.
        key_embed_dim: width of keys and values in cross-attention.
        value_head_dim: size of a value head.
        bias: biases of the projections.
        dropout: probability of dropping a value in training.
        backend: `reference` materialises the maps, `blockwise` and `triton` are O(N).
        feature_map: `elu` (elu(x) + 1), `relu`, `dpfp`, or `favor` (random features for exp(q · k /
            √E)).
        num_features: F of `favor`. None means E ln E.
        redraw_features: draw `favor`'s features anew in every training step, by the step's key.
            Evaluation always uses the ones that the layer was made with.
        dpfp_nu: ν of `dpfp`; F = 2 E ν.
        feature_norm: `sum` divides features by their sum.
        denominator: `sum` over keys, or `sqrt_len` (divide by √N, released Long Range Arena code).
        eps: added to the sum.
        output_scale: factor on the output, `one` or `inv_sqrt_head_dim`.
        padded_len: the N of `sqrt_len`; None takes it from the call. Needed for decoding, and where
            batches are not all padded to one length.

    Raises:
        ValueError: an unknown name, or options that contradict each other.
    """

    variant: ClassVar[str] = "linear"
    backends: ClassVar[dict[str, BackendFunction]] = {
        "reference": linear_reference,
        "blockwise": linear_blockwise,
        "triton": linear_triton,
    }
    auto_rules: ClassVar[dict[str, AutoRule]] = CHUNK_RULES
    projection: Tensor | None

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
        features = FeatureMap(feature_map, feature_norm, dpfp_nu)
        check_feature_map(features, head_dim)
        self.form = LinearForm(
            features,
            denominator=denominator,
            eps=eps,
            output_scale=output_scale,
            padded_len=padded_len,
        )
        _check_form(self.form, num_features)
        self.redraw_features = redraw_features
        projection = None
        if feature_map == "favor":
            count = default_num_features(head_dim) if num_features is None else num_features
            normals = torch.randn(count, 2, head_dim, dtype=torch.float64)
            projection = orthogonal_projection(normals).to(torch.get_default_dtype())
        self.register_buffer("projection", projection)

    # ------------------------------------------------------------------ arguments of the functions
    def prior_shares(self, first_position: int, num_keys: int) -> Tensor | None:
        """Return π of the keys from `first_position` on, (H_kv, K, 1 or L); None: no mixture."""
        return None

    def score_arguments(self, num_keys: int) -> dict[str, Any]:
        """Return the switches, the features of evaluation, and the priors."""
        return {
            "form": self.form,
            "projection": self.projection,
            "prior": self.prior_shares(0, num_keys),
        }

    def random_arguments(self, rng: RandomKey | None, first_row: int) -> dict[str, Any]:
        """Return this step's random features in training."""
        if self.projection is None or not self.training or not self.redraw_features:
            return {}
        if rng is None:
            rng = RandomKey(int(torch.randint(2**62, (1,))))
        normals = feature_normals(rng, self.projection.shape[0], self.head_dim)
        return {"projection": orthogonal_projection(normals).to(self.projection)}

    def unsupported(self, backend: str, call: Call) -> str | None:
        """Masks of pairs need the pairs; a state has none."""
        if backend == "triton":
            count = self.form.features.num_features(self.head_dim, self.projection)
            return linear_refusal(self.variant, call, count, self.value_head_dim)
        if backend == "reference" and call.recurrent:
            return "cannot continue from a state"
        if backend == "blockwise" and call.attn_mask:
            return "cannot apply attn_mask, because it forms no pairs"
        return super().unsupported(backend, call)

    # ------------------------------------------------------------------ the call
    def _prepare(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        bias: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor, Tensor, Masks]:
        if bias is not None:
            raise ValueError(
                f"{self.variant} attention has no scores before a softmax to add a bias to; pass "
                "attn_mask to hide pairs, or use a softmax variant"
            )
        if cache is not None and not isinstance(cache, LinearState):
            raise ValueError(
                f"{self.variant} attention decodes from a LinearState, received "
                f"{type(cache).__name__}: make it by layer.new_cache()"
            )
        needs_len = self.form.denominator == "sqrt_len" and self.form.padded_len is None
        if cache is not None and needs_len:
            raise ValueError(
                "decoding with denominator=sqrt_len needs padded_len, received None: √N is not "
                "known before the last token"
            )
        return super()._prepare(query, key, value, key_mask, attn_mask, is_causal, bias, cache)

    def run(
        self,
        backend: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        arguments: dict[str, Any],
        cache: Cache | None,
        **call: Any,
    ) -> Tensor:
        """Compute the heads' outputs; with a state, go on from it."""
        if isinstance(cache, LinearState):
            num_keys = value.shape[2]
            prior = self.prior_shares(cache.length - num_keys, num_keys)
            arguments = {**arguments, "state": cache, "prior": prior}
        return super().run(backend, query, key, value, arguments=arguments, cache=cache, **call)

    def new_cache(self, capacity: int = 0) -> LinearState:
        """Return an empty state; `capacity` does not matter, its size is constant."""
        return LinearState()

    def reference_scores(self, query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
        """Return `linear_kernel`: not scores before a softmax, but the maps before division."""
        return linear_kernel(query, key, **arguments)

    def weights(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return kernel[i, j] / Σ_j kernel[i, j], (B, H, N, L), whatever the denominator."""
        q, k, v, masks = self._prepare(query, key, None, key_mask, attn_mask, is_causal, bias, None)
        with autocast_off(q):
            dtype = compute_dtype(q)
            arguments = self.score_arguments(v.shape[2])
            kernel = self.reference_scores(q.to(dtype), self.expand_keys(k).to(dtype), **arguments)
        kernel = masked_kernel(kernel, masks)
        total = kernel.sum(-1, keepdim=True)
        return kernel / total.masked_fill(total == 0, 1.0)

    # ------------------------------------------------------------------ cost
    def key_flops(self, seq_len: int) -> int:
        """Operations from inputs to key features, without the feature map."""
        return self.num_kv_heads * seq_len * self.head_dim * (2 * self.key_embed_dim - 1)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost of one head's sums and products, times the heads, and the projections.

        Per head with F = E = E_v:  4NE² + 3NE − N − E² − E  for  S = Σ f_j v_jᵀ, z = Σ f_j,
        f_iᵀS, f_i·z and the division. Feature maps are not counted. `macs` are those of the O(N)
        form without a causal mask, the features' own products included; the reference spends
        N² H (F + E_v) instead of its N F (E_v + 1)(H + H_kv).
        """
        n, c, e, h = seq_len, self.embed_dim, self.head_dim, self.num_heads
        e_v, kv, width = self.value_head_dim, self.num_kv_heads, self.key_embed_dim
        f = self.form.features.num_features(e, self.projection)
        divides = self.form.denominator == "sum"
        flops = h * n * e * (2 * c - 1) + self.key_flops(n) + kv * n * e_v * (2 * width - 1)
        flops += kv * f * e_v * (2 * n - 1) + h * n * e_v * (2 * f - 1)
        if divides:
            flops += kv * f * (n - 1) + h * n * (2 * f - 1) + h * n * e_v
        flops += n * c * (2 * h * e_v - 1)
        macs = n * (c * h * e + width * (self.key_width + kv * e_v) + h * e_v * c)
        macs += n * f * (e_v + divides) * (h + kv)
        if self.projection is not None:
            macs += n * f * e * (h + self.key_width // e)
        return Cost(flops, macs, num_parameters=sum(p.numel() for p in self.parameters()))

    def extra_repr(self) -> str:
        """Sizes and switches, for printing."""
        return f"{super().extra_repr()}, {self.form}"


def _check_form(form: LinearForm, num_features: int | None) -> None:
    for name, value, choices in (
        ("denominator", form.denominator, ("sum", "sqrt_len")),
        ("output_scale", form.output_scale, ("one", "inv_sqrt_head_dim")),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, received {value!r}")
    if not 0.0 <= form.eps < 1.0:
        raise ValueError(f"eps must be in [0, 1), received {form.eps}")
    if form.padded_len is not None and form.padded_len < 1:
        raise ValueError(f"padded_len must be at least 1, received {form.padded_len}")
    if num_features is not None and (form.features.name != "favor" or num_features < 1):
        raise ValueError(
            f"num_features is for feature_map=favor and at least 1, received {num_features} with "
            f"feature_map={form.features.name}"
        )
    scaled = form.features.name == "favor" and form.features.norm == "none"
    if scaled and (form.eps or form.denominator != "sum"):
        raise ValueError(
            "feature_map=favor has features up to a common factor: it needs denominator=sum and "
            f"eps=0 (or feature_norm=sum), received denominator={form.denominator} and "
            f"eps={form.eps}"
        )
