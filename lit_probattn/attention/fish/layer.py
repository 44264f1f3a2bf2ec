"""The core and the layer of FiSH, Hard FiSH, GFiSH, Hard GFiSH, MiSH and Hard MiSH."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import torch

from lit_probattn.attention.call import HeadCall, HeadLayout, key_or_fresh
from lit_probattn.attention.core import Core, ParameterTable
from lit_probattn.attention.cost.counting import Cost
from lit_probattn.attention.cost.fish import Mixing, fish, mixed_heads
from lit_probattn.attention.fish.functions import (
    FiSH,
    NoisePosition,
    ScalePosition,
    ScoreNoise,
)
from lit_probattn.attention.fish.head_mixing import HeadMixingCore, HeadMixingOptions, MixOn
from lit_probattn.attention.fish.mixing import (
    NOISY,
    GlobalHeads,
    MixingBias,
    NoiseOptions,
)
from lit_probattn.attention.layer import Attention, LayerOptions
from lit_probattn.base.arguments import OnlyWith, by_name
from lit_probattn.base.graphs import written
from lit_probattn.randomness import RandomKey


@dataclass(frozen=True, kw_only=True)
class FiSHOptions(NoiseOptions, HeadMixingOptions):
    """Options of FiSH's scores, of the mixing and of the noise.

    Args:
        noise_position: noise on `raw` scores (language model) or on `scaled` scores (translation).
        noise_at_eval: also draw noise at evaluation, from seed and sample, so that it repeats.
        scale_position: 1/√E `after` the mixing (language model) or `before` it (the rest).

    Raises:
        ValueError: a choice is unknown, or noise and scale exclude each other.
    """

    noise_position: NoisePosition = "raw"
    noise_at_eval: Annotated[bool, OnlyWith(noise=NOISY)] = False
    scale_position: ScalePosition = "after"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix_on == "scores":
            if self.noise_position == "scaled" and self.scale_position == "after":
                raise ValueError(
                    "noise_position=scaled needs scale_position=before, received after: noise is "
                    "added before the mixing, so the scale must be applied before it as well"
                )
            return
        for name, value, none in (
            ("noise", self.noise, "none"),
            ("noise_position", self.noise_position, "raw"),
        ):
            if value != none:
                raise ValueError(
                    f"mix_on={self.mix_on} has no global scores to add noise to, received "
                    f"{name}={value}: set {name}={none}"
                )
        if self.scale_position != "after":
            raise ValueError(
                f"mix_on={self.mix_on} mixes before the products, so the scale is applied after: "
                f"set scale_position=after, received {self.scale_position}"
            )


@dataclass(frozen=True, kw_only=True)
class FiSHArguments(FiSHOptions, GlobalHeads, LayerOptions):
    """Arguments of `FiSHAttention`, without grouped heads.

    Args:
        num_heads: H, local heads of values and outputs.
    """

    num_kv_heads: int | None = field(default=None, init=False)


class FiSHCore(Core):
    """Mixing weights and noise scales of H local heads, mixed from G global score maps.

    The layout has G query and key heads, H value and output heads; see `FiSHAttention`.
    """

    makes = FiSH
    options_class = FiSHOptions

    def make_parameters(self, options: FiSHOptions) -> None:
        """Create mixing weights and noise scales."""
        layout = self.layout
        self.noise_kind, self.noise_at_eval = options.noise, options.noise_at_eval
        self.noise_position: NoisePosition = options.noise_position
        self.scale_position: ScalePosition = options.scale_position
        self.mixing = options.make_mixing(
            layout.query, layout.out, options.mixing_bias, last_bias_matters=False
        )
        self.noise_scale = options.make_scale(layout.query)

    # ------------------------------------------------------------------ one call
    def variant(self, call: HeadCall) -> FiSH:
        """Return mixing weights, switches, and the noise of the call."""
        values, noise = self.mixing.values(self.noise_scale), None
        if self.draws_noise:
            key, count = noise_key(call.rng, self.training), values.num_noise_maps(self.layout.out)
            noise = ScoreNoise(self.noise_kind, key, count, call.first_row)
        switches = (self.scale_position, self.noise_position)
        return FiSH(values, self.layout.out, *switches, noise)

    @property
    def draws_noise(self) -> bool:
        """Whether a call in the current mode draws noise."""
        return self.noise_kind != "none" and (self.training or self.noise_at_eval)

    def learned(self) -> dict[str, ParameterTable]:
        """Return mixing weights and noise scales."""
        return self.mixing.learned(self.noise_scale)

    def extra_repr(self) -> str:
        """Return noise and scale for `repr`."""
        return f"noise={self.noise_kind!r}, scale_position={self.scale_position!r}"


class FiSHAttention(Attention):
    """Attention with H local score maps that are mixed from G global score maps.

    Source: FiSH, NeurIPS 2022, Eq. (8)-(10), section 2.4; appendix D (cost).
        G_k = query_k key_kᵀ,  k = 1 … G
        FiSH    A_j = Σ_k p_kj (G_k + s_k ε_k)                          mixer=linear
        MiSH    the same p_k for every j                                mixer=shared
        GFiSH   a = W_2 ReLU(W_1 (g + noise) + b_1), pointwise          mixer=mlp
        attn_weights_j = softmax(A_j / √E + bias_j)
        noise=none makes them Hard.
    Departs from the source: noise per global head, shared by local heads (the released code;
    Eq. (8) as printed is noise=local); s_k is the square of a parameter; no noise at evaluation by
    default; the last bias of a mixing, which softmax cancels, is optional; queries or keys may be
    mixed instead of scores, entry by entry, as in the released code (`mix_on`). Eq. (8) is not a
    draw from the admixture of Eq. (7), only its relaxation with the same mean.

    The arguments are the fields of `FiSHOptions`, `GlobalHeads` and `LayerOptions`, without grouped
    heads. `backend`: `sdpa` supports Hard FiSH and Hard MiSH, `triton` all but mixer=relu_sum and
    more than two layers; both support mixing of queries or keys. Rotary positions rotate heads
    before the mixing.

    Raises:
        ValueError: more global than local heads, or choices that exclude each other; see also
            `Attention`.
    """

    core: FiSHCore | HeadMixingCore
    options: FiSHArguments
    core_class = FiSHCore

    @by_name(FiSHArguments)
    def __init__(self, options: FiSHArguments) -> None:
        self.build(options)

    def make_core(self, core: type[Core]) -> Core:
        """Return the core, which has another class if queries or keys are mixed."""
        return super().make_core(core if self.mix_on == "scores" else HeadMixingCore)

    @property
    def num_global_heads(self) -> int:
        """G."""
        return self.options.count(self.options.num_heads)

    @property
    def mix_on(self) -> MixOn:
        """The mixed tensors: `scores`, `query` or `key`."""
        return self.options.mix_on

    @property
    def mixing_bias(self) -> MixingBias:
        """Layers of the mixing that have biases."""
        return self.options.mixing_bias

    def head_layout(self) -> HeadLayout:
        """Return a layout with G mixed heads and H heads of everything else."""
        g, h = self.num_global_heads, self.num_heads
        query, key = (h if self.mix_on == other else g for other in ("key", "query"))
        return replace(super().head_layout(), query=query, key=key, value=h)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost by FiSH appendix D; multiply-adds are those of the current mode."""
        sizes, mixing = self.sizes(seq_len), self.core.mixing
        kind = Mixing(mixing.widths, mixing.mixer, self.mixing_bias)
        if isinstance(self.core, HeadMixingCore):
            return mixed_heads(sizes, kind)
        kind = kind._replace(noise=self.core.noise_kind)
        return fish(sizes, kind, draws_noise=self.core.draws_noise)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        mixed = "" if self.mix_on == "scores" else f", mix_on={self.mix_on!r}"
        return f"{super().extra_repr()}, num_global_heads={self.num_global_heads}{mixed}"


def noise_key(rng: RandomKey | None, training: bool) -> RandomKey:
    """Return the key of a layer's noise; at evaluation it contains only seed and sample."""
    if training:
        return key_or_fresh(rng)
    if rng is None:  # in a compiled graph, operators draw from seeds that are tensors
        compiled = written() == "compiled"
        rng = RandomKey(torch.zeros(1, dtype=torch.int64, device="cpu") if compiled else 0)
    return replace(rng, step=0)
