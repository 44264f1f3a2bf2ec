"""The papers' closed forms for one attention layer, which the layers' own are tested by.

Counting rule of the papers: a product (m x k)(k x n) costs m n (2k − 1), multiplications and
additions alike. Softmax, masks and feature maps cost nothing. Sources: MGK, ICML 2022, appendix B;
FiSHformer appendix D. Every function takes the heads H of the *baseline*; MGK with K components
then uses H/K heads of the same size. All work on integers, fractions and computer algebra symbols,
and return exact results (integers where they are whole).

    N seq_len    C embed_dim    E head_dim    H num_heads of the baseline    K num_components
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

# Integers, fractions or sympy expressions.
Number = Any


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
