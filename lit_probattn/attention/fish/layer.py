"""The FiSH layer: FiSH, Hard FiSH, GFiSH, Hard GFiSH, MiSH and Hard MiSH by its options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_probattn.attention.backends import AUTO_RULES, AutoRule, Backend, Call
from lit_probattn.attention.cache import Cache
from lit_probattn.attention.fish.cost import mixing_flops, mixing_macs, score_flops, value_flops
from lit_probattn.attention.fish.functions import (
    NoisePosition,
    ScalePosition,
    ScoreNoise,
    fish_blockwise,
    fish_reference,
    fish_refusal,
    fish_scores,
    fish_sdpa,
    fish_triton,
)
from lit_probattn.attention.fish.mixing import (
    HeadMixing,
    Mixer,
    MixingBias,
    MixingConstraint,
    MixingInit,
    NoiseKind,
    NoiseScale,
    SigmaParam,
    SigmaShape,
    check_choice,
)
from lit_probattn.attention.layer import Attention, BackendFunction, Cost
from lit_probattn.randomness import RandomKey


class FiSHAttention(Attention):
    """Attention whose H local score maps are mixed from G global ones..

    Source: FiSH, NeurIPS 2022, Eq. (8)-(10), section 2.4; appendix D (cost).
        G_k = query_k key_kᵀ,  k = 1 … G
        FiSH    A_j = Σ_k p_kj (G_k + s_k ε_k)                          mixer=linear
        MiSH    the same p_k for every j                                mixer=shared
        GFiSH   a = W_2 ReLU(W_1 (g + noise) + b_1), pointwise          mixer=mlp
        attn_weights_j = softmax(A_j / √E + bias_j)
        noise=none makes them Hard.
    Departs from the source: noise per global head, shared by local heads (the released code;
    Eq. (8) as printed is noise=local); s_k is the square of a parameter; no noise at evaluation
    unless asked; the last bias of a mixing, which softmax cancels, is an option. Eq. (8) is not a
    draw from the admixture of Eq. (7), only its relaxation with the same mean.

    Args:
        embed_dim: C.
        head_dim: E, of queries, keys and values alike.
        num_heads: H, local heads: values and outputs.
        num_global_heads: G, heads of queries and keys, at most H. None means ⌈H / head_ratio⌉.
        head_ratio: local heads per global head, where `num_global_heads` is None; follows
            `num_heads` in models that change it from stage to stage.
        mixer: `linear`, `shared`, `mlp` (GFiSH as released) or `relu_sum` (as written).
        mixer_ratios: hidden widths of `mlp` as ⌈H / ratio⌉; None means one layer of H.
        mixing: `relaxed` (all experiments of the paper), or `simplex`: p_kj ≥ 0, Σ_k p_kj = 1.
        mixing_init: weights at the start: `torch_linear` (translation), `normal_0.02` (language
            model), `trunc_normal_0.02` (images), or `copy`: local head j is global head ⌊jG/H⌋.
        mixing_bias: `hidden` (before a ReLU), `all` (the last layer too, which changes nothing)
            or `none`.
        noise: `global`, `local`, `local_global` or `none`.
        noise_scale: s at the start, positive.
        sigma_shape: one s per global head, or one for all.
        sigma_param: what the parameter holds: √s (`squared`), s (`direct`) or softplus⁻¹(s).
        noise_position: noise on `raw` scores (language model) or on `scaled` ones (translation).
        noise_at_eval: draw noise at evaluation too; keyed by seed and sample, so it repeats.
        scale_position: 1/√E `after` the mixing (language model) or `before` it (the rest).
        key_embed_dim: width of keys and values in cross-attention.
        value_head_dim: size of a value head.
        bias: biases of the four projections.
        dropout: attention dropout in training.
        backend: implementation. `sdpa` serves Hard FiSH and Hard MiSH, `triton` all but
            mixer=relu_sum and more than two layers.
        rotary_dim: entries of global queries and keys that rotary positions turn.
        rotary_base: base of their angles.

    Raises:
        ValueError: more global than local heads, or choices that exclude each other.
    """

    variant: ClassVar[str] = "fish"
    backends: ClassVar[dict[str, BackendFunction]] = {
        "reference": fish_reference,
        "sdpa": fish_sdpa,
        "blockwise": fish_blockwise,
        "triton": fish_triton,
    }
    steps_over_cache: ClassVar[bool] = True
    # On a CPU the concatenated heads cost G times the products of the global maps: blocks are
    # faster at every size measured, forward and backward.
    auto_rules: ClassVar[dict[str, AutoRule]] = {
        **AUTO_RULES,
        "cpu": AutoRule(("blockwise", "sdpa", "reference"), AUTO_RULES["cpu"].store_up_to),
    }

    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        num_heads: int,
        *,
        num_global_heads: int | None = None,
        head_ratio: float = 2.0,
        mixer: Mixer = "linear",
        mixer_ratios: Sequence[float] | None = None,
        mixing: MixingConstraint = "relaxed",
        mixing_init: MixingInit = "torch_linear",
        mixing_bias: MixingBias = "hidden",
        noise: NoiseKind = "global",
        noise_scale: float = 0.01,
        sigma_shape: SigmaShape = "per_global",
        sigma_param: SigmaParam = "squared",
        noise_position: NoisePosition = "raw",
        noise_at_eval: bool = False,
        scale_position: ScalePosition = "after",
        key_embed_dim: int | None = None,
        value_head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        backend: Backend = "auto",
        rotary_dim: int = 0,
        rotary_base: float = 10000.0,
    ) -> None:
        self.num_global_heads = count_global_heads(num_heads, num_global_heads, head_ratio)
        super().__init__(
            embed_dim,
            head_dim,
            num_heads,
            key_embed_dim=key_embed_dim,
            value_head_dim=value_head_dim,
            bias=bias,
            dropout=dropout,
            backend=backend,
            rotary_dim=rotary_dim,
            rotary_base=rotary_base,
        )
        check_choice("noise", noise, ("none", "global", "local", "local_global"))
        check_choice("noise_position", noise_position, ("raw", "scaled"))
        check_choice("scale_position", scale_position, ("after", "before"))
        if noise_position == "scaled" and scale_position == "after":
            raise ValueError(
                "noise_position=scaled needs scale_position=before, received after: noise comes "
                "before the mixing, so the scale must too"
            )
        self.mixing_bias, self.noise_kind, self.noise_at_eval = mixing_bias, noise, noise_at_eval
        self.noise_position: NoisePosition = noise_position
        self.scale_position: ScalePosition = scale_position
        self.mixing = HeadMixing(
            self.num_global_heads,
            num_heads,
            mixer=mixer,
            constraint=mixing,
            init=mixing_init,
            bias=mixing_bias,
            ratios=(1.0,) if mixer_ratios is None else tuple(mixer_ratios),
        )
        self.score_maps = 1 if mixer in ("linear", "shared") else 2
        self.noise_scale: NoiseScale | None = None
        if noise != "none":
            self.noise_scale = NoiseScale(
                self.num_global_heads, shape=sigma_shape, param=sigma_param, start=noise_scale
            )

    @property
    def num_query_heads(self) -> int:
        """Queries are projected to the global heads."""
        return self.num_global_heads

    @property
    def key_width(self) -> int:
        """Keys are projected to the global heads."""
        return self.num_global_heads * self.head_dim

    def split_keys(self, key: Tensor) -> Tensor:
        """(B, L, G·E) -> (B, G, L, E)."""
        return key.unflatten(-1, (self.num_global_heads, -1)).transpose(1, 2)

    def score_arguments(self, num_keys: int) -> dict[str, Any]:
        """Return mixing weights and switches for the backend functions."""
        scale = None if self.noise_scale is None else self.noise_scale()
        return {
            "mixing": self.mixing.values(scale),
            "num_heads": self.num_heads,
            "scale_position": self.scale_position,
            "noise_position": self.noise_position,
        }

    @property
    def draws_noise(self) -> bool:
        """Whether a call in the present mode draws noise."""
        return self.noise_kind != "none" and (self.training or self.noise_at_eval)

    def random_arguments(self, rng: RandomKey | None, first_row: int) -> dict[str, Any]:
        """Return the noise of one call, if any."""
        if not self.draws_noise:
            return {}
        key = noise_key(rng, self.training)
        maps = self.mixing.num_noise_maps
        return {"noise": ScoreNoise(self.noise_kind, key, maps, first_row)}

    def reference_scores(self, query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
        """Return `fish_scores`."""
        return fish_scores(query, key, **arguments)

    def cached_scores(
        self, query: Tensor, key: Tensor, offset: Tensor | None, cols: range, num_keys: int
    ) -> Tensor:
        """Return the scores of a part of the cache; only calls without noise read it in parts."""
        arguments = self.score_arguments(num_keys)
        arguments["mixing"] = arguments["mixing"].to(query.dtype)
        return fish_scores(query, key, **arguments)

    def _reads_parts(self, cache: Cache | None, num_queries: int) -> bool:
        return not self.draws_noise and super()._reads_parts(cache, num_queries)

    def unsupported(self, backend: str, call: Call) -> str | None:
        """PyTorch's softmax sees one head at a time: only the linear mixing, and no noise."""
        if backend == "triton":
            return fish_refusal(self.mixing, call, self.head_dim, self.value_head_dim)
        if backend == "sdpa" and self.mixing.mixer not in ("linear", "shared"):
            return f"cannot mix scores through a ReLU (mixer={self.mixing.mixer})"
        if backend == "sdpa" and self.draws_noise:
            return f"cannot add noise to the scores (noise={self.noise_kind})"
        return super().unsupported(backend, call)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost by FiSH appendix D for the scores, plus values and output projection.

        FiSH:  N²(2HE + 2GE + 2HG − H) + N(4(H+G)EC − 2(H+G)E − C), C = key_embed_dim.
        """
        n, c, e, h, g = (
            *(seq_len, self.embed_dim, self.head_dim),
            *(self.num_heads, self.num_global_heads),
        )
        e_v, width, widths = self.value_head_dim, self.key_embed_dim, self.mixing.widths
        mixer, noise = self.mixing.mixer, self.noise_kind
        bias: MixingBias = self.mixing_bias
        per_pair, once = mixing_flops(widths, mixer, bias, noise, h)
        per_pair_macs = g * e + mixing_macs(widths, mixer, noise) + h * e_v
        projections = n * (c * g * e + width * (g * e + h * e_v) + h * e_v * c)
        return Cost(
            paper_flops=score_flops(n, c, e, g, per_pair, once) + value_flops(n, c, e_v, h),
            macs=projections + n * n * per_pair_macs,
            num_parameters=sum(p.numel() for p in self.parameters()),
        )

    def extra_repr(self) -> str:
        """Sizes, mixing and noise, for printing."""
        return (
            f"{super().extra_repr()}, num_global_heads={self.num_global_heads}, "
            f"noise={self.noise_kind!r}, scale_position={self.scale_position!r}"
        )


def count_global_heads(num_heads: int, num_global_heads: int | None, head_ratio: float) -> int:
    """Return G.

    Raises:
        ValueError: G is not between 1 and H, or the ratio is below 1.
    """
    if num_global_heads is None:
        if not head_ratio >= 1.0:
            raise ValueError(f"head_ratio must be at least 1, received {head_ratio}")
        return math.ceil(num_heads / head_ratio)
    if not 1 <= num_global_heads <= num_heads:
        raise ValueError(
            f"num_global_heads must be between 1 and num_heads={num_heads} (equal is allowed), "
            f"received {num_global_heads}"
        )
    return num_global_heads


def noise_key(rng: RandomKey | None, training: bool) -> RandomKey:
    """Return the key of a layer's noise; at evaluation it names seed and sample only."""
    if rng is None:
        return RandomKey(int(torch.randint(2**62, (1,), device="cpu")) if training else 0)
    return rng if training else replace(rng, step=0)
