"""Closed forms: the papers' for one attention layer, and what our models cost to the unit.

Counting rule of the papers: a product (m x k)(k x n) costs m n (2k - 1), multiplications and
additions alike. Softmax, masks and feature maps cost nothing. Sources: MGK, ICML 2022, appendix B;
FiSHformer appendix D. Every function takes the heads H of the *baseline*; MGK with K components
then uses H/K heads of the same size. All work on integers, fractions and computer algebra symbols,
and return exact results (integers where they are whole).

    N seq_len    C embed_dim    E head_dim    H num_heads of the baseline    K num_components

The attention part comes from the layer's own `cost(seq_len)`, which states what its reference
runs. The forms here add blocks, embeddings and heads, the parameters of the layers we know, and
what a backend runs beyond the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import torch

from lit_probattn.attention import Attention, LinearAttention, MGKAttention, SoftmaxAttention

# Integers, fractions or sympy expressions.
Number = Any

T = TypeVar("T")


def _whole(value: Number) -> Number:
    """Return an integer where a fraction is one."""
    if isinstance(value, Fraction) and value.denominator == 1:
        return int(value)
    return value


def _over(value: Number, divisor: Number) -> Number:
    """Divide exactly."""
    if isinstance(value, (int, Fraction)) and isinstance(divisor, (int, Fraction)):
        return Fraction(value) / Fraction(divisor)
    return value / divisor


def product_operations(rows: Number, inner: Number, cols: Number) -> Number:
    """Return the cost of one matrix product: rows · cols · (2 inner − 1)."""
    return rows * cols * (2 * inner - 1)


def _output(n: Number, used_width: Number, out_dim: Number) -> Number:
    """Return the cost of the output projection from `used_width` to `out_dim`."""
    return product_operations(n, used_width, out_dim)


# ---------------------------------------------------------------------- operations
def softmax_operations(
    n: Number, h: Number, e: Number, c: Number, out_dim: Number | None = None
) -> Number:
    """Return N²H(4E − 1) + NHE(6C + 2HE − 5); `out_dim` replaces the output width HE."""
    total = n * n * h * (4 * e - 1) + n * h * e * (6 * c + 2 * h * e - 5)
    if out_dim is not None:
        total = total - _output(n, h * e, h * e) + _output(n, h * e, out_dim)
    return _whole(total)


def mgk_operations(
    n: Number, h: Number, e: Number, c: Number, k: Number, out_dim: Number | None = None
) -> Number:
    """Return N²H(2(K+1)E − 1)/K + NHE[2(K+2)C/K + 2HE/K − (2K+3)/K], the corrected total."""
    total = _over(n * n * h * (2 * (k + 1) * e - 1), k)
    total += _over(n * h * e * (2 * (k + 2) * c + 2 * h * e - (2 * k + 3)), k)
    return _with_output(total, n, h, e, k, out_dim)


def mgk_operations_printed(n: Number, h: Number, e: Number, c: Number, k: Number) -> Number:
    """Return the total as the paper simplifies it: the constant reads −(3K+2)/K.

    It is NHE(K − 1)/K below what the paper's own per-head expression adds up to.
    """
    return _whole(mgk_operations(n, h, e, c, k) - printed_gap(n, h, e, k))


def printed_gap(n: Number, h: Number, e: Number, k: Number) -> Number:
    """Return corrected minus printed MGK operations, NHE(K − 1)/K."""
    return _whole(_over(n * h * e * (k - 1), k))


def smgk_operations(
    n: Number, h: Number, e: Number, c: Number, k: Number, out_dim: Number | None = None
) -> Number:
    """Return N²H(2(K+1)E − 1)/K + NHE(6C + 2HE − 4)/K; K shift additions per key are counted."""
    total = _over(n * n * h * (2 * (k + 1) * e - 1), k)
    total += _over(n * h * e * (6 * c + 2 * h * e - 4), k)
    return _with_output(total, n, h, e, k, out_dim)


def _with_output(
    total: Number, n: Number, h: Number, e: Number, k: Number, out_dim: Number | None
) -> Number:
    if out_dim is not None:
        used = _over(h * e, k)
        total = total - _output(n, used, h * e) + _output(n, used, out_dim)
    return _whole(total)


def mgk_saving(n: Number, h: Number, e: Number, c: Number, k: Number) -> Number:
    """Return softmax minus MGK: ((K−1)/K) H [N²(2E − 1) + NE(4C + 2HE − 3)]."""
    inner = n * n * (2 * e - 1) + n * e * (4 * c + 2 * h * e - 3)
    return _whole(_over((k - 1) * h * inner, k))


def mgk_saving_printed(n: Number, h: Number, e: Number, c: Number) -> Number:
    """Return the paper's saving for two components, N²H(E − ½) + NHE(2C + HE − 1)."""
    return _whole(_over(n * n * h * (2 * e - 1), 2) + n * h * e * (2 * c + h * e - 1))


def linear_core(n: Number, e: Number) -> Number:
    """Return one head's linear attention after its features, 4NE² + 3NE − N − E² − E."""
    return 4 * n * e * e + 3 * n * e - n - e * e - e


def linear_operations(
    n: Number, h: Number, e: Number, c: Number, out_dim: Number | None = None
) -> Number:
    """Return H heads of linear attention and the output projection (not in the paper)."""
    width = h * e
    total = h * (3 * n * e * (2 * c - 1) + linear_core(n, e))
    return total + _output(n, width, width if out_dim is None else out_dim)


def mlk_operations(
    n: Number, h: Number, e: Number, c: Number, k: Number, out_dim: Number | None = None
) -> Number:
    """Return H/K heads of MLK: (K+2)NE(2C−1) + (2K−1)NE + core each, and the output projection."""
    per_head = (k + 2) * n * e * (2 * c - 1) + (2 * k - 1) * n * e + linear_core(n, e)
    return _mixed_linear(per_head, n, h, e, k, out_dim)


def smlk_operations(
    n: Number, h: Number, e: Number, c: Number, k: Number, out_dim: Number | None = None
) -> Number:
    """Return H/K heads of sMLK: 3NE(2C−1) + KNE + (2K−1)NE + core each, and the output."""
    per_head = 3 * n * e * (2 * c - 1) + k * n * e + (2 * k - 1) * n * e + linear_core(n, e)
    return _mixed_linear(per_head, n, h, e, k, out_dim)


def _mixed_linear(
    per_head: Number, n: Number, h: Number, e: Number, k: Number, out_dim: Number | None
) -> Number:
    used = _over(h * e, k)
    out = _output(n, used, h * e if out_dim is None else out_dim)
    return _whole(_over(per_head * h, k) + out)


def fish_score_operations(n: Number, h: Number, g: Number, e: Number, c: Number) -> Number:
    """Return FiSH's score maps, [2(E + H)G − H]N² + 2NGE(2C − 1), with G global heads."""
    return (2 * (e + h) * g - h) * n * n + 2 * n * g * e * (2 * c - 1)


def softmax_score_operations(n: Number, h: Number, e: Number, c: Number) -> Number:
    """Return softmax attention's score maps, N²H(2E − 1) + 2NHE(2C − 1)."""
    return n * n * h * (2 * e - 1) + 2 * n * h * e * (2 * c - 1)


def fish_operations(n: Number, h: Number, g: Number, e: Number, c: Number) -> Number:
    """Return a whole FiSH layer: (2HE + 2GE + 2GH − H)N² + [4(H+G)EC − 2(H+G)E − C]N."""
    quadratic = 2 * h * e + 2 * g * e + 2 * g * h - h
    return quadratic * n * n + (4 * (h + g) * e * c - 2 * (h + g) * e - c) * n


# ---------------------------------------------------------------------- parameters
def softmax_parameters(h: Number, e: Number, c: Number) -> Number:
    """Return 3HEC + (HE)²."""
    return 3 * h * e * c + (h * e) ** 2


def mgk_parameters(h: Number, e: Number, c: Number, k: Number) -> Number:
    """Return ((K+2)/K) HEC + (HE)²/K + H."""
    return _whole(_over((k + 2) * h * e * c + (h * e) ** 2, k) + h)


def smgk_parameters(h: Number, e: Number, c: Number, k: Number) -> Number:
    """Return (3/K) HEC + (HE)²/K + HE + H."""
    return _whole(_over(3 * h * e * c + (h * e) ** 2, k) + h * e + h)


def mgk_parameter_saving(h: Number, e: Number, c: Number, k: Number) -> Number:
    """Return softmax minus MGK parameters, ((K−1)/K)(2HEC + (HE)²) − H."""
    return _whole(_over((k - 1) * (2 * h * e * c + (h * e) ** 2), k) - h)


def smgk_parameter_saving(h: Number, e: Number, c: Number, k: Number) -> Number:
    """Return softmax minus sMGK parameters, ((K−1)/K)(3HEC + (HE)²) − HE − H."""
    return _whole(_over((k - 1) * (3 * h * e * c + (h * e) ** 2), k) - h * e - h)


class NoFormulaError(NotImplementedError):
    """A variant gives no closed form for its cost."""


@dataclass(frozen=True)
class ExactCost:
    """Closed forms of one scope (model, layers or attention), forward, one batch.

    Args:
        macs: multiply-adds in matrix products of the reference.
        norm_operations: what fvcore adds for normalisations, five per element.
        num_parameters: parameters.
    """

    macs: int
    norm_operations: int
    num_parameters: int


# ---------------------------------------------------------------------- attention layers
def _projection_parameters(layer: Attention) -> int:
    """Count the four projections from sizes."""
    inner = layer.layout.query * layer.head_dim
    values = layer.layout.value * layer.value_head_dim
    outer = layer.num_heads * layer.value_head_dim
    weights = layer.embed_dim * (inner + outer) + layer.key_embed_dim * (layer.key_width + values)
    biases = inner + layer.key_width + values + layer.embed_dim if layer.use_bias else 0
    return weights + biases


def _softmax_parameters(layer: SoftmaxAttention) -> int:
    return _projection_parameters(layer)


def _mgk_parameters(layer: MGKAttention) -> int:
    """Projections; per owner K priors (setting A), K·E shifts, K variances (if learned)."""
    core, owners = layer.core, layer.core.num_mixtures
    total, k = _projection_parameters(layer), layer.num_components
    if core.e_step == "learned" and core.prior is not None:
        per_head = {"layer": k, "head": owners * k}
        share = core.prior.share
        total += per_head[share] if share in per_head else owners * k * core.prior.value.shape[-1]
    if layer.shifted_keys:
        total += owners * k * layer.head_dim
    if core.variance.log_variance is not None:
        total += owners * k
    return total


PARAMETERS: dict[type[Attention], Callable[[Any], int]] = {
    SoftmaxAttention: _softmax_parameters,
    MGKAttention: _mgk_parameters,
}


def _of_class(table: Mapping[type[Attention], T], layer: Attention) -> T | None:
    """Return the entry of a layer's class, or of the nearest class that it is derived from."""
    return next((table[cls] for cls in type(layer).__mro__ if cls in table), None)


def attention_cost(layer: Attention, seq_len: int) -> ExactCost:
    """Return the closed forms of one layer over one sequence.

    Raises:
        NoFormulaError: the variant has none.
    """
    try:
        cost = layer.cost(seq_len)
    except NotImplementedError as error:
        raise NoFormulaError(
            f"{type(layer).__name__} gives no cost formula: implement cost(seq_len)"
        ) from error
    known = _of_class(PARAMETERS, layer)
    return ExactCost(cost.macs, 0, cost.num_parameters if known is None else known(layer))


# ---------------------------------------------------------------------- backends
def _split_count(dtype: torch.dtype) -> int:
    """Return into how many coordinates a scalar goes: low precision splits it in three."""
    return 1 if dtype in (torch.float32, torch.float64) else 3


@dataclass(frozen=True)
class PairMacs:
    """Multiply-adds per (head, query, key position), forward.

    Args:
        scores: query·key over all components and extra coordinates.
        values: weights·value.
    """

    scores: int
    values: int


def _softmax_pairs(layer: SoftmaxAttention, backend: str, dtype: torch.dtype) -> PairMacs:
    gaussian = layer.core.score == "gaussian" and backend not in ("reference", "triton")
    parts = _split_count(torch.float32 if backend == "blockwise" else dtype)
    size = layer.head_dim + (parts if gaussian else 0)
    if backend == "sdpa":
        size = max(size, layer.value_head_dim)
        return PairMacs(size, size)
    return PairMacs(size, layer.value_head_dim)


def _mgk_pairs(layer: MGKAttention, backend: str, dtype: torch.dtype) -> PairMacs:
    """K keys, with the coordinates that carry prior and norm; fused: K values too.

    Kernels add norms and priors as terms, and shifted keys share one product.
    """
    k = layer.num_components
    if backend == "triton":
        products = 1 if layer.core.shares_product else k
        return PairMacs(products * layer.head_dim, layer.value_head_dim)
    if backend == "reference":
        return PairMacs(k * layer.head_dim, layer.value_head_dim)
    parts = _split_count(torch.float32 if backend == "blockwise" else dtype)
    size = layer.head_dim + parts
    if layer.core.score == "gaussian" and not layer.core.variance.is_equal:
        size += {1: 1, 3: 6}[parts]
    if backend == "sdpa":
        size = max(size, layer.value_head_dim)
        return PairMacs(k * size, k * size)
    return PairMacs(k * size, layer.value_head_dim)


def _shift_products(layer: MGKAttention) -> int:
    """Return multiply-adds per position of query · shift and, for Gaussian scores, key · shift."""
    owners = layer.core.num_mixtures
    heads = layer.num_heads + (owners if layer.core.score == "gaussian" else 0)
    return heads * layer.num_components * layer.head_dim


PAIRS: dict[type[Attention], Callable[[Any, str, torch.dtype], PairMacs]] = {
    SoftmaxAttention: _softmax_pairs,
    MGKAttention: _mgk_pairs,
}


def m_step_pair_macs(layer: Attention) -> int:
    """Return what setting B adds per pair in training: component scores for the M-step."""
    if isinstance(layer, MGKAttention) and layer.core.by_m_step:
        return layer.num_components * layer.head_dim
    return 0


def stated_backend(layer: Attention) -> str:
    """Return the implementation whose products `layer.cost(seq_len).macs` states.

    Linear attention states its O(N) form; its reference stores the N x N map to be a yardstick.
    """
    return "blockwise" if isinstance(layer, LinearAttention) else "reference"


def backend_macs(
    layer: Attention,
    seq_len: int,
    backend: str,
    *,
    train: bool = False,
    dtype: torch.dtype = torch.float32,
) -> int | None:
    """Return what a backend runs for one layer and one sequence, or None if we have no form.

    Forward, a fused backend may run more products than the reference: extra coordinates that carry
    norms and priors, and values once per component. Forward and backward together are three times
    the forward, plus what is computed again: blockwise repeats the scores; PyTorch's fused
    attention repeats them too (five products in backward for two in forward).
    """
    macs = attention_cost(layer, seq_len).macs
    pairs_of = _of_class(PAIRS, layer)
    scale = layer.num_heads * seq_len * seq_len
    if pairs_of is None:
        return macs * (3 if train else 1) if backend == stated_backend(layer) else None
    if backend not in ("reference", "sdpa", "blockwise", "triton"):
        return None
    reference, run = pairs_of(layer, "reference", dtype), pairs_of(layer, backend, dtype)
    linear = macs - scale * (reference.scores + reference.values)
    if backend == "triton" and isinstance(layer, MGKAttention) and layer.core.shares_product:
        linear += seq_len * _shift_products(layer)
    forward = run.scores + run.values
    if not train:
        return linear + scale * forward
    repeated = {"reference": 0, "sdpa": forward // 2}
    again = repeated.get(backend, run.scores)
    return 3 * linear + scale * (3 * forward + again + m_step_pair_macs(layer))


def printed_gap_operations(layer: Attention, seq_len: int) -> int:
    """Return how far the paper's simplified total lies below the corrected one for this layer."""
    if not isinstance(layer, MGKAttention) or layer.shifted_keys:
        return 0
    k = layer.num_components
    return int(printed_gap(seq_len, layer.num_heads * k, layer.head_dim, k))


# ---------------------------------------------------------------------- models
@dataclass(frozen=True)
class ModelShape:
    """Sizes of a stack of blocks and what stands around it.

    Args:
        num_layers: blocks.
        embed_dim: C.
        mlp_dim: inner width.
        seq_len: N.
        num_sequences: sequences that one sample sends through the blocks (2 for a pair).
        batch_size: samples.
        norm_first: pre-norm, with a final norm.
        embedding_parameters: token and position tables (and an output layer tied to them).
        head_parameters: the head, and what is not in the blocks otherwise.
        head_macs: the head's products for one sample.
    """

    num_layers: int
    embed_dim: int
    mlp_dim: int
    seq_len: int
    num_sequences: int
    batch_size: int
    norm_first: bool
    embedding_parameters: int
    head_parameters: int
    head_macs: int

    @property
    def calls(self) -> int:
        """Sequences through every layer."""
        return self.batch_size * self.num_sequences


def scope_costs(shape: ModelShape, attention: ExactCost) -> dict[str, ExactCost]:
    """Return the closed forms of `attention` (all layers), `layers` (blocks) and `model`."""
    n, c, f, layers = shape.seq_len, shape.embed_dim, shape.mlp_dim, shape.num_layers
    total_attention = ExactCost(
        attention.macs * layers * shape.calls, 0, attention.num_parameters * layers
    )
    norm = 5 * n * c * shape.calls
    mlp_parameters = 2 * c * f + f + c
    blocks = ExactCost(
        total_attention.macs + 2 * n * c * f * layers * shape.calls,
        2 * layers * norm,
        total_attention.num_parameters + layers * (mlp_parameters + 4 * c),
    )
    final = shape.norm_first
    model = ExactCost(
        blocks.macs + shape.head_macs * shape.batch_size,
        blocks.norm_operations + (norm if final else 0),
        blocks.num_parameters
        + (2 * c if final else 0)
        + shape.embedding_parameters
        + shape.head_parameters,
    )
    return {"attention": total_attention, "layers": blocks, "model": model}
