"""Feature maps of linear attention, from query and key vectors to features with positive products.

φ acts on the last dimension. `elu`, `relu` and `dpfp` are the same for queries and keys; `favor`
divides by an arbitrary positive factor (one per query, one for all keys of a head), because
normalised attention does not depend on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lit_probattn.attention.cache import LinearState
from lit_probattn.attention.draws import traceable
from lit_probattn.base.arguments import check_argument
from lit_probattn.base.graphs import is_transformed, written
from lit_probattn.base.torch_internals import outside_graphs
from lit_probattn.randomness import STREAM_FEATURES, RandomKey, philox4x32

FeatureName = Literal["elu", "relu", "dpfp", "favor"]
FeatureNorm = Literal["none", "sum"]


@dataclass(frozen=True)
class FeatureMap:
    """The kind of features, and whether they are normalised.

    Source: `elu` Katharopoulos et al., 2020: elu(x) + 1. `dpfp` Schlag et al., 2021, section 5.3:
    with r = relu([x, −x]) (2E values), φ = [r_i r_{i+1}, …, r_i r_{i+ν}] (indices modulo 2E).
    `favor` Choromanski et al., 2021, Lemma 1: exp(w_m · x′ − ‖x′‖²/2) with x′ = x / E^¼ and
    orthogonal w_m, whose products estimate exp(q · k / √E).
    Departs from the source: `favor` omits the factor F^-½ and the added 1e-4. Without `norm`, the
    keys of a head have one divisor, also in causal attention, where features of keys that are far
    below those of a later one underflow; decoding has the divisor of the keys so far.

    Args:
        name: kind of features.
        norm: `sum` divides features by their sum (0 stays 0), as in the released language-modelling
            code.
        dpfp_nu: ν of `dpfp`, from 1 to 2E − 1.
    """

    name: FeatureName = "elu"
    norm: FeatureNorm = "none"
    dpfp_nu: int = 1

    def num_features(self, head_dim: int, projection: Tensor | None) -> int:
        """Return F for heads of size E."""
        if projection is not None:
            return projection.shape[0]
        return 2 * head_dim * self.dpfp_nu if self.name == "dpfp" else head_dim

    def query(self, x: Tensor, projection: Tensor | None) -> Tensor:
        """Return query features: (…, E) -> (…, F)."""
        if projection is None:
            return self._finish(self._plain(x))
        exponents = _favor_exponents(x, projection)
        if self.norm == "sum":
            return exponents.softmax(-1)
        return torch.exp(exponents - exponents.detach().amax(-1, keepdim=True))

    def key(
        self,
        x: Tensor,
        projection: Tensor | None,
        key_mask: Tensor | None = None,
        state: LinearState | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return key features, (…, E) -> (…, F), and the log of their divisor, (B, H, 1, 1).

        The divisor is None for features without one: those that are normalised, and all but
        `favor`. It is −inf without real keys.

        Args:
            x: (B, H, L, E) or (B, H, K, L, E).
            projection: rows w_m, (F, E); None unless `favor`.
            key_mask: real keys, (B, L); others are ignored in the divisor.
            state: state of earlier keys, whose divisor and that of `x` are made equal.
        """
        if projection is None:
            return self._finish(self._plain(x)), None
        exponents = _favor_exponents(x, projection)
        if self.norm == "sum":
            return exponents.softmax(-1), None
        scale: Tensor | None = _largest(exponents.detach(), key_mask)
        if state is not None:
            new = x.shape[-2] > 0  # reading an encoder memory adds none
            scale = state.common_scale(scale) if new else state.log_scale
        if scale is not None:
            # A masked key may exceed the largest real key: it is dropped later, but must stay
            # finite.
            divisor = scale if x.dim() == 4 else scale[:, :, None]
            exponents = (exponents - divisor).clamp_max(60.0)
        return torch.exp(exponents), scale

    def _plain(self, x: Tensor) -> Tensor:
        if self.name == "elu":
            # torch.func does not support _EluPlusOne, and graphs of PyTorch 2.11 lose its gradient.
            if is_transformed() or written() is not None:
                return torch.where(x > 0, x + 1.0, torch.where(x > 0, 0.0, x).exp())
            features: Tensor = _EluPlusOne.apply(x)
            return features
        if self.name == "relu":
            return torch.relu(x)
        both = torch.relu(torch.cat([x, -x], -1))
        return torch.cat([both * both.roll(-i, -1) for i in range(1, self.dpfp_nu + 1)], -1)

    def _finish(self, features: Tensor) -> Tensor:
        if self.norm == "none":
            return features
        total = features.sum(-1, keepdim=True)
        return features / total.masked_fill(total == 0, 1.0)


class _EluPlusOne(torch.autograd.Function):
    """elu(x) + 1 = exp(min(x, 0)) + max(x, 0); backward needs only the result.

    Ten times faster on a CPU than `torch.nn.functional.elu`, whose expm1 is not vectorised.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        features = x.clamp_max(0.0).exp_().add_(x.clamp_min(0.0))
        ctx.save_for_backward(features)
        return features

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # The slope is 1 if the result is above 1, else the result itself.
        (features,) = ctx.saved_tensors
        slope: Tensor = grad * features.clamp_max(1.0)
        return slope


def check_feature_map(features: FeatureMap, head_dim: int) -> None:
    """Raise a ValueError for unknown names and for ν outside its range."""
    check_argument("feature_map", features.name, FeatureName)
    check_argument("feature_norm", features.norm, FeatureNorm)
    if not 1 <= features.dpfp_nu < 2 * head_dim:
        raise ValueError(
            f"dpfp_nu must be from 1 to 2·head_dim − 1 = {2 * head_dim - 1}, "
            f"received {features.dpfp_nu}"
        )


def default_num_features(head_dim: int) -> int:
    """Return E ln E rounded up, at least E, the default number of random features of `favor`.

    Source: Choromanski et al., 2021, Theorem 4 (the order E ln E).
    """
    return max(head_dim, math.ceil(head_dim * math.log(head_dim)))


@outside_graphs
def orthogonal_projection(normals: Tensor) -> Tensor:
    """Return F rows w_m from independent normals (F, 2, E): orthogonal in groups of E.

    Source: Choromanski et al., 2021, section 3 ("ORF"): each row alone is N(0, I).

    `normals[:, 0]` determines the directions, `normals[:, 1]` the lengths.
    """
    count, _, size = normals.shape
    blocks = []
    for start in range(0, count, size):
        block = normals[start : start + size, 0]
        orthogonal, triangular = torch.linalg.qr(block.mT)  # (E, f)
        blocks.append((orthogonal * triangular.diagonal().sign()).mT)
    return torch.cat(blocks) * normals[:, 1].norm(dim=-1, keepdim=True)


@outside_graphs
def feature_normals(key: RandomKey, num_features: int, head_dim: int) -> Tensor:
    """Return the normals of one draw, (F, 2, E) float64 on the CPU, the same on every rank.

    Counter (element, part, feature, 0), Box-Muller in float64. Draws do not depend on samples: all
    micro-batches and ranks of a step share their features.
    """
    rows = torch.arange(num_features).view(-1, 1, 1)
    parts = torch.arange(2).view(1, -1, 1)
    columns = torch.arange(head_dim).view(1, 1, -1)
    zero = torch.zeros((), dtype=torch.int64)
    x0, x1, _, _ = philox4x32((columns, parts, rows, zero), key.philox_key(STREAM_FEATURES))
    radius = torch.sqrt(-2.0 * torch.log((x0 + 1).to(torch.float64) * 2.0**-32))
    return radius * torch.cos(x1.to(torch.float64) * (2.0**-32 * 2.0 * math.pi))


@traceable(
    "random_features",
    "SymInt num_features, SymInt head_dim",
    lambda num_features, head_dim: torch.empty(num_features, head_dim, dtype=torch.float64),
)
def drawn_projection(key: RandomKey, num_features: int, head_dim: int) -> Tensor:
    """Return random features, (F, E) float64 on the CPU, as one operator in a graph."""
    return orthogonal_projection(feature_normals(key, num_features, head_dim))


def _favor_exponents(x: Tensor, projection: Tensor) -> Tensor:
    """Return w_m · x′ − ‖x′‖²/2, x′ = x / E^¼: (…, E) -> (…, F)."""
    x = x * x.shape[-1] ** -0.25
    return x @ projection.mT - x.square().sum(-1, keepdim=True) / 2.0


def _largest(exponents: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return the largest exponent of real keys: (B, H, [K,] L, F) -> (B, H, 1, 1)."""
    largest = exponents.amax(-1)  # (B, H, [K,] L)
    if largest.dim() == 4:
        largest = largest.amax(2)
    if key_mask is not None:
        largest = largest.masked_fill(~key_mask[:, None], float("-inf"))
    if largest.shape[-1] == 0:
        return largest.new_full((*largest.shape[:2], 1, 1), float("-inf"))
    return largest.amax(-1)[..., None, None]
