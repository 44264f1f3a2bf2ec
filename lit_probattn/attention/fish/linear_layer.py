"""The core and the layer of LFiSH, Hard LFiSH, GLFiSH and Hard GLFiSH."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from lit_probattn.attention.call import HeadCall, HeadLayout
from lit_probattn.attention.core import ParameterTable
from lit_probattn.attention.cost.counting import Cost
from lit_probattn.attention.cost.fish import Mixing, linear_fish
from lit_probattn.attention.fish.functions import ScoreNoise
from lit_probattn.attention.fish.layer import noise_key
from lit_probattn.attention.fish.linear import (
    LinearFiSH,
    LinearFiSHState,
    StateNormalizer,
)
from lit_probattn.attention.fish.mixing import (
    GlobalHeads,
    MixingBias,
    MixingOptions,
    NoiseOptions,
)
from lit_probattn.attention.layer import Attention, LayerOptions
from lit_probattn.attention.linear.features import FeatureMap
from lit_probattn.attention.linear.functions import LinearForm
from lit_probattn.attention.linear.layer import StateCore
from lit_probattn.base.arguments import Count, OnlyWith, Rate, by_name


@dataclass(frozen=True, kw_only=True)
class LinearFiSHOptions(NoiseOptions, MixingOptions):
    """Options of LFiSH and GLFiSH, of the mixing of states and of the noise.

    Args:
        mixer: `linear` or `mlp`.
        mixing_bias: biases of `mlp`; the last bias matters here.
        noise: `global` (one draw of E x E_v per sequence and global head, the same for all
            positions) or `none`.
        noise_at_eval: also draw noise at evaluation, from seed and sample, so that it repeats.
        eps: added to the normaliser.
    """

    mixer: Literal["linear", "mlp"] = "linear"
    mixing_bias: Annotated[bool, OnlyWith(mixer="mlp")] = True
    noise: Literal["none", "global"] = "global"
    noise_at_eval: Annotated[bool, OnlyWith(noise="global")] = False
    eps: Rate = 1e-6


@dataclass(frozen=True, kw_only=True)
class LinearFiSHArguments(LinearFiSHOptions, GlobalHeads, LayerOptions):
    """Arguments of `LinearFiSHAttention`, without grouped heads and rotary positions.

    Args:
        num_heads: H, local heads of queries and outputs.
        num_global_heads: G, heads of keys and values, at most H. None means ⌈H / head_ratio⌉.
    """

    num_global_heads: Count | None = None
    num_kv_heads: int | None = field(default=None, init=False)
    rotary_dim: int = field(default=0, init=False)


class LinearFiSHCore(StateCore):
    """Mixing and normaliser weights and noise scales; see `LinearFiSHAttention`."""

    makes = LinearFiSH
    options_class = LinearFiSHOptions

    def make_parameters(self, options: LinearFiSHOptions) -> None:
        """Create mixing weights, normaliser weights and noise scales."""
        layout = self.layout
        self.noise_kind, self.noise_at_eval = options.noise, options.noise_at_eval
        bias: MixingBias = "all" if options.mixer == "mlp" and options.mixing_bias else "none"
        self.mixing = options.make_mixing(layout.key, layout.out, bias, last_bias_matters=True)
        self.normalizer = StateNormalizer(self.mixing)
        self.form = LinearForm(FeatureMap(), eps=options.eps)
        self.noise_scale = options.make_scale(layout.key)

    def variant(self, call: HeadCall) -> LinearFiSH:
        """Return mixing, normaliser weights, state, and one draw for all positions."""
        values = self.mixing.values(self.noise_scale)
        noise = None
        if self.noise_kind != "none" and (self.training or self.noise_at_eval):
            noise = ScoreNoise("global", noise_key(call.rng, self.training), self.layout.key)
        return LinearFiSH(
            self.form,
            values,
            last_bias=self.mixing.last_bias,
            norm_mix=self.normalizer(values.weights[0]),
            noise=noise,
            state=call.cache if isinstance(call.cache, LinearFiSHState) else None,
        )

    def learned(self) -> dict[str, ParameterTable]:
        """Return mixing weights and noise scales."""
        return self.mixing.learned(self.noise_scale)

    def extra_repr(self) -> str:
        """Return the noise for `repr`."""
        return f"noise={self.noise_kind!r}"


class LinearFiSHAttention(Attention):
    """Linear attention with H local states that are mixed from G global states, in O(N).

    Source: FiSH, NeurIPS 2022, appendix A.6, which states that global KᵀV are formed and local ones
    sampled from them. With ψ(x) = elu(x) + 1, S_k = Σ_n ψ(key[k, n]) value[k, n]ᵀ:
        LFiSH   S_loc[j] = Σ_k p_kj (S_k + s_k ε_k)                     mixer=linear
        GLFiSH  S_loc = W_2 ReLU(W_1 (S + s ε) + b_1) + b_2, per cell   mixer=mlp
        out[j, i] = ψ(query[j, i])ᵀ S_loc[j] / (ψ(query[j, i])ᵀ Σ_k r_kj z_k + eps)
        noise=none makes them Hard.
    Departs from the source: everything beyond its one sentence is this package's definition; no
    code was released. The normaliser has separate weights r ≥ 0, so that it stays positive for free
    p: |p| if mixer is linear, else the softplus of parameters, initially 1/G. Attention dropout
    drops whole values, as in linear attention.

    The arguments are the fields of `LinearFiSHOptions`, `GlobalHeads` and `LayerOptions`, without
    grouped heads and rotary positions. `dropout` drops values; `backend`: `blockwise` is the O(N)
    form, `triton` (mixer=linear) its kernels.

    Raises:
        ValueError: more global than local heads, or choices that exclude each other; see also
            `Attention`.
    """

    core: LinearFiSHCore
    options: LinearFiSHArguments
    core_class = LinearFiSHCore

    @by_name(LinearFiSHArguments)
    def __init__(self, options: LinearFiSHArguments) -> None:
        self.build(options)

    @property
    def num_global_heads(self) -> int:
        """G."""
        return self.options.count(self.options.num_heads)

    def head_layout(self) -> HeadLayout:
        """Return a layout with global key and value heads."""
        shared = self.num_global_heads
        return replace(super().head_layout(), query=self.num_heads, key=shared, value=shared)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost of the O(N) form without a causal mask, by FiSH appendix D's rule."""
        mixing, noise = self.core.mixing, self.core.noise_kind
        bias = "none" if mixing.last_bias is None else "all"
        return linear_fish(self.sizes(seq_len), Mixing(mixing.widths, mixing.mixer, bias, noise))

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"{super().extra_repr()}, num_global_heads={self.num_global_heads}"
