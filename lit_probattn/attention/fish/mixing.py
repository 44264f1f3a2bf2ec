"""Head mixing of FiSH, from global score maps to local score maps, and the scale of its noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from lit_probattn.attention.core import ParameterTable
from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.attention.variant import NoiseKind as NoiseKind
from lit_probattn.base.arguments import Count, NotNegative, OnlyWith, Options, Range

Mixer = Literal["linear", "shared", "mlp", "relu_sum"]
MixingConstraint = Literal["relaxed", "simplex"]
MixingInit = Literal["torch_linear", "normal_0.02", "trunc_normal_0.02", "copy"]
MixingBias = Literal["none", "hidden", "all"]
SigmaShape = Literal["per_global", "scalar"]

NOISY = ("global", "local", "local_global")


@dataclass(frozen=True, kw_only=True)
class MixingOptions(Options):
    """Options of a head mixing.

    Args:
        mixer: `linear`, `shared`, `mlp` (GFiSH as released) or `relu_sum` (as written).
        mixer_ratios: hidden widths of `mlp` as ⌈H / ratio⌉; None means one hidden layer of H.
        mixing: `relaxed` (all experiments of the paper), or `simplex`: p_kj ≥ 0, Σ_k p_kj = 1.
        mixing_init: initial weights: `torch_linear` (translation), `normal_0.02` (language model),
            `trunc_normal_0.02` (images), or `copy`: local head j is global head ⌊jG/H⌋.
    """

    mixer: Mixer = "linear"
    mixer_ratios: Sequence[float] | None = None
    mixing: MixingConstraint = "relaxed"
    mixing_init: Annotated[MixingInit, OnlyWith(mixing="relaxed")] = "torch_linear"

    def make_mixing(
        self, num_global_heads: int, num_heads: int, bias: MixingBias, *, last_bias_matters: bool
    ) -> HeadMixing:
        """Return the mixing from G heads to H."""
        return HeadMixing(
            num_global_heads,
            num_heads,
            mixer=self.mixer,
            constraint=self.mixing,
            init=self.mixing_init,
            bias=bias,
            last_bias_matters=last_bias_matters,
            ratios=(1.0,) if self.mixer_ratios is None else tuple(self.mixer_ratios),
        )


@dataclass(frozen=True, kw_only=True)
class NoiseOptions(Options):
    """Options of the noise of global heads.

    Args:
        noise: `global`, `local`, `local_global` or `none`.
        noise_scale: initial s, positive.
        sigma_shape: one s per global head, or one for all.
    """

    noise: NoiseKind = "global"
    noise_scale: Annotated[NotNegative, OnlyWith(noise=NOISY)] = 0.01
    sigma_shape: Annotated[SigmaShape, OnlyWith(noise=NOISY)] = "per_global"

    def make_scale(self, num_global_heads: int) -> NoiseScale | None:
        """Return the noise scale of G heads; None without noise."""
        if self.noise == "none":
            return None
        return NoiseScale(num_global_heads, shape=self.sigma_shape, start=self.noise_scale)


@dataclass(frozen=True, kw_only=True)
class GlobalHeads(Options):
    """Options that determine the number of global heads.

    Args:
        num_global_heads: G, heads of queries and keys, or of the tensors in `mix_on`, at most H.
            None means ⌈H / head_ratio⌉.
        head_ratio: local heads per global head, if `num_global_heads` is None; adapts to
            `num_heads` in models whose stages have different heads.
    """

    num_global_heads: Count | None = None
    head_ratio: Annotated[float, Range(1), OnlyWith(num_global_heads=None)] = 2.0

    def count(self, num_heads: int) -> int:
        """Return G.

        Raises:
            ValueError: G exceeds H.
        """
        if self.num_global_heads is None:
            return math.ceil(num_heads / self.head_ratio)
        if self.num_global_heads > num_heads:
            raise ValueError(
                f"num_global_heads must be at most num_heads={num_heads}, received "
                f"{self.num_global_heads}"
            )
        return self.num_global_heads


@dataclass(frozen=True)
class MixingValues:
    """The tensors of a mixing, as inputs of engines.

    Args:
        mixer: function of the global maps; see `HeadMixing`.
        weights: one matrix per layer, (outputs, inputs). The first has G inputs; the last has H
            outputs (1 for `shared`).
        biases: biases of the layers before a ReLU, or None; one entry less than `weights`.
        noise_scale: s, (G,). None without noise.
    """

    mixer: Mixer
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    noise_scale: Tensor | None

    @property
    def is_linear(self) -> bool:
        """Whether local maps are sums of global maps."""
        return self.mixer in ("linear", "shared")

    @property
    def widths(self) -> list[int]:
        """Sizes of the layers, starting with G."""
        return [self.weights[0].shape[1], *(weight.shape[0] for weight in self.weights)]

    def num_noise_maps(self, num_heads: int) -> int:
        """Return the units of the first layer, which are the maps of one draw of local noise."""
        return num_heads if self.mixer == "shared" else self.widths[1]

    def tensors(self) -> list[Tensor]:
        """Return every tensor, in a fixed order; `with_tensors` is the inverse."""
        biases = [b for b in self.biases if b is not None]
        return [*self.weights, *biases, *([] if self.noise_scale is None else [self.noise_scale])]

    def with_tensors(self, tensors: Sequence[Tensor]) -> MixingValues:
        """Return the same mixing with other tensors, in the order of `tensors`."""
        found = iter(tensors)
        return MixingValues(
            mixer=self.mixer,
            weights=tuple(next(found) for _ in self.weights),
            biases=tuple(None if b is None else next(found) for b in self.biases),
            noise_scale=None if self.noise_scale is None else next(found),
        )

    def to(self, dtype: torch.dtype) -> MixingValues:
        """Return the same mixing in another dtype."""
        return self.with_tensors([t.to(dtype) for t in self.tensors()])

    def scaled(self, output: float, noise: float) -> MixingValues:
        """Return the mixing with its last weight times `output` and its noise times `noise`."""
        last = self.weights[-1] * output if output != 1.0 else self.weights[-1]
        scale = self.noise_scale
        if scale is not None and noise != 1.0:
            scale = scale * noise
        return replace(self, weights=(*self.weights[:-1], last), noise_scale=scale)


class HeadMixing(nn.Module):
    """Parameters of the pointwise function from G global maps to H local maps.

    Source: FiSH, NeurIPS 2022, Eq. (8)-(10), section 2.4, remark 3; g is the vector of the G
    global scores of one pair, W_1 = `weights[0]` (outputs first, so row j holds p_1j … p_Gj):
        linear    a_j = Σ_k p_kj g_k                               FiSH, Hard FiSH
        shared    a_j = Σ_k p_k g_k, the same for all j            MiSH, Hard MiSH
        mlp       a = W_2 ReLU(W_1 g + b_1) [+ b_2]                GFiSH as released
        relu_sum  a = W_2 u,  u_j = Σ_k ReLU(p_kj g_k)             GFiSH as written
    Departs from the source: `mlp` may have several hidden layers (the image code); the linear
    network of the written form is one H x H map.

    Args:
        num_global_heads: G.
        num_heads: H.
        mixer: see above.
        constraint: `relaxed`, or `simplex`: p_kj ≥ 0 and Σ_k p_kj = 1, by a softmax of parameters
            that are initially 0.
        init: distribution of the initial weights; `copy` initialises local head j as global head
            ⌊jG/H⌋.
        bias: `none`; `hidden`: in the layers before a ReLU; `all`: also in the last layer.
        last_bias_matters: False if a softmax cancels the bias of the last layer: it then exists
            only for checkpoints and counts, and its gradient is exactly zero.
        ratios: hidden widths of `mlp` as ⌈H / ratio⌉.

    Raises:
        ValueError: a choice is unknown, or two choices exclude each other.
    """

    def __init__(
        self,
        num_global_heads: int,
        num_heads: int,
        *,
        mixer: Mixer,
        constraint: MixingConstraint = "relaxed",
        init: MixingInit = "torch_linear",
        bias: MixingBias = "hidden",
        last_bias_matters: bool = False,
        ratios: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__()
        self.num_global_heads, self.num_heads = num_global_heads, num_heads
        self.mixer: Mixer = mixer
        self.constraint: MixingConstraint = constraint
        self.init: MixingInit = init
        self._check_combination(ratios)
        self.widths = self._widths(ratios)
        self.weights = nn.ParameterList(torch.empty(b, a) for a, b in pairwise(self.widths))
        hidden = self.widths[1:-1] if bias != "none" and mixer == "mlp" else []
        self.biases = nn.ParameterList(torch.empty(width) for width in hidden)
        self.last_bias: nn.Parameter | None = None
        if bias == "all":
            self.last_bias = nn.Parameter(torch.empty(self.widths[-1]))
        self.last_bias_matters = last_bias_matters
        self.reset_parameters()

    def _check_combination(self, ratios: Sequence[float]) -> None:
        if self.constraint == "simplex" and self.mixer not in ("linear", "shared"):
            raise ValueError(
                f"mixing=simplex is for the mixers linear and shared, received {self.mixer}: "
                "generalized mixing is always relaxed"
            )
        if self.constraint == "simplex" and self.init == "copy":
            raise ValueError(
                "mixing=simplex cannot start as a copy of a head (its weights are positive); use "
                "mixing=relaxed or another mixing_init"
            )
        if self.mixer != "mlp" and tuple(ratios) != (1.0,):
            raise ValueError(f"mixer_ratios is for mixer=mlp, received mixer={self.mixer}")
        if not ratios or min(ratios) <= 0:
            raise ValueError(f"mixer_ratios must be positive numbers, received {list(ratios)}")
        if self.init == "copy" and self.mixer in ("shared", "relu_sum"):
            raise ValueError(
                f"mixing_init=copy is for the mixers linear and mlp, received {self.mixer}: one "
                "weight vector for all heads, or weights inside a ReLU, cannot copy heads"
            )

    def _widths(self, ratios: Sequence[float]) -> list[int]:
        g, h = self.num_global_heads, self.num_heads
        if self.mixer in ("linear", "shared"):
            return [g, h if self.mixer == "linear" else 1]
        if self.mixer == "relu_sum":
            return [g, h, h]
        hidden = [math.ceil(h / ratio) for ratio in ratios]
        if self.init == "copy" and min(hidden) < 2 * g:
            raise ValueError(
                "mixing_init=copy with mixer=mlp needs hidden layers at least twice as wide as "
                f"num_global_heads={g}, received widths {hidden}"
            )
        return [g, *hidden, h]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the weights as `init` specifies."""
        biases = [*self.biases, *([] if self.last_bias is None else [self.last_bias])]
        for bias in biases:
            bias.zero_()
        if self.constraint == "simplex":
            self.weights[0].zero_()
            return
        for index, weight in enumerate(self.weights):
            bound = weight.shape[1] ** -0.5
            if self.init == "normal_0.02":
                weight.normal_(0.0, 0.02)
            elif self.init == "trunc_normal_0.02":
                nn.init.trunc_normal_(weight, std=0.02)
            else:
                weight.uniform_(-bound, bound)
                if self.init == "torch_linear" and index < len(biases):
                    biases[index].uniform_(-bound, bound)
        if self.init == "copy":
            self._copy_heads()

    def _copy_heads(self) -> None:
        """Initialise local head j as global head ⌊jG/H⌋; two layers store g and -g in ReLUs.

        Other hidden units than the 2G required keep their random inputs and get zero outputs, so
        that they can learn.
        """
        g, h = self.num_global_heads, self.num_heads
        source = torch.arange(h) * g // h
        last = self.weights[-1].zero_()
        if self.mixer == "linear":
            last[torch.arange(h), source] = 1.0
            return
        first = self.weights[0]
        first[: 2 * g] = torch.cat([torch.eye(g), -torch.eye(g)])
        for middle in list(self.weights)[1:-1]:
            middle[: 2 * g] = 0.0
            middle[: 2 * g, : 2 * g] = torch.eye(2 * g)
        last[torch.arange(h), source] = 1.0
        last[torch.arange(h), g + source] = -1.0

    def values(self, noise_scale: NoiseScale | None) -> MixingValues:
        """Return the tensors as inputs of engines, without the last bias.

        Weights and noise scales are at least float32, like scores.
        """
        weights = [weight.to(compute_dtype(weight)) for weight in self.weights]
        if self.constraint == "simplex":
            weights[0] = weights[0].softmax(-1)
        if self.last_bias is not None and not self.last_bias_matters:
            # A zero gradient instead of None: some tools expect one for every parameter.
            weights[-1] = weights[-1] + 0.0 * self.last_bias[:, None]
        missing: tuple[Tensor | None, ...] = (None,) * (len(weights) - 1)
        scale = None if noise_scale is None else noise_scale()
        return MixingValues(self.mixer, tuple(weights), tuple(self.biases) or missing, scale)

    def learned(self, noise_scale: NoiseScale | None) -> dict[str, ParameterTable]:
        """Return s, and the weights p_kj of global heads if units are local heads."""
        found = {}
        if self.mixer != "mlp":
            weight = self.values(None).weights[0]
            found["mixing"] = ParameterTable(
                weight, "mixing weight p", "global head", is_matrix=True
            )
        if noise_scale is not None:
            scales = noise_scale()[None]
            found["noise_scale"] = ParameterTable(
                scales, "noise scale s", "global head", of_layer=True
            )
        return found

    def extra_repr(self) -> str:
        """Return the function and its widths for `repr`."""
        return f"mixer={self.mixer!r}, widths={self.widths}, mixing={self.constraint!r}"


class NoiseScale(nn.Module):
    """Standard deviations s_k of the score noise, one per global head or one for all heads.

    Source: FiSH, NeurIPS 2022, Eq. (8): s_k = σ_k multiplies ε.
    Departs from the source: s = θ², as in the released code, where θ is initially 0.1.

    Args:
        num_global_heads: G.
        shape: `per_global` or `scalar`.
        start: initial s.

    Raises:
        ValueError: a choice is unknown, or `start` is not positive (s = 0 is a stationary point).
    """

    def __init__(
        self,
        num_global_heads: int,
        *,
        shape: SigmaShape = "per_global",
        start: float = 0.01,
    ) -> None:
        super().__init__()
        if not 0.0 < start < float("inf"):
            raise ValueError(
                f"noise_scale must be positive, received {start}: at 0 its gradient vanishes, so "
                "it stays 0; use noise=none for a model without noise"
            )
        self.num_global_heads = num_global_heads
        size = num_global_heads if shape == "per_global" else 1
        self.theta = nn.Parameter(torch.full((size,), math.sqrt(start)))

    def forward(self) -> Tensor:
        """Return s, (G,)."""
        scale = self.theta.to(compute_dtype(self.theta)).square()
        return scale.expand(self.num_global_heads)
