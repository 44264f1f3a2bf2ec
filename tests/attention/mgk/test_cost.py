"""Operations of MGK and of linear attention, symbol by symbol, beside products written out."""

from __future__ import annotations

import sympy

from lit_probattn.attention.call import HeadLayout
from lit_probattn.attention.cost.counting import Sizes
from lit_probattn.attention.cost.mgk import Features, Mixture, linear, mixture, softmax

N, H, E, C, MORE = sympy.symbols("N H E C MORE", positive=True)
K = 1 + MORE  # components


def sizes(heads, keys_per_head=1):
    return Sizes(N, C, C, HeadLayout(*[heads] * 4, E, E, keys_per_head), num_parameters=0)


# H heads of the baseline, as in appendix B; a mixture has H/K.
SOFTMAX = softmax(sizes(H), gaussian=False)
MGK = mixture(sizes(H / K, K), Mixture(K))
SMGK = mixture(sizes(H / K), Mixture(K, shifted=True))


def product(rows, inner, cols):
    """Operations of a matrix product by definition: inner multiplications, inner - 1 additions."""
    return rows * cols * inner + rows * cols * (inner - 1)


PROJECTION = product(N, C, E)


def zero(expression):
    assert sympy.simplify(sympy.expand(expression)) == 0


def test_operations_are_those_of_the_products():
    def by_parts(heads, keys, components):
        scores = components * product(N, E, N) + (components - 1) * N**2
        inside = 2 * PROJECTION + keys + scores + product(N, N, E)
        return heads * inside + product(N, heads * E, H * E)

    zero(SOFTMAX.paper_flops - by_parts(H, PROJECTION, 1))
    zero(MGK.paper_flops - by_parts(H / K, K * PROJECTION, K))
    zero(SMGK.paper_flops - by_parts(H / K, PROJECTION + K * N * E, K))


def test_corrected_constant_is_not_the_printed_one():
    def total(constant):
        pairs = N**2 * H * (2 * (K + 1) * E - 1)
        return (pairs + N * H * E * (2 * (K + 2) * C + 2 * H * E - constant)) / K

    zero(MGK.paper_flops - total(2 * K + 3))
    zero(MGK.paper_flops_printed - total(3 * K + 2))
    assert SMGK.paper_flops_printed == SMGK.paper_flops


def test_savings_are_differences():
    saving = N**2 * (2 * E - 1) + N * E * (4 * C + 2 * H * E - 3)
    zero(SOFTMAX.paper_flops - MGK.paper_flops - (K - 1) * H * saving / K)
    printed = (SOFTMAX.paper_flops - MGK.paper_flops_printed).subs(MORE, 1)
    zero(printed - N**2 * H * (2 * E - 1) / 2 - N * H * E * (2 * C + H * E - 1))


def test_limits_of_the_ratio():
    ratio = MGK.paper_flops / SOFTMAX.paper_flops
    zero(sympy.limit(ratio, N, sympy.oo) - (2 * (K + 1) * E - 1) / (K * (4 * E - 1)))
    zero(sympy.limit(ratio, C, sympy.oo) - (K + 2) / (3 * K))


def test_linear_forms_are_those_of_their_products():
    sums = product(E, N, E) + (N - 1) * E
    outputs = product(N, E, E) + product(N, E, 1) + N * E
    mix = (2 * K - 1) * N * E

    def by_parts(heads, keys):
        return heads * (2 * PROJECTION + keys + sums + outputs) + product(N, heads * E, C)

    def found(keys_per_head, **features):
        return linear(sizes(H, keys_per_head), Features(E, divides=1, **features)).paper_flops

    zero(found(1) - by_parts(H, PROJECTION))
    zero(found(K, num_components=K) - by_parts(H, K * PROJECTION + mix))
    shifted = PROJECTION + K * N * E + mix
    zero(found(1, num_components=K, shifted=True) - by_parts(H, shifted))
