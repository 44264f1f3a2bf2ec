"""Variants of other papers for comparison, each defined by the hooks of `Attention`.

They are baselines; the experiments of their papers are not reproduced. P is the softmax over the
keys of q_i · k_j / √E, with query i, key j, and heads o and h.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lit_probattn.attention.call import HeadLayout
from lit_probattn.attention.cost.counting import Cost, product_flops
from lit_probattn.attention.cost.own import with_gate
from lit_probattn.attention.layer import Attention, LayerOptions
from lit_probattn.attention.numerics import map_heads
from lit_probattn.attention.softmax import SoftmaxArguments, SoftmaxAttention


def _dots(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT / query.shape[-1] ** 0.5


class TalkingHeadsAttention(Attention):
    """Attention whose heads are mixed by constant matrices before and after the softmax.

    Source: Shazeer et al., 2020 (arXiv 2003.02436), section 3.
        s_o = Σ_h before_oh q_h · k_h / √E,    w_o = Σ_h after_oh softmax(s_h)
    Departs from the source: one number of heads throughout; both matrices are initially the
    identity. Without `after` it is `FiSHAttention` with H global heads, which has kernels.
    """

    def build(self, options: LayerOptions) -> None:
        """Add the two matrices."""
        super().build(options)
        self.before, self.after = (nn.Parameter(torch.eye(self.num_heads)) for _ in range(2))

    def reference_scores(self, query: Tensor, key: Tensor, *positions: Tensor) -> Tensor:
        """Return dot products mixed by `before`."""
        return map_heads(self.before.to(query.dtype), _dots(query, key))

    def mix_weights(self, weights: Tensor) -> Tensor:
        """Return the weights mixed by `after`."""
        return map_heads(self.after.to(weights.dtype), weights)


class DCMHAttention(Attention):
    """Attention whose heads are composed before and after the softmax, depending on query and key.

    Source: Xiao et al., 2024 (arXiv 2405.08553), dynamically composable multi-head attention.
        compose(a)_o(i, j) = Σ_h base_oh a_h + out_o(i) Σ_h in_h(i) a_h + tanh(g_o(i)) a_o
                                             + out_o(j) Σ_h in_h(j) a_h + tanh(g_o(j)) a_o
        w = compose(softmax(compose(q · k / √E)))
    Departs from the source: in, out and g are linear in the queries and keys of all heads (in the
    paper, in and out are a normalised two-layer network), of rank 1; `base` is initially the
    identity.
    """

    def build(self, options: LayerOptions) -> None:
        """Add the constant matrices, and the projections for dynamic ones."""
        super().build(options)
        heads, width = self.num_heads, self.num_heads * self.head_dim
        self.base = nn.Parameter(torch.eye(heads).repeat(2, 1, 1))
        self.maps = nn.Parameter(0.1 * width**-0.5 * torch.randn(2, 2, width, 3 * heads))

    def reference_scores(self, query: Tensor, key: Tensor, *positions: Tensor) -> Tensor:
        """Return composed dot products."""
        return self._composed(0, _dots(query, key), query, key)

    def mix_weights(self, weights: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return composed weights."""
        return self._composed(1, weights, query, key)

    def _composed(self, step: int, maps: Tensor, query: Tensor, key: Tensor) -> Tensor:
        total = map_heads(self.base[step].to(maps.dtype), maps)
        for weight, heads, last in zip(self.maps[step], (query, key), (-1, -2), strict=True):
            vectors = heads.transpose(1, 2).flatten(2) @ weight.to(maps.dtype)  # (B, N, 3H)
            into, out, gate = vectors.mT.unsqueeze(last).chunk(3, 1)
            total = total + out * (into * maps).sum(1, keepdim=True) + gate.tanh() * maps
        return total


class GatedAttention(SoftmaxAttention):
    """Softmax attention whose head outputs are multiplied by a sigmoid gate of the query's token.

    Source: Qiu et al., 2025 (arXiv 2505.06708), gate after attention, per head and dimension.
        out = σ(W x_i) ⊙ Σ_j P_ij v_j
    Departs from the source: nothing.

    Arguments and engines are the same as for `SoftmaxAttention`.
    """

    def build(self, options: SoftmaxArguments) -> None:  # type: ignore[override]
        """Add the gate's projection."""
        super().build(options)
        width = self.layout.out * self.value_head_dim
        self.gate_proj = nn.Linear(self.embed_dim, width, bias=self.use_bias)

    def gate(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the gated outputs."""
        gates = self.gate_proj(x).sigmoid().unflatten(-1, (out.shape[1], -1))
        return out * gates.transpose(1, 2)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost of softmax attention and of the gate."""
        return with_gate(super().cost(seq_len), self, seq_len)


class DifferentialAttention(SoftmaxAttention):
    """The difference of two softmax maps that share keys and values: Differential Transformer V2.

    Source: Ye et al., Differential Transformer V2, January 2026 (microsoft/unilm).
        out = Σ_j (P_ij − σ(λ(x_i)) P'_ij) v_j
    Departs from the source: nothing. Query heads 2o and 2o + 1 form output head o, so masks and
    score maps have 2H heads. Arguments and engines are the same as for `SoftmaxAttention`.
    """

    def build(self, options: SoftmaxArguments) -> None:  # type: ignore[override]
        """Create the projection that yields λ."""
        super().build(options)
        self.lambda_proj = nn.Linear(self.embed_dim, self.num_heads, bias=False)

    def head_layout(self) -> HeadLayout:
        """Return a layout with two query heads per head."""
        plain, heads = super().head_layout(), self.num_heads
        return replace(plain, query=2 * heads, out=2 * heads, gated=heads)

    def gate(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the differences of paired heads."""
        first, second = out.unflatten(1, (-1, 2)).unbind(2)
        return first - self.lambda_proj(x).sigmoid().mT[..., None] * second

    def cost(self, seq_len: int) -> Cost:
        """Return the cost of its products by the papers' rule."""
        heads, maps, e, e_v = self.num_heads, 2 * self.num_heads, self.head_dim, self.value_head_dim
        n, c = seq_len, self.embed_dim
        products = [(n, c, maps * e), (n, heads * e_v, c), (n, c, heads)]
        products += [(n, self.key_embed_dim, self.num_kv_heads * size) for size in (e, e_v)]
        products += [(n, e, maps * n), (n, n, maps * e_v)]
        flops = sum(product_flops(*sizes) for sizes in products)
        return Cost(flops, sum(m * k * p for m, k, p in products), self.count_parameters())


class ParallaxAttention(Attention):
    """Local linear regression instead of a weighted mean, with a slope from a learned probe.

    Source: Parallax, 2026 (arXiv 2605.29157).
        w_ij = P_ij (1 − r_i · (k_j − k̄_i)),    k̄_i = Σ_j P_ij k_j,    r_i = W x_i
    Rows sum to 1; weights may be negative.
    Departs from the source: W is initially N(0, 0.02²).
    """

    def build(self, options: LayerOptions) -> None:
        """Add the probe's projection."""
        super().build(options)
        self.probe_proj = nn.Linear(self.embed_dim, self.num_heads * self.head_dim, bias=False)
        nn.init.normal_(self.probe_proj.weight, std=0.02)

    def reference_scores(self, query: Tensor, key: Tensor, *positions: Tensor) -> Tensor:
        """Return scaled dot products."""
        return _dots(query, key)

    def query_side(self, x: Tensor) -> Tensor:
        """Return the probes r, (B, H, N, E)."""
        probes: Tensor = self.probe_proj(x).unflatten(-1, (self.num_heads, -1))
        return probes.transpose(1, 2)

    def normalise(self, scores: Tensor, query: Tensor, key: Tensor, side: Tensor) -> Tensor:
        """Return the weights of the local linear fit."""
        weights, slopes = torch.softmax(scores, -1), side @ key.mT
        return weights * (1.0 + (weights * slopes).sum(-1, keepdim=True) - slopes)


class EllipticalAttention(Attention):
    """Dot products in a learned metric per head.

    Source: Nielsen et al., 2024 (arXiv 2406.13770).
        w_ij ∝ exp(q_iᵀ M k_j / √E),    M = diag(m), m > 0
    Departs from the source: m is learned, per head, and initially 1 (in the paper it is estimated
    from the change of values between layers, and divided by its largest entry).
    """

    def build(self, options: LayerOptions) -> None:
        """Add the metric."""
        super().build(options)
        self.log_metric = nn.Parameter(torch.zeros(self.num_heads, 1, self.head_dim))

    def reference_scores(self, query: Tensor, key: Tensor, *positions: Tensor) -> Tensor:
        """Return the products in the metric."""
        return _dots(query * self.log_metric.exp().to(query.dtype), key)
