"""FiSH attention, equation and normal form: global score maps, their noise and mixing.

Mixings are in `mixing.py`; the parameters and the layer are in `layer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.fish.mixing import MixingValues, NoiseKind
from lit_probattn.attention.masks import Block, span
from lit_probattn.attention.numerics import compute_dtype, map_heads
from lit_probattn.attention.variant import Layers, MapFunction, Noise, Scores, Variant
from lit_probattn.attention.variant import ScoreNoise as ScoreNoise

ScalePosition = Literal["before", "after"]

NoisePosition = Literal["raw", "scaled"]


@dataclass(frozen=True)
class FiSH(Variant):
    """Attention with H local score maps that are mixed from G global score maps.

    Args:
        mixing: weights and noise scales.
        num_heads: H.
        scale_position: whether 1/√E is applied before or after the mixing.
        noise_position: `raw`: s_k is in units of Q·K; `scaled`: in units of Q·K/√E.
        noise: the draw, or None.
    """

    name = "fish"
    kind = "maps"
    kernels = ("fish/fish", "fish/gfish")

    mixing: MixingValues
    num_heads: int
    scale_position: ScalePosition = "after"
    noise_position: NoisePosition = "raw"
    noise: ScoreNoise | None = None

    @property
    def score_maps(self) -> int:  # type: ignore[override]
        """Two if the mixing has hidden units, else one."""
        return 1 if self.mixing.is_linear else 2

    def factors(self, call: HeadCall) -> tuple[float, float, float]:
        """Return the factors on global scores, on local scores and on the noise."""
        scale = call.query.shape[-1] ** -0.5 * call.scale_ratio()
        if self.scale_position == "after":
            return 1.0, scale, 1.0
        return scale, 1.0, 1.0 if self.noise_position == "scaled" else scale

    def scores(self, call: HeadCall) -> Tensor:
        """Return the scores of all local heads, (B, H, N, L).

        Source: FiSH, NeurIPS 2022, Eq. (8)-(10): G_k = Q_k K_kᵀ, local mixing, 1/√E.
        Departs from the source: 1/√E after the mixing (the language model) or before it; noise on
        raw or on scaled scores. Noise is always added before mixing and mask.
        """
        on_global, on_local, on_noise = self.factors(call)
        block = Block(span(0, call.query.shape[2]), span(0, call.key.shape[2]))
        mixing = self.mixing.to(call.query.dtype).scaled(1.0, on_noise)
        global_scores = call.query @ call.key.mT * on_global
        local = local_scores(global_scores, mixing, self.noise, block) * on_local
        return local.expand(-1, self.num_heads, -1, -1)

    def lower(self, call: HeadCall, *, own_keys: bool = False) -> Scores:
        """Return a sum of the global maps, or a function of them.

        1/√E becomes part of the factor on the products, and of the noise if it is applied later.
        """
        on_global, on_local, on_noise = self.factors(call)
        mixing, noise = self.mixing.to(compute_dtype(call.query)), self.noise
        query, key = call.query, call.key[:, :, None]
        if not mixing.is_linear:
            mixing = mixing.scaled(on_local, on_noise)
            if noise is None:
                mixing = replace(mixing, noise_scale=None)

            def local(maps: Tensor, block: Block, *tensors: Tensor) -> Tensor:
                return local_scores(maps, mixing.with_tensors(tensors), noise, block)

            layers = None
            if mixing.mixer == "mlp" and len(mixing.weights) == 2:
                first, second = mixing.weights
                added = added_noise(first, mixing.noise_scale, noise)
                layers = Layers(first, mixing.biases[0], second, added)
            function = MapFunction(local, tuple(mixing.tensors()), layers)
            return Scores(query, key, on_global, reduce=function)
        (weight,), scale = mixing.weights, mixing.noise_scale
        added = added_noise(weight, None if scale is None else scale * (on_noise * on_local), noise)
        return Scores(query, key, on_global * on_local, coef=weight, reduce="sum", noise=added)

    def needs(self) -> dict[str, str]:
        """Return the features that a nonlinear mixing and noise require."""
        found: dict[str, str] = {}
        mixer = f"mixer={self.mixing.mixer}"
        if not self.mixing.is_linear:
            found["function"] = mixer
            if self.mixing.mixer == "relu_sum" or len(self.mixing.weights) > 2:
                found["function without layers"] = f"{mixer}, {len(self.mixing.weights)} matrices"
        if self.noise is not None:
            kind = self.noise.kind
            found["map noise" if kind == "global" else "head noise"] = f"noise={kind}"
        return found

    def sizes(self, call: HeadCall) -> dict[str, int]:
        """Return the numbers of global maps, of their dimensions, and of hidden units."""
        widths = self.mixing.widths
        return {
            "global maps": widths[0],
            "entries of all global maps": widths[0] * call.query.shape[-1],
            "hidden units": widths[1] if len(widths) == 3 else 0,
        }

    @property
    def kernel(self) -> str:
        """The family of kernels for this mixing."""
        return self.kernels[1 if len(self.mixing.widths) == 3 else 0]


def local_scores(
    global_scores: Tensor, mixing: MixingValues, noise: ScoreNoise | None, block: Block
) -> Tensor:
    """Return the local scores of a block from its global scores, before scale, bias and mask.

    Source: FiSH, NeurIPS 2022, Eq. (8)-(10), section 2.4; g̃_k = g_k + s_k ε_k:
        linear, shared   a_j = Σ_k p_kj g̃_k
        mlp              a = W_2 ReLU(W_1 g̃ + b_1)
        relu_sum         a = W_2 u,  u_j = Σ_k ReLU(p_kj g̃_k)
    Departs from the source: `local` noise (Eq. (8) as printed) and `local_global` noise are added
    to the first layer as one normal per unit with the standard deviation of the sum over k,
    c_j = Σ_k p_kj s_k or √(Σ_k p_kj² s_k²): the same distribution with fewer draws. It is Eq. (8),
    whose mean equals the mean of the admixture in Eq. (7), but which is not a draw from it.

    Args:
        global_scores: g, (B, G, n, l).
        mixing: weights and noise scales.
        noise: the draw, or None.
        block: queries and keys of the block.

    Returns:
        (B, H, n, l); one map for all heads, (B, 1, n, l), if the mixing is shared and all heads are
        equal.
    """
    kind = "none" if noise is None else noise.kind
    if noise is not None and kind == "global":
        assert mixing.noise_scale is not None
        draw = noise.draw(global_scores, block, global_scores.shape[1])
        global_scores = torch.addcmul(global_scores, mixing.noise_scale[:, None, None], draw)
    first, *rest = mixing.weights
    if mixing.mixer == "relu_sum":
        units = _relu_sum(global_scores, mixing, noise, block)
    else:
        units = map_heads(first, global_scores)
        if noise is not None and kind != "global":
            assert mixing.noise_scale is not None
            draw = noise.draw(global_scores, block, noise.num_maps)
            deviation = local_deviation(first, mixing.noise_scale, kind)
            units = torch.addcmul(units, deviation[:, None, None], draw)
    for weight, bias in zip(rest, mixing.biases, strict=True):
        if mixing.mixer == "mlp":
            units = torch.relu(units if bias is None else units + bias[:, None, None])
        units = map_heads(weight, units)
    return units


def added_noise(weight: Tensor, scale: Tensor | None, noise: ScoreNoise | None) -> Noise | None:
    """Return the noise of a first layer, on the maps that it mixes or on its units."""
    if noise is None:
        return None
    assert scale is not None
    if noise.kind == "global":
        return Noise(scale, noise, weight.shape[1])
    return Noise(local_deviation(weight, scale, noise.kind), noise, noise.num_maps, per_head=True)


def local_deviation(weight: Tensor, noise_scale: Tensor, kind: NoiseKind) -> Tensor:
    """Return the standard deviation of the local noise of every unit of the first layer, (H,)."""
    terms = weight * noise_scale
    # vector_norm has a zero gradient, not NaN, for units whose weights are all zero.
    return terms.sum(-1) if kind == "local" else torch.linalg.vector_norm(terms, dim=-1)


def _relu_sum(
    global_scores: Tensor, mixing: MixingValues, noise: ScoreNoise | None, block: Block
) -> Tensor:
    """Return u_j = Σ_k ReLU(p_kj g̃_k), (B, H, n, l), by matrix products.

    ReLU(p x) = ReLU(p) ReLU(x) + ReLU(-p) ReLU(-x).
    """
    weight = mixing.weights[0]
    if noise is None or noise.kind == "global":
        positive = map_heads(torch.relu(weight), torch.relu(global_scores))
        return positive + map_heads(torch.relu(-weight), torch.relu(-global_scores))
    assert mixing.noise_scale is not None
    batch, num_global, rows, cols = global_scores.shape
    units = weight.shape[0]
    own = 1 if noise.kind == "local" else num_global  # draws of a unit
    draw = noise.draw(global_scores, block, units * own).view(batch, units, own, rows, cols)
    noisy = torch.addcmul(global_scores[:, None], mixing.noise_scale[:, None, None], draw)
    signed = torch.relu(noisy * weight.sign()[:, :, None, None])  # (B, H, G, n, l)
    return (weight.abs()[:, None] @ signed.flatten(3)).view(batch, units, rows, cols)
